"""The operations a dataset is made of: a tree, from the sources to the last operation.

Nodes hold no state; `stream` starts a pass.
"""

import abc
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import numpy as np

from distributary.datasets._options import (
    AUTOTUNE,
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Options,
)
from distributary.datasets._prefetch import Prefetched
from distributary.datasets._streams import (
    Batched,
    Chained,
    Filtered,
    Interleaved,
    Mapped,
    MappedInThreads,
    Numbers,
    Path,
    Picked,
    Rows,
    Sharded,
    Shuffled,
    Skipped,
    Stream,
    Taken,
    Unbatched,
    Zipped,
    call,
)
from distributary.datasets._structure import (
    Block,
    TensorSpec,
    flatten,
    map_specs,
    pad_and_stack,
    spec_of,
    stack,
    unflatten,
)
from distributary.errors import InvalidValueError

# Numbers drawn for a shuffle without a seed.
MAX_SEED = 2**63


class Node(abc.ABC):
    """An operation and, in its fields, the nodes it reads from."""

    @abc.abstractmethod
    def cardinality(self) -> int:
        """Number of elements, or INFINITE_CARDINALITY or UNKNOWN_CARDINALITY."""

    @abc.abstractmethod
    def label(self) -> str:
        """The operation and its arguments, to recognize a pipeline by."""

    def source(self) -> Rows | None:
        """The rows this node only puts in an order, None if it makes elements."""
        return None

    def order(self, path: Path) -> Stream:
        """The numbers of the rows of `source`, in order."""
        raise NotImplementedError

    def elements(self, path: Path) -> Stream:
        """A pass over the elements, for nodes without a `source`."""
        raise NotImplementedError

    def stream(self, path: Path) -> Stream:
        """A pass over the elements."""
        source = self.source()
        if source is not None:
            return Picked(source, self.order(path))
        return self.elements(path)

    def is_identity(self) -> bool:
        """Whether `order` is 0, 1, 2, ... in every pass."""
        return False

    def spec(self) -> Any:
        """Nest of `TensorSpec` like the elements; looks at the first element if need be."""
        for element in self.stream((0,)):
            return spec_of(element)
        raise InvalidValueError(
            f"element_spec: the dataset {describe(self)} is empty, so nothing is known about its"
            " elements."
        )

    def is_batched(self) -> bool | None:
        """Whether dim 0 of the arrays counts examples; None if only the user knows."""
        inputs = self.inputs()
        return inputs[0].is_batched() if inputs else None

    def makes_arrays(self) -> bool:
        """Whether every element consists of arrays made for it, which nobody writes to."""
        inputs = self.inputs()
        return bool(inputs) and all(node.makes_arrays() for node in inputs)

    def inputs(self) -> tuple["Node", ...]:
        """The nodes it reads from."""
        found: list[Node] = []
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, Node):
                found.append(value)
            elif isinstance(value, tuple):
                found.extend(item for item in value if isinstance(item, Node))
        return tuple(found)


