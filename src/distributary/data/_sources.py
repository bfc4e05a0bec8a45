"""Sources of datasets: arrays and numbers in memory, Python objects, files, other libraries."""

import glob
import itertools
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import jax
import numpy as np
from jax.tree_util import PyTreeDef

from distributary._threads import Prefetched
from distributary.data._nodes import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    FileSource,
    IteratedStream,
    Node,
    NumberedNode,
    Path,
    Stream,
    is_peek,
)
from distributary.data._structure import (
    Block,
    TensorSpec,
    as_array,
    conform,
    flatten,
    kept,
    read_only,
    specs_of,
    stopped,
)
from distributary.devices import Nest
from distributary.errors import (
    InvalidTypeError,
    InvalidValueError,
    UnsupportedError,
    described,
)
from distributary.tracing import native


@final
@dataclass(frozen=True, eq=False)
class Slices(NumberedNode):
    """The rows of arrays.

    Attributes:
        leaves: NumPy arrays with the same number of rows.
        structure: Structure of an element.
    """

    leaves: tuple[np.ndarray, ...]
    structure: PyTreeDef
    batched = False
    in_memory = True

    def cardinality(self) -> int:
        return len(self.leaves[0])

    def row(self, number: int) -> Nest:
        # The element of an array of objects can be anything.
        rows = [leaf[number] for leaf in self.leaves]
        return self.structure.unflatten(
            [
                row if leaf.dtype.hasobject else read_only(native(row))
                for row, leaf in zip(rows, self.leaves, strict=True)
            ]
        )

    def rows(self, numbers: np.ndarray) -> Block:
        return self.structure.unflatten(
            [native(leaf.take(numbers, axis=0)) for leaf in self.leaves]
        )

    def part(self, start: int, count: int) -> Block:
        """Returns consecutive rows."""
        rows = slice(start, start + count)
        # A copy, because a batch may still be on its way when the user writes to the array.
        return self.structure.unflatten([native(leaf[rows].copy()) for leaf in self.leaves])

    def spec(self) -> Nest:
        specs = [TensorSpec(leaf.shape[1:], leaf.dtype.newbyteorder("=")) for leaf in self.leaves]
        return self.structure.unflatten(specs)

    def label(self) -> str:
        return f"slices({self.cardinality()})"


def slices(tensors: Nest) -> Slices:
    """Returns the node of `from_tensor_slices`."""
    leaves, tree = flatten(tensors)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        raise UnsupportedError(
            "from_tensor_slices: got an array that a step computes, which has no values while the"
            " step is traced. Make the dataset outside of the step, or loop over the array itself."
        )
    arrays = [np.asarray(as_array(leaf)) for leaf in leaves]
    if not arrays:
        raise InvalidValueError(
            f"from_tensor_slices: {tensors!r} holds no arrays. Pass an array or a nest of arrays,"
            " whose rows (dim 0) become the elements."
        )
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
class Range(NumberedNode):
    """Numbers at equal distances; endless if `stop` is None."""

    start: int
    stop: int | None
    step: int
    dtype: np.dtype
    batched = False
    in_memory = True
    pattern = "range({start}, {stop}, {step})"

    def cardinality(self) -> int:
        if self.stop is None:
            return INFINITE_CARDINALITY
        return len(range(self.start, self.stop, self.step))

    def row(self, number: int) -> np.generic:
        return self.dtype.type(self.start + number * self.step)

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        return (self.start + numbers * self.step).astype(self.dtype)

    def spec(self) -> TensorSpec:
        return TensorSpec((), self.dtype)


@final
@dataclass(frozen=True, eq=False)
class Single(NumberedNode):
    """One element."""

    element: Nest
    in_memory = True
    pattern = "tensors"

    def cardinality(self) -> int:
        return 1

    def row(self, number: int) -> Nest:
        return read_only(self.element)

    def spec(self) -> Nest:
        return specs_of(self.element)


# Datasets of Python objects: sequences, iterables, generators and iterators.


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
        try:
            item = self.items[int(number)]
        except StopIteration as error:
            raise stopped(f"item {number} of {type(self.items).__name__}") from error
        return kept(self.convert(item))

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
    pattern = "{name}"

    def cardinality(self) -> int:
        return self.count

    def elements(self, path: Path) -> Stream:
        return IteratedStream(map(kept, self.start()))

    def spec(self) -> Nest:
        return super().spec() if self.signature is None else self.signature


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
class OneShot(Iterator[Nest]):
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

    def elements(self, path: Path) -> Stream:
        if is_peek(path):
            return IteratedStream(self.items.peek())
        self.items.started = True
        return IteratedStream(self.items)

    def label(self) -> str:
        return type(self.items.iterator).__name__


