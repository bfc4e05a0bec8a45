"""Datasets of Python objects: sequences, iterables, generators and iterators."""

import itertools
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import numpy as np

from distributary.data._nodes import Node, NumberedNode
from distributary.data._options import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from distributary.data._prefetch import Prefetched
from distributary.data._streams import IteratedStream, Path, Stream, is_peek
from distributary.data._structure import Block, TensorSpec, conform, flatten, kept
from distributary.devices import Nest
from distributary.errors import InvalidTypeError, InvalidValueError


@final
@dataclass(frozen=True, eq=False)
class RandomAccess(NumberedNode):
    """The items of an object with `__len__` and `__getitem__`.

    Attributes:
        items: The object.
        convert: Turns an item into an element.
        batched: Whether the items are batches; None if only the user knows.
        getitems: Returns a block for row numbers, if the object has a quick way.
    """

    items: Any
    convert: Callable[[Any], Nest] = lambda item: item
    batched: bool | None = None
    getitems: Callable[[np.ndarray], Block] | None = None
    own_arrays = True

    def cardinality(self) -> int:
        size = len(self.items)
        # A `repeat` of grain without an end has this length.
        return INFINITE_CARDINALITY if size == sys.maxsize else size

    def row(self, number: int) -> Nest:
        return kept(self.convert(self.items[int(number)]))

    def rows(self, numbers: np.ndarray) -> Block:
        return super().rows(numbers) if self.getitems is None else self.getitems(numbers)

    def label(self) -> str:
        return f"{type(self.items).__name__}({self.cardinality()})"


@final
@dataclass(frozen=True, eq=False)
class Iterated(Node):
    """The items of a Python iterable, from the start in every pass.

    Attributes:
        start: Starts over, and returns the elements.
        count: Cardinality.
        name: Name for labels.
        signature: Nest of `TensorSpec`, or None.
        batched: Whether the items are batches; None if only the user knows.
    """

    start: Callable[[], Iterator[Nest]]
    count: int
    name: str
    signature: Nest = None
    batched: bool | None = None
    own_arrays = True

    def cardinality(self) -> int:
        return self.count

    def elements(self, path: Path) -> Stream:
        return IteratedStream(map(kept, self.start()))

    def spec(self) -> Nest:
        return super().spec() if self.signature is None else self.signature

    def label(self) -> str:
        return self.name


def generated(generator: Callable[..., Any], signature: Nest, args: Sequence[Any]) -> Node:
    """Returns the node of `from_generator`."""
    specs, _ = flatten(signature)
    if not all(isinstance(spec, TensorSpec) for spec in specs):
        raise InvalidTypeError(
            f"from_generator: output_signature is {signature!r}, expected TensorSpec or a nest of"
            " it in tuples and dicts; a list would be one array."
        )

    def start() -> Iterator[Nest]:
        items = generator(*args)
        if not hasattr(items, "__iter__"):
            raise InvalidTypeError(
                f"from_generator: generator() returned {items!r}, which cannot be iterated."
                " Use yield in it, or return a list."
            )
        if signature is None:
            return iter(items)
        return map(conform, items, itertools.repeat(signature), itertools.count())

    name = getattr(generator, "__qualname__", type(generator).__name__)
    # If not even the number of dims is known, only an element can tell.
    known = None if any(spec.shape is None for spec in specs) else signature
    return Iterated(start, UNKNOWN_CARDINALITY, f"generator({name})", known)


def signature_of(types: Nest, shapes: Nest) -> Nest:
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


@final
class OneShot:
    """An iterator that cannot start over; elements that were read ahead are not lost.

    Attributes:
        started: Whether a pass has begun.
    """

    def __init__(self, iterator: Iterator[Any]) -> None:
        self.iterator = iterator
        self._kept = map(kept, iterator)
        self.started = False
        self._ahead: Prefetched | None = None
        self._peeked: deque[Nest] = deque()
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Nest]:
        return self

    def __next__(self) -> Nest:
        with self._lock:
            return self._peeked.popleft() if self._peeked else next(self._ahead or self._kept)

    def read_ahead(self, depth: int) -> None:
        """Starts a thread that reads at most `depth` elements ahead."""
        with self._lock:
            if self._ahead is None:
                self._ahead = Prefetched(self._kept, depth)

    def peek(self) -> Iterator[Nest]:
        """Yields the next elements, which are still there for a pass."""
        for number in itertools.count():
            with self._lock:
                while len(self._peeked) <= number:
                    try:
                        self._peeked.append(next(self._ahead or self._kept))
                    except StopIteration:
                        return
                element = kept(self._peeked[number])
            yield element


@final
@dataclass(frozen=True, eq=False)
class Once(Node):
    """The rest of an iterator; each pass continues where the last one stopped."""

    items: OneShot
    own_arrays = True

    def cardinality(self) -> int:
        return UNKNOWN_CARDINALITY

    def elements(self, path: Path) -> Stream:
        if is_peek(path):
            return IteratedStream(self.items.peek())
        self.items.started = True
        return IteratedStream(self.items)

    def label(self) -> str:
        return type(self.items.iterator).__name__