def rewrite(node: Node, change: Callable[[Node], Node]) -> Node:
    """The tree with `change` applied to every node, inputs first."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(node):  # type: ignore[arg-type]
        value = getattr(node, field.name)
        new = value
        if isinstance(value, Node):
            new = rewrite(value, change)
        elif isinstance(value, tuple) and any(isinstance(item, Node) for item in value):
            new = tuple(rewrite(item, change) for item in value)
            new = value if all(a is b for a, b in zip(new, value, strict=True)) else new
        if new is not value:
            changes[field.name] = new
    return change(dataclasses.replace(node, **changes) if changes else node)  # type: ignore[type-var]


def all_nodes(node: Node) -> Iterator[Node]:
    """The nodes of a tree, inputs first."""
    for upstream in node.inputs():
        yield from all_nodes(upstream)
    yield node


def describe(node: Node) -> str:
    """The operations of a tree, in the order in which data goes through them."""
    inputs = node.inputs()
    if not inputs:
        return node.label()
    before = describe(inputs[0])
    if len(inputs) > 1:
        before = "(" + ", ".join(describe(upstream) for upstream in inputs) + ")"
    return f"{before} > {node.label()}"


class _Reordering(Node):
    """Base of operations that work the same on elements and on row numbers."""

    input: Node

    def source(self) -> Rows | None:
        return self.input.source()

    def order(self, path: Path) -> Stream:
        return self.apply(self.input.order, path, True)

    def elements(self, path: Path) -> Stream:
        return self.apply(self.input.stream, path, False)

    @abc.abstractmethod
    def apply(self, make: Callable[[Path], Stream], path: Path, numbers: bool) -> Stream:
        """The operation on the streams `make` gives; `numbers` if those are row numbers."""

    def spec(self) -> Any:
        return self.input.spec()


@final
@dataclass(frozen=True, eq=False)
class Take(_Reordering):
    """The first `count` elements."""

    input: Node
    count: int

    def cardinality(self) -> int:
        size = self.input.cardinality()
        if size == INFINITE_CARDINALITY:
            return self.count
        return size if size < 0 else min(size, self.count)

    def apply(self, make: Callable[[Path], Stream], path: Path, numbers: bool) -> Stream:
        return Taken(make(path), self.count, numbers)

    def label(self) -> str:
        return f"take({self.count})"


@final
@dataclass(frozen=True, eq=False)
class Skip(_Reordering):
    """All but the first `count` elements; none if it is -1."""

    input: Node
    count: int

    def cardinality(self) -> int:
        size = self.input.cardinality()
        if self.count < 0:
            return 0
        return size if size < 0 else max(0, size - self.count)

    def apply(self, make: Callable[[Path], Stream], path: Path, numbers: bool) -> Stream:
        if self.count < 0:
            return Taken(make(path), 0, numbers)
        return Skipped(make(path), self.count, numbers)

    def label(self) -> str:
        return f"skip({self.count})"


@final
@dataclass(frozen=True, eq=False)
class Shard(_Reordering):
    """Every `num_shards`-th element; all while `num_shards` is a hint."""

    input: Node
    num_shards: int
    index: int

    @property
    def is_hint(self) -> bool:
        """Whether the worker's shard takes its place."""
        return self.num_shards < 0

    def cardinality(self) -> int:
        size = self.input.cardinality()
        if size < 0 or self.is_hint:
            return size
        return len(range(self.index, size, self.num_shards))

    def apply(self, make: Callable[[Path], Stream], path: Path, numbers: bool) -> Stream:
        if self.is_hint:
            return make(path)
        return Sharded(make(path), self.num_shards, self.index, numbers)

    def label(self) -> str:
        return f"shard({self.num_shards}, {self.index})"


class Random(Node):
    """Base of nodes with an order of their own; without a `seed` it follows from `drawn`."""

    seed: int | None
    drawn: int

    def seed_of(self, path: Path) -> list[int]:
        """What determines the order of a pass."""
        return [self.drawn if self.seed is None else self.seed, *path]


@final
@dataclass(frozen=True, eq=False)
class Shuffle(_Reordering, Random):
    """Elements in random order."""

    input: Node
    buffer_size: int
    seed: int | None
    reshuffle: bool
    drawn: int

    def cardinality(self) -> int:
        return self.input.cardinality()

    def apply(self, make: Callable[[Path], Stream], path: Path, numbers: bool) -> Stream:
        size = self.cardinality()
        seed = self.seed_of(path if self.reshuffle else ())
        return Shuffled(make(path), self.buffer_size, seed, numbers, size if size >= 0 else None)

    def label(self) -> str:
        return f"shuffle({self.buffer_size}, seed={self.seed}, reshuffle={self.reshuffle})"