# Names of files, and datasets of them.

FilePaths: TypeAlias = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
"""The name of a file, or several names."""


def file_names(paths: FilePaths, what: str) -> tuple[str, ...]:
    """Returns one or several names of files as a tuple.

    Raises:
        InvalidTypeError: if they are not names.
        InvalidValueError: if there are none, or one does not exist.
    """
    if isinstance(paths, (str, os.PathLike)):
        paths = [paths]
    elif isinstance(paths, np.ndarray):
        paths = paths.tolist() if paths.ndim else [paths.item()]
    elif hasattr(paths, "as_numpy_iterator"):  # a dataset of names, read once
        paths = [np.asarray(name).item() for name in paths.as_numpy_iterator()]
    try:
        names = tuple(os.fsdecode(name) for name in paths)
    except TypeError:
        raise InvalidTypeError(
            f"{what}: filenames is {paths!r}, expected the name of a file, or a list of names."
        ) from None
    if not names:
        raise InvalidValueError(f"{what}: the list of files is empty, expected at least one name.")
    for name in names:
        if not os.path.isfile(name):
            raise InvalidValueError(
                f"{what}: the file {name!r} does not exist (in {os.getcwd()}). For a pattern use"
                " Dataset.list_files."
            )
    return names


def matching_files(patterns: FilePaths) -> tuple[str, ...]:
    """Returns the files that match a glob pattern, or one of several, sorted by name.

    Raises:
        InvalidValueError: if there are none.
    """
    if isinstance(patterns, (str, os.PathLike)):
        patterns = [patterns]
    names = {
        name
        for pattern in patterns
        for name in glob.glob(os.fsdecode(pattern), recursive=True)
        if os.path.isfile(name)
    }
    if not names:
        raise InvalidValueError(
            f"list_files: no file matches {[os.fsdecode(p) for p in patterns]} (in {os.getcwd()})."
            " Check the pattern, or give the whole path."
        )
    return tuple(sorted(names))


@final
@dataclass(frozen=True, eq=False)
class FileNames(NumberedNode, FileSource):
    """Names of files."""

    files: tuple[str, ...]
    batched = False

    def cardinality(self) -> int:
        return len(self.files)

    def row(self, number: int) -> str:
        return self.files[number]

    def spec(self) -> TensorSpec:
        return TensorSpec((), object)

    def label(self) -> str:
        return f"list_files({len(self.files)})"


# Datasets of other libraries, recognized by their classes without importing them.


def node_of(source: Any, what: str) -> Node:
    """Returns the node of a dataset of this or another library, or of any Python iterable.

    Args:
        source: A dataset of ours, tf.data, grain, torch, Hugging Face or Keras, or any iterable.
        what: Start of error messages about it: the function and the origin of `source`.

    Raises:
        InvalidTypeError: if it cannot be iterated over.
    """
    if isinstance(getattr(source, "node", None), Node):
        return source.node
    for package, names, convert in _LIBRARIES:
        if _is_of(source, package, *names):
            return convert(source)
    is_iterable = hasattr(source, "__iter__") and not isinstance(source, (str, bytes))
    has_numbers = hasattr(source, "__getitem__") and hasattr(source, "__len__")
    if isinstance(source, (list, tuple)) or (has_numbers and not hasattr(source, "__iter__")):
        return RandomAccess(source)
    if not is_iterable:
        raise InvalidTypeError(
            f"{what} {described(source)}, which cannot be iterated. Expected"
            " an iterable of batches, such as a distributary.data.Dataset."
        )
    if hasattr(source, "__next__"):
        return Once(OneShot(source))
    return Iterated(lambda: iter(source), _length_of(source), type(source).__name__)


def _length_of(source: Sized) -> int:
    try:
        return len(source)
    except TypeError:
        return UNKNOWN_CARDINALITY


def _is_of(value: object, package: str, *names: str) -> bool:
    """Returns whether one of a value's classes is from a package and has one of these names."""
    return any(
        cls.__name__ in names and cls.__module__.split(".")[0] == package
        for cls in type(value).__mro__
    )


