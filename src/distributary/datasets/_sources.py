"""Sources of elements: arrays, numbers, Python iterables."""

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import numpy as np

from distributary.datasets._nodes import Node
from distributary.datasets._options import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from distributary.datasets._prefetch import Prefetched
from distributary.datasets._rows import OneByOne
from distributary.datasets._streams import Numbers, Path, Rows, Stream
from distributary.datasets._structure import (
    Block,
    TensorSpec,
    as_array,
    conform,
    flatten,
    kept,
    spec_of,
    stack,
    unflatten,
)
from distributary.errors import InvalidTypeError, InvalidValueError


class RowsNode(Node):
    """Base class of nodes whose elements have numbers."""

    def __len__(self) -> int:
        return self.cardinality()

    def source(self) -> Rows | None:
        return self  # type: ignore[return-value]

    def order(self, path: Path) -> Stream:
        size = self.cardinality()
        return Numbers(None if size < 0 else size)

    def is_identity(self) -> bool:
        return self.cardinality() >= 0

    def fixed_spec(self) -> Any | None:
        return self.spec()


@final
@dataclass(frozen=True, eq=False)
class Slices(RowsNode):
    """The rows of arrays.

    Attributes:
        leaves: NumPy arrays with the same number of rows.
        tree: Structure of an element.
    """

    leaves: tuple[np.ndarray, ...]
    tree: Any

    def cardinality(self) -> int:
        return len(self.leaves[0])

    def row(self, number: int) -> Any:
        return unflatten(self.tree, [leaf[number] for leaf in self.leaves])

    def rows(self, numbers: np.ndarray) -> Block:
        return unflatten(self.tree, [leaf.take(numbers, axis=0) for leaf in self.leaves])

    def part(self, start: int, count: int) -> Block:
        """Returns consecutive rows."""
        rows = slice(start, start + count)
        # A copy, because a batch may still be on its way when the user writes to the array.
        return unflatten(self.tree, [leaf[rows].copy() for leaf in self.leaves])

    def spec(self) -> Any:
        specs = [TensorSpec(leaf.shape[1:], leaf.dtype) for leaf in self.leaves]
        return unflatten(self.tree, specs)

    def is_batched(self) -> bool | None:
        return False

    def is_in_memory(self) -> bool:
        return True

    def label(self) -> str:
        return f"slices({self.cardinality()})"


def slices(tensors: Any) -> Node:
    """Returns the node of `from_tensor_slices`."""
    leaves, tree = flatten(tensors)
    arrays = [np.asarray(as_array(leaf)) for leaf in leaves]
    if not arrays:
        raise InvalidValueError(f"from_tensor_slices: {tensors!r} holds no arrays.")
    for array in arrays:
        if array.ndim == 0:
            raise InvalidValueError(
                f"from_tensor_slices: got the scalar {array.item()!r}, which has no rows. Use"
                " from_tensors for one element."
            )
    sizes = sorted({len(array) for array in arrays})
    if len(sizes) > 1:
        raise InvalidValueError(
            f"from_tensor_slices: the arrays have {sizes} rows (dim 0); all must have the same"
            " number."
        )
    return Slices(tuple(arrays), tree)


@final
@dataclass(frozen=True, eq=False)
class Range(RowsNode):
    """Numbers at equal distances; endless if `stop` is None."""

    start: int
    stop: int | None
    step: int
    dtype: Any

    def cardinality(self) -> int:
        if self.stop is None:
            return INFINITE_CARDINALITY
        return len(range(self.start, self.stop, self.step))

    def row(self, number: int) -> Any:
        return self.dtype.type(self.start + number * self.step)

    def rows(self, numbers: np.ndarray) -> Block:
        return (self.start + numbers * self.step).astype(self.dtype)

    def spec(self) -> Any:
        return TensorSpec((), self.dtype)

    def is_batched(self) -> bool | None:
        return False

    def is_in_memory(self) -> bool:
        return True

    def label(self) -> str:
        return f"range({self.start}, {self.stop}, {self.step})"


@final
@dataclass(frozen=True, eq=False)
class Single(RowsNode):
    """One element."""

    element: Any

    def cardinality(self) -> int:
        return 1

    def row(self, number: int) -> Any:
        return self.element

    def rows(self, numbers: np.ndarray) -> Block:
        return stack([self.element])

    def spec(self) -> Any:
        return spec_of(self.element)

    def is_in_memory(self) -> bool:
        return True

    def label(self) -> str:
        return "tensors"


@final
@dataclass(frozen=True, eq=False)
class RandomAccess(OneByOne, RowsNode):
    """The items of an object with `__len__` and `__getitem__`.

    Attributes:
        items: The object.
        convert: Turns an item into an element.
        batched: Whether the items are batches.
        getitems: Returns a block for row numbers, if the object has a quick way.
    """

    items: Any
    convert: Callable[[Any], Any]
    batched: bool | None
    getitems: Callable[[np.ndarray], Block] | None = None

    def cardinality(self) -> int:
        size = len(self.items)
        # A `repeat` of grain without an end has this length.
        return INFINITE_CARDINALITY if size == sys.maxsize else size

    def row(self, number: int) -> Any:
        return kept(self.convert(self.items[int(number)]))

    def rows(self, numbers: np.ndarray) -> Block:
        return super().rows(numbers) if self.getitems is None else self.getitems(numbers)

    def fixed_spec(self) -> Any | None:
        return None

    def is_batched(self) -> bool | None:
        return self.batched

    def label(self) -> str:
        return f"{type(self.items).__name__}({self.cardinality()})"