@final
@dataclass(frozen=True, eq=False)
class Repeat(_Reordering):
    """The elements `count` times; without end if it is -1."""

    input: Node
    count: int

    def cardinality(self) -> int:
        size = self.input.cardinality()
        if size == 0 or self.count == 0:
            return 0
        if self.count < 0 or size == INFINITE_CARDINALITY:
            return INFINITE_CARDINALITY
        return size if size < 0 else size * self.count

    def apply(self, make: Callable[[Path], Stream], path: Path, numbers: bool) -> Stream:
        def nth(number: int) -> Stream | None:
            return make((*path, number)) if self.count < 0 or number < self.count else None

        size = self.input.cardinality()
        return Chained(nth, numbers, size)

    def label(self) -> str:
        return f"repeat({self.count})"


@final
@dataclass(frozen=True, eq=False)
class WithOptions(_Reordering):
    """Options for what comes before and after."""

    input: Node
    options: Options

    def cardinality(self) -> int:
        return self.input.cardinality()

    def apply(self, make: Callable[[Path], Stream], path: Path, numbers: bool) -> Stream:
        return make(path)

    def is_identity(self) -> bool:
        return self.input.is_identity()

    def label(self) -> str:
        return "with_options"


def options_of(node: Node) -> Options:
    """The options of a whole tree; later ones win."""
    merged = Options()
    for own in all_nodes(node):
        if isinstance(own, WithOptions):
            merged = merged.merge(own.options)
    return merged


@final
class _ChainedRows:
    def __init__(self, sources: Sequence[Rows]) -> None:
        self._sources = sources
        self._ends = np.cumsum([len(source) for source in sources])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _find(self, number: int) -> tuple[int, int]:
        which = int(np.searchsorted(self._ends, number, side="right"))
        start = int(self._ends[which - 1]) if which else 0
        return which, start

    def row(self, number: int) -> Any:
        which, start = self._find(number)
        return self._sources[which].row(number - start)

    def rows(self, numbers: np.ndarray) -> Block:
        of = np.searchsorted(self._ends, numbers, side="right")
        pieces = []
        for which in np.unique(of):
            start = self._ends[which - 1] if which else 0
            places = np.flatnonzero(of == which)
            pieces.append((places, self._sources[which].rows(numbers[places] - start)))
        if len(pieces) == 1:
            return pieces[0][1]

        def placed(*parts: Any) -> np.ndarray:
            shapes = {part.shape[1:] for part in parts}
            if len(shapes) > 1:
                raise InvalidValueError(
                    f"batch: elements have shapes {sorted(shapes)}; the arrays of a batch must"
                    " agree. Use padded_batch to fill them up."
                )
            result = np.empty((len(numbers), *parts[0].shape[1:]), np.result_type(*parts))
            for (places, _), part in zip(pieces, parts, strict=True):
                result[places] = part
            return result

        return jax.tree.map(placed, *(piece for _, piece in pieces))


@final
@dataclass(frozen=True, eq=False)
class Concatenate(Node):
    """The elements of one dataset after those of another."""

    parts: tuple[Node, ...]

    def cardinality(self) -> int:
        sizes = [part.cardinality() for part in self.parts]
        for unusual in (INFINITE_CARDINALITY, UNKNOWN_CARDINALITY):
            if unusual in sizes:
                return unusual
        return sum(sizes)

    def source(self) -> Rows | None:
        sources = [part.source() for part in self.parts if part.is_identity()]
        if len(sources) < len(self.parts):
            return None
        return _ChainedRows([source for source in sources if source is not None])

    def order(self, path: Path) -> Stream:
        return Numbers(self.cardinality())

    def is_identity(self) -> bool:
        return self.source() is not None

    def elements(self, path: Path) -> Stream:
        def nth(number: int) -> Stream | None:
            return self.parts[number].stream(path) if number < len(self.parts) else None

        return Chained(nth, False)

    def spec(self) -> Any:
        first, *others = [part.spec() for part in self.parts]
        for other in others:
            first = _common_spec(first, other)
        return first

    def is_batched(self) -> bool | None:
        answers = {part.is_batched() for part in self.parts}
        return answers.pop() if len(answers) == 1 else None

    def label(self) -> str:
        return "concatenate"