def _from_tf_data(source: Any) -> Node:
    for spec in jax.tree.leaves(source.element_spec):
        if _is_of(spec, "tensorflow", "SparseTensorSpec", "RaggedTensorSpec"):
            raise InvalidTypeError(
                f"The tf.data.Dataset yields {spec}; sparse and ragged tensors have no JAX"
                " counterpart. Map them with tf.sparse.to_dense or to_tensor first."
            )
    start = lambda: iter(source.as_numpy_iterator())
    return Iterated(start, int(source.cardinality()), "tf.data.Dataset")


def _from_torch_loader(source: Any) -> Node:
    if getattr(source, "batch_size", None) is None and source.batch_sampler is None:
        raise InvalidValueError(
            "The torch DataLoader has batch_size=None, so it yields single examples. Give it the"
            " global batch size."
        )
    return _from_torch_iterable(source, "torch DataLoader", batched=True)


def _from_torch_iterable(
    source: Any, name: str = "IterableDataset", batched: bool | None = None
) -> Node:
    return Iterated(lambda: map(_from_torch, source), _length_of(source), name, batched=batched)


def _from_torch(value: Any) -> Nest:
    """Converts torch tensors of a nest to NumPy arrays, and its lists, from collate, to tuples."""
    if isinstance(value, dict):
        return {key: _from_torch(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_from_torch, value))
    if isinstance(value, (list, tuple)):
        return tuple(map(_from_torch, value))
    return value.detach().cpu().numpy() if _is_of(value, "torch", "Tensor") else value


def _from_grain_map(source: object) -> Node:
    def present(item: Nest | None) -> Nest:
        if item is None:
            raise InvalidValueError(
                "The grain MapDataset leaves out elements, as filter does, so its elements do not"
                " have fixed numbers. Pass dataset.to_iter_dataset()."
            )
        return item

    return RandomAccess(source, present)


def _iterated(source: Any, package: str = "") -> Node:
    name = f"{package} {type(source).__name__}".strip()
    return Iterated(lambda: iter(source), UNKNOWN_CARDINALITY, name)


def is_hugging_face(source: object) -> bool:
    """Returns whether a value is a dataset of the library `datasets`."""
    return _is_of(source, "datasets", "Dataset", "IterableDataset")


def _from_hugging_face(source: Any) -> Node:
    arrays = source.with_format("numpy")
    if not hasattr(source, "__len__"):
        return _iterated(arrays)
    return RandomAccess(arrays, getitems=lambda numbers: _columns(arrays[numbers.tolist()]))


def _columns(block: dict[str, Any]) -> dict[str, Any]:
    for name, column in block.items():
        kind = getattr(getattr(column, "dtype", None), "kind", "")
        if kind == "O" and len(column) and hasattr(column[0], "shape"):
            shapes = sorted({item.shape for item in column})
            raise InvalidValueError(
                f"The column {name!r} holds arrays of shapes {shapes[:4]}; the arrays of a batch"
                " must agree. Map them to one shape first."
            )
    return block


def _from_py_dataset(source: Any) -> Node:
    count = source.num_batches

    def start() -> Iterator[Any]:
        source.on_epoch_begin()
        for number in itertools.count() if count is None else range(count):
            yield source[number]
        source.on_epoch_end()

    size = INFINITE_CARDINALITY if count is None else int(count)
    return Iterated(start, size, type(source).__name__, batched=True)


# Package, names of classes, and the function that makes a node of their objects.
_LIBRARIES: tuple[tuple[str, tuple[str, ...], Callable[[Any], Node]], ...] = (
    # First, because these are datasets of torch, too, where torch is installed.
    ("datasets", ("Dataset", "IterableDataset"), _from_hugging_face),
    ("tensorflow", ("DatasetV2",), _from_tf_data),
    ("torch", ("DataLoader",), _from_torch_loader),
    ("torch", ("IterableDataset",), _from_torch_iterable),
    ("torch", ("Dataset",), lambda source: RandomAccess(source, _from_torch, False)),
    ("grain", ("MapDataset",), _from_grain_map),
    ("grain", ("IterDataset", "DataLoader"), lambda source: _iterated(source, "grain")),
    ("keras", ("PyDataset",), _from_py_dataset),
)