def from_list(elements: Sequence[Any], batched: bool | None = None) -> Node:
    """Returns a dataset whose elements are the items of a list."""
    return RandomAccess(elements, lambda element: element, batched)


@final
class IteratedStream(Stream):
    def __init__(self, iterator: Iterator[Any], convert: Callable[[Any, int], Any]) -> None:
        self._iterator = iterator
        self._convert = convert
        self._number = -1

    def __next__(self) -> Any:
        item = next(self._iterator)
        self._number += 1
        return self._convert(item, self._number)


@final
@dataclass(frozen=True, eq=False)
class Iterated(Node):
    """The items of a Python iterable, from the start in every pass.

    Attributes:
        start: Starts over.
        convert: Turns an item and its number into an element.
        count: Cardinality.
        name: Name for labels.
        signature: Nest of `TensorSpec`, or None.
        batched: Whether the items are batches; None if only the user knows.
    """

    start: Callable[[], Iterator[Any]]
    convert: Callable[[Any, int], Any]
    count: int
    name: str
    signature: Any = None
    batched: bool | None = None

    def cardinality(self) -> int:
        return self.count

    def elements(self, path: Path) -> Stream:
        return IteratedStream(self.start(), lambda item, number: kept(self.convert(item, number)))

    def spec(self) -> Any:
        return super().spec() if self.signature is None else self.signature

    def is_batched(self) -> bool | None:
        return self.batched

    def makes_arrays(self) -> bool:
        return True

    def label(self) -> str:
        return self.name


def generated(generator: Callable[..., Any], signature: Any, args: Sequence[Any]) -> Node:
    """Returns the node of `from_generator`."""

    def start() -> Iterator[Any]:
        items = generator(*args)
        if not hasattr(items, "__iter__"):
            raise InvalidTypeError(
                f"from_generator: generator() returned {items!r}, which cannot be iterated."
            )
        return iter(items)

    def convert(item: Any, number: int) -> Any:
        return item if signature is None else conform(item, signature, number)

    name = getattr(generator, "__qualname__", type(generator).__name__)
    specs = jax.tree.leaves(signature, is_leaf=lambda x: isinstance(x, TensorSpec))
    # If not even the number of dims is known, only an element can tell.
    known = None if any(spec.shape is None for spec in specs) else signature
    return Iterated(start, convert, UNKNOWN_CARDINALITY, f"generator({name})", known)


def signature_of(types: Any, shapes: Any) -> Any:
    """Returns an `output_signature` for the older `output_types` and `output_shapes`."""
    if shapes is None:
        return jax.tree.map(lambda dtype: TensorSpec(None, dtype), types)
    try:
        return jax.tree.map(lambda dtype, shape: TensorSpec(shape, dtype), types, shapes)
    except (TypeError, ValueError) as error:
        raise InvalidValueError(
            f"from_generator: output_shapes is {shapes!r} with output_types {types!r}, expected a"
            f" nest of the same structure, or None: {error}."
        ) from error


class OneShot:
    """An iterator to which you can give back elements that were read ahead, so that none is lost.

    Attributes:
        started: Whether a pass has begun.
    """

    def __init__(self, iterator: Iterator[Any]) -> None:
        self.iterator = iterator
        self._kept = map(kept, iterator)
        self.started = False
        self._ahead: Prefetched | None = None
        self._returned: deque[Any] = deque()
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with self._lock:
            if self._returned:
                return self._returned.popleft()
            return next(self._ahead or self._kept)

    def read_ahead(self, depth: int) -> None:
        """Starts a thread that reads at most `depth` elements ahead."""
        with self._lock:
            if self._ahead is None:
                self._ahead = Prefetched(self._kept, depth)

    def give_back(self, elements: Sequence[Any]) -> None:
        """Gives back elements, which come next, in this order."""
        with self._lock:
            self._returned.extendleft(reversed(elements))


@final
@dataclass(frozen=True, eq=False)
class Once(Node):
    """The rest of an iterator; each pass continues where the last one stopped."""

    items: OneShot

    def cardinality(self) -> int:
        return UNKNOWN_CARDINALITY

    def elements(self, path: Path) -> Stream:
        self.items.started = True
        return IteratedStream(self.items, lambda item, _: item)

    def spec(self) -> Any:
        try:
            first = next(self.items)
        except StopIteration:
            return super().spec()
        self.items.give_back([first])
        return spec_of(first)

    def makes_arrays(self) -> bool:
        return True

    def label(self) -> str:
        return type(self.items.iterator).__name__