def _common_spec(first: Any, second: Any) -> Any:
    leaves, tree = flatten(first)
    others, own = flatten(second)
    if own != tree:
        raise InvalidValueError(
            f"concatenate: the first dataset has elements of structure {tree}, another of {own}."
        )
    merged = []
    for spec, other in zip(leaves, others, strict=True):
        if spec.dtype != other.dtype or len(spec.shape) != len(other.shape):
            raise InvalidValueError(f"concatenate: {spec} and {other} cannot follow each other.")
        shape = [a if a == b else None for a, b in zip(spec.shape, other.shape, strict=True)]
        merged.append(TensorSpec(tuple(shape), spec.dtype))
    return unflatten(tree, merged)


@final
class _ZippedRows:
    def __init__(self, sources: Sequence[Rows], tree: Any) -> None:
        self._sources = sources
        self._tree = tree

    def __len__(self) -> int:
        return min(len(source) for source in self._sources)

    def row(self, number: int) -> Any:
        return unflatten(self._tree, [source.row(number) for source in self._sources])

    def rows(self, numbers: np.ndarray) -> Block:
        return unflatten(self._tree, [source.rows(numbers) for source in self._sources])


@final
@dataclass(frozen=True, eq=False)
class Zip(Node):
    """Elements of several datasets side by side."""

    parts: tuple[Node, ...]
    tree: Any

    def cardinality(self) -> int:
        sizes = [part.cardinality() for part in self.parts]
        finite = [size for size in sizes if size >= 0]
        if UNKNOWN_CARDINALITY in sizes:
            return UNKNOWN_CARDINALITY
        return min(finite) if finite else INFINITE_CARDINALITY

    def source(self) -> Rows | None:
        sources = [part.source() for part in self.parts if part.is_identity()]
        if len(sources) < len(self.parts):
            return None
        return _ZippedRows([source for source in sources if source is not None], self.tree)

    def order(self, path: Path) -> Stream:
        return Numbers(self.cardinality())

    def is_identity(self) -> bool:
        return self.source() is not None

    def elements(self, path: Path) -> Stream:
        return Zipped([part.stream(path) for part in self.parts], self.tree)

    def spec(self) -> Any:
        return unflatten(self.tree, [part.spec() for part in self.parts])

    def is_batched(self) -> bool | None:
        answers = {part.is_batched() for part in self.parts}
        return answers.pop() if len(answers) == 1 else None

    def label(self) -> str:
        return "zip"


@final
class _MappedRows:
    def __init__(self, source: Rows, fn: Callable[..., Any]) -> None:
        self._source = source
        self._fn = fn

    def __len__(self) -> int:
        return len(self._source)

    def row(self, number: int) -> Any:
        return call(self._fn, self._source.row(number))

    def rows(self, numbers: np.ndarray) -> Block:
        return stack([self.row(number) for number in numbers.tolist()])


def num_threads(num_parallel_calls: int | None) -> int | None:
    """The number meant by an argument `num_parallel_calls`; None for no threads."""
    if num_parallel_calls == AUTOTUNE:
        return os.cpu_count() or 1
    return num_parallel_calls


@final
@dataclass(frozen=True, eq=False)
class Map(Node):
    """The results of a function."""

    input: Node
    fn: Callable[..., Any]
    threads: int | None

    def cardinality(self) -> int:
        return self.input.cardinality()

    def source(self) -> Rows | None:
        source = self.input.source() if self.threads is None else None
        return None if source is None else _MappedRows(source, self.fn)

    def order(self, path: Path) -> Stream:
        return self.input.order(path)

    def is_identity(self) -> bool:
        return self.threads is None and self.input.is_identity()

    def elements(self, path: Path) -> Stream:
        upstream = self.input.stream(path)
        if self.threads is None:
            return Mapped(upstream, self.fn)
        return MappedInThreads(upstream, self.fn, self.threads)

    def makes_arrays(self) -> bool:
        return False

    def label(self) -> str:
        return f"map({_name(self.fn)})"


def _name(fn: Any) -> str:
    return getattr(fn, "__qualname__", None) or type(fn).__name__


@final
@dataclass(frozen=True, eq=False)
class Filter(Node):
    """The elements of which a function says True."""

    input: Node
    predicate: Callable[..., Any]

    def cardinality(self) -> int:
        size = self.input.cardinality()
        return size if size == 0 else UNKNOWN_CARDINALITY

    def elements(self, path: Path) -> Stream:
        return Filtered(self.input.stream(path), self.predicate)

    def spec(self) -> Any:
        return self.input.spec()

    def label(self) -> str:
        return f"filter({_name(self.predicate)})"


@final
@dataclass(frozen=True, eq=False)
class Batch(Node):
    """Elements stacked, `size` at a time; filled up to one shape if `padding` is given."""

    input: Node
    size: int
    drop_remainder: bool
    padding: tuple[Any, Any] | None = None

    def cardinality(self) -> int:
        count = self.input.cardinality()
        if count < 0:
            return count
        return count // self.size if self.drop_remainder else -(-count // self.size)

    def elements(self, path: Path) -> Batched:
        return Batched(self.input.stream(path), self.size, self.drop_remainder, self._stacking())

    def _stacking(self) -> Callable[[Sequence[Any]], Block] | None:
        if self.padding is None:
            return None
        shapes, values = self.padding
        return lambda elements: pad_and_stack(elements, shapes, values)

    def spec(self) -> Any:
        size = self.size if self.drop_remainder else None
        padded = self.padding is not None

        def batched(spec: TensorSpec) -> TensorSpec:
            own = tuple(None for _ in spec.shape) if padded else spec.shape
            return TensorSpec((size, *own), spec.dtype)

        return map_specs(batched, self.input.spec())

    def is_batched(self) -> bool | None:
        return True

    def makes_arrays(self) -> bool:
        return True

    def label(self) -> str:
        name = "batch" if self.padding is None else "padded_batch"
        return f"{name}({self.size}, drop_remainder={self.drop_remainder})"


@final
@dataclass(frozen=True, eq=False)
class Unbatch(Node):
    """The rows of batches."""

    input: Node

    def cardinality(self) -> int:
        size = self.input.cardinality()
        return size if size in (0, INFINITE_CARDINALITY) else UNKNOWN_CARDINALITY

    def elements(self, path: Path) -> Stream:
        return Unbatched(self.input.stream(path))

    def spec(self) -> Any:
        return map_specs(lambda s: TensorSpec(s.shape[1:], s.dtype), self.input.spec())

    def is_batched(self) -> bool | None:
        return False

    def label(self) -> str:
        return "unbatch"


@final
class _CachedRows:
    def __init__(self, source: Rows, cache: dict[int, Any]) -> None:
        self._source = source
        self._cache = cache

    def __len__(self) -> int:
        return len(self._source)

    def row(self, number: int) -> Any:
        try:
            return self._cache[number]
        except KeyError:
            element = self._cache[number] = self._source.row(number)
            return element

    def rows(self, numbers: np.ndarray) -> Block:
        return stack([self.row(number) for number in numbers.tolist()])


@final
class _CachingStream(Stream):
    def __init__(self, upstream: Stream, cache: dict[int, Any]) -> None:
        self._upstream = upstream
        self._cache = cache
        self._elements: list[Any] = []

    def __next__(self) -> Any:
        try:
            element = next(self._upstream)
        except StopIteration:
            self._cache.update(enumerate(self._elements))
            self._cache[-1] = len(self._elements)
            raise
        self._elements.append(element)
        return element


@final
@dataclass(frozen=True, eq=False)
class Cache(Node):
    """Elements kept in memory: row by row, or from the first complete pass on."""

    input: Node
    cache: dict[int, Any]

    def cardinality(self) -> int:
        return self.input.cardinality()

    def source(self) -> Rows | None:
        source = self.input.source() if self.input.is_identity() else None
        return None if source is None else _CachedRows(source, self.cache)

    def order(self, path: Path) -> Stream:
        return Numbers(self.cardinality())

    def is_identity(self) -> bool:
        return self.input.is_identity()

    def elements(self, path: Path) -> Stream:
        if -1 in self.cache:
            size = self.cache[-1]
            return Picked(_CachedRows(_Nothing(size), self.cache), Numbers(size))
        # What is kept must not depend on which pass came first.
        return _CachingStream(self.input.stream((0,)), self.cache)

    def spec(self) -> Any:
        return self.input.spec()

    def label(self) -> str:
        return "cache"


@final
class _Nothing:
    """Rows that are all in the cache."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def row(self, number: int) -> Any:
        raise IndexError(number)

    def rows(self, numbers: np.ndarray) -> Block:
        raise IndexError(numbers)


@final
class PrefetchedStream(Stream):
    """Elements that a thread makes ahead."""

    def __init__(self, upstream: Stream, depth: int) -> None:
        self._upstream = upstream
        self._depth = depth
        self._prefetched: Prefetched | None = None

    def __next__(self) -> Any:
        if self._prefetched is None:
            self._prefetched = Prefetched(self._upstream, self._depth)
        return next(self._prefetched)

    def advance(self, count: int) -> int:
        # Before the thread has started, the elements need not be made.
        return self._upstream.advance(count) if self._prefetched is None else super().advance(count)


@final
@dataclass(frozen=True, eq=False)
class Prefetch(Node):
    """Elements that a thread makes ahead."""

    input: Node
    depth: int

    def cardinality(self) -> int:
        return self.input.cardinality()

    def elements(self, path: Path) -> Stream:
        return PrefetchedStream(self.input.stream(path), self.depth)

    def spec(self) -> Any:
        return self.input.spec()

    def label(self) -> str:
        return "prefetch"


@final
@dataclass(frozen=True, eq=False)
class Interleave(Random):
    """Elements of the datasets a function makes, in turns."""

    input: Node
    make: Callable[..., Node]
    cycle_length: int
    block_length: int
    threads: int | None
    drawn: int
    seed: int | None = None

    def cardinality(self) -> int:
        size = self.input.cardinality()
        return size if size == 0 else UNKNOWN_CARDINALITY

    def elements(self, path: Path) -> Stream:
        return Interleaved(self._streams(path), self.cycle_length, self.block_length)

    def _streams(self, path: Path) -> Iterator[Stream]:
        depth = max(self.block_length, 2)
        for number, element in enumerate(self.input.stream(path)):
            stream = with_drawn(self.made(element), self.seed_of(())[:1], number).stream(path)
            yield stream if self.threads is None else PrefetchedStream(stream, depth)

    def made(self, element: Any) -> Node:
        """The dataset of one element."""
        return self.make(element)

    def first(self) -> Node | None:
        """The dataset of the first element."""
        for element in itertools.islice(self.input.stream((0,)), 1):
            return self.made(element)
        return None

    def is_batched(self) -> bool | None:
        first = self.first()
        return None if first is None else first.is_batched()

    def label(self) -> str:
        return f"interleave({self.cycle_length}, {self.block_length})"


def drawn_seeds(node: Node) -> list[int]:
    """What the orders follow from that have no seed, inputs first."""
    return [n.drawn for n in all_nodes(node) if isinstance(n, Random) and n.seed is None]


def with_drawn_seeds(node: Node, seeds: Sequence[int]) -> Node:
    """The same dataset with other numbers in the place of `drawn_seeds`."""
    left = iter(seeds)

    def change(own: Node) -> Node:
        if isinstance(own, Random) and own.seed is None:
            return dataclasses.replace(own, drawn=next(left))  # type: ignore[type-var]
        return own

    return rewrite(node, change)


def with_drawn(node: Node, seed: Sequence[int], number: int) -> Node:
    """The same dataset, its orders without a seed following from `seed` and a number."""
    count = len(drawn_seeds(node))
    if not count:
        return node
    words = np.random.SeedSequence([*seed, number]).generate_state(count, np.uint64)
    return with_drawn_seeds(node, [int(word) % MAX_SEED for word in words])
