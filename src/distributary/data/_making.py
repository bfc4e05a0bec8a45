"""Operations that make new elements: of batches, by functions of the user, of several datasets."""

import abc
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any, final

import jax
import numpy as np
from jax.tree_util import PyTreeDef

from distributary._threads import Prefetched
from distributary.data._nodes import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Chained,
    ChainedRows,
    IteratedStream,
    MadeRows,
    Node,
    Path,
    Picked,
    Pieces,
    Random,
    Rows,
    SameElements,
    Stream,
    Trait,
    ZippedRows,
    combined,
    is_peek,
    waiting_iterators,
)
from distributary.data._sources import RandomAccess
from distributary.data._structure import (
    Block,
    TensorSpec,
    batched_spec,
    flatten,
    join,
    num_rows,
    pad_and_stack,
    read_only,
    some_rows,
    specs_of,
    stack,
    stopped,
    writable,
)
from distributary.devices import Nest
from distributary.errors import InvalidTypeError, InvalidValueError, check_takes, shown

# Operations that stack elements to batches, and split batches into rows.


@final
@dataclass(frozen=True, eq=False)
class Batch(Node):
    """Elements stacked, `size` at a time; padded to one shape if `padding` is given."""

    input: Node
    size: int
    drop_remainder: bool
    padding: tuple[Nest, Nest] | None = None
    batched = True
    own_arrays = True

    def cardinality(self) -> int:
        count = self.input.cardinality()
        if count < 0:
            return count
        return count // self.size if self.drop_remainder else -(-count // self.size)

    def elements(self, path: Path) -> "BatchedStream":
        return BatchedStream(self.input.stream(path), self)

    def spec(self) -> Nest:
        spec = self.input.spec()
        if self.padding is not None:
            spec = jax.tree.map(lambda s: TensorSpec((None,) * len(s.shape), s.dtype), spec)
        return batched_spec(spec, self.size if self.drop_remainder else None)

    def label(self) -> str:
        name, padding = "batch", ""
        if self.padding is not None:
            shapes, values = self.padding
            given = f"{shapes}, {values}, " if (shapes, values) != (None, None) else ""
            name, padding = "padded_batch", given
        return f"{name}({self.size}, {padding}drop_remainder={self.drop_remainder})"


@final
class BatchedStream(Stream):
    """Elements, `size` at a time.

    Args:
        upstream: The elements.
        batch: The operation.
    """

    def __init__(self, upstream: Stream, batch: Batch) -> None:
        self._upstream = upstream
        self._size = batch.size
        self._drop_remainder = batch.drop_remainder
        # None stacks elements of equal shape.
        self._stack: Callable[[Sequence[Nest]], Block] | None = None
        if batch.padding is not None:
            shapes, values = batch.padding
            self._stack = partial(pad_and_stack, shapes=shapes, values=values)

    def __next__(self) -> Block:
        if self._stack is not None:
            return self.part(slice)[0]
        batch = self._upstream.block(self._size)
        if batch is None or (self._drop_remainder and num_rows(batch) < self._size):
            raise StopIteration
        return batch

    def part(self, bounds: Callable[[int], slice]) -> tuple[Block, int]:
        """Returns some rows of the next batch, and the number of rows in the whole batch.

        Args:
            bounds: Returns the wanted rows for the size of the batch. The other rows are not
                fetched, where the source allows that.
        """
        items: Any
        make: Callable[[Any], Block]
        if isinstance(self._upstream, Picked) and self._stack is None:
            items, make = self._upstream.numbers(self._size), self._upstream.rows
        else:
            items = list(itertools.islice(self._upstream, self._size))
            make = self._stack or stack
        size = 0 if items is None else len(items)
        if not size or (self._drop_remainder and size < self._size):
            raise StopIteration
        wanted = items[bounds(size)]
        # Without any row, the first one tells the structure and the shapes.
        block = make(wanted) if len(wanted) else some_rows(make(items[:1]), slice(0))
        return block, size

    def advance(self, count: int) -> int:
        skipped = self._upstream.advance(count * self._size)
        whole, rest = divmod(skipped, self._size)
        return whole + (rest > 0 and not self._drop_remainder)


@final
@dataclass(frozen=True, eq=False)
class Unbatch(Node):
    """The rows of batches."""

    input: Node
    batched = False
    pattern = "unbatch"

    def cardinality(self) -> int:
        size = self.input.cardinality()
        return size if size in (0, INFINITE_CARDINALITY) else UNKNOWN_CARDINALITY

    def elements(self, path: Path) -> Stream:
        return _Unbatched(map(_BatchRows.of, self.input.stream(path)))

    def spec(self) -> Nest:
        return jax.tree.map(lambda s: TensorSpec(s.shape[1:], s.dtype), self.input.spec())


@final
@dataclass(frozen=True)
class _BatchRows:
    """A batch as a sequence of its rows."""

    leaves: list[Any]
    tree: PyTreeDef
    rows: range

    @staticmethod
    def of(batch: Nest) -> "_BatchRows":
        leaves, tree = flatten(batch)
        leaves = [leaf if hasattr(leaf, "shape") else np.asarray(leaf) for leaf in leaves]
        return _BatchRows(leaves, tree, range(num_rows(leaves)))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, which: int | slice) -> Any:
        leaves = [leaf[which] for leaf in self.leaves]
        if isinstance(which, slice):
            return _BatchRows(leaves, self.tree, self.rows[which])
        return self.tree.unflatten(leaves)


@final
class _Unbatched(Pieces):
    def joined(self, parts: list[_BatchRows]) -> Block:
        return join([part.tree.unflatten(part.leaves) for part in parts])


# Operations that call functions of the user, and that keep the results: map, filter and cache.


# The key of a cache for the elements of a complete pass; otherwise it holds rows by number.
_ALL = "all"


@final
@dataclass(frozen=True, eq=False)
class Map(Node):
    """The results of a function, in `num_threads` threads if that is not None."""

    input: Node
    fn: Callable[..., Any]
    num_threads: int | None
    own_arrays = True
    in_memory = False

    def cardinality(self) -> int:
        return self.input.cardinality()

    def source(self) -> Rows | None:
        source = self.input.source() if self.num_threads is None else None
        if source is None:
            return None
        make = self._make()
        return MadeRows(lambda number: make(source.row(number)))

    def order(self, path: Path) -> Stream:
        return self.input.order(path)

    def elements(self, path: Path) -> Stream:
        upstream = self.input.stream(path)
        if self.num_threads is None:
            return IteratedStream(map(self._make(), upstream), upstream.advance)
        return _MappedInThreads(upstream, self._make(), self.num_threads)

    def _make(self) -> Callable[[Nest], Nest]:
        """Returns what makes an element; the function may write to the arrays that it is given."""
        return lambda element: mapped(self.fn, writable(element))

    def spec(self) -> Nest:
        """Returns the spec of the first result; what counts the rows of a batch stays open."""
        if not self.trait("batched"):
            return super().spec()
        shapes = [spec.shape for spec in jax.tree.leaves(self.input.spec())]
        if not shapes or any(not shape or shape[0] is not None for shape in shapes):
            return super().spec()
        first = self.input.first()
        if not first:
            return super().spec()  # says that there is no element
        rows = (num_rows(first[0]),)

        def opened(spec: TensorSpec) -> TensorSpec:
            sizes = (None, *spec.shape[1:]) if spec.shape[:1] == rows else spec.shape
            return TensorSpec(sizes, spec.dtype)

        return jax.tree.map(opened, specs_of(self._make()(first[0])))

    def label(self) -> str:
        return f"map({_name(self.fn)})"


@final
@dataclass(frozen=True, eq=False)
class Filter(SameElements):
    """The elements for which a function returns True."""

    input: Node
    predicate: Callable[..., Any]
    in_memory = False
    cardinality = Node.cardinality

    def elements(self, path: Path) -> Stream:
        return IteratedStream(filter(partial(call, self.predicate), self.input.stream(path)))

    def label(self) -> str:
        return f"filter({_name(self.predicate)})"


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", None) or type(fn).__name__


def call(fn: Callable[..., Any], element: Nest) -> Any:
    """Calls a user's function; the items of a tuple become its arguments, as in tf.data."""
    args = element if type(element) is tuple else (element,)
    try:
        return fn(*args)
    except TypeError:  # perhaps because it takes other arguments
        names = "x, y" if len(args) == 2 else ", ".join(f"x{i or ''}" for i in range(len(args)))
        check_takes("The dataset", fn, f"fn({names})")
        raise
    except StopIteration as error:
        raise stopped(_name(fn)) from error


def mapped(fn: Callable[..., Any], element: Nest) -> Nest:
    """Returns the result of a user's function. No later call changes its arrays.

    The function may write to its arrays again, so they are copied, unless it was given them.
    """
    result = call(fn, element)
    if result is element:
        return result
    if result is None:
        raise InvalidTypeError(
            f"The dataset calls {shown(fn)}, which returned None. Return the new element."
        )
    leaves, tree = flatten(result)
    inputs = flatten(element)[0]
    known = {id(leaf) for leaf in inputs} | {id(getattr(leaf, "base", None)) for leaf in inputs}
    known.discard(id(None))
    for i, leaf in enumerate(leaves):
        is_array = isinstance(leaf, np.ndarray)
        if is_array and id(leaf) not in known and id(leaf.base) not in known:
            leaves[i] = leaf.copy()
    return tree.unflatten(leaves)


@final
class _MappedInThreads(Stream):
    """The elements that a function makes in `num_threads` threads, in order."""

    def __init__(self, upstream: Stream, make: Callable[[Nest], Nest], num_threads: int) -> None:
        self._upstream = upstream
        self._make = make
        self._num_threads = num_threads
        # Its threads end when it is garbage collected, together with this stream.
        self._executor = ThreadPoolExecutor(
            num_threads, "distributary-map", waiting_iterators.set, (waiting_iterators.get(),)
        )
        self._running: list[Future[Any]] = []

    def __next__(self) -> Nest:
        while len(self._running) <= self._num_threads:
            try:
                element = next(self._upstream)
            except StopIteration:
                break
            self._running.append(self._executor.submit(self._make, element))
        if not self._running:
            self._executor.shutdown(wait=False)
            raise StopIteration
        return self._running.pop(0).result()

    def advance(self, count: int) -> int:
        started = len(self._running[:count])
        del self._running[:count]
        return started + self._upstream.advance(count - started)


@final
@dataclass(frozen=True, eq=False)
class Cache(SameElements):
    """Elements kept in memory, either row by row or once a first pass is complete."""

    input: Node
    # Not an argument: a dataset rewritten for a worker or another order has other elements.
    cache: dict[Any, Any] = field(default_factory=dict, init=False)
    pattern = "cache"

    def source(self) -> Rows | None:
        source = self.input.source_in_order()
        if source is None:
            return None

        def row(number: int) -> Nest:
            try:
                return self.cache[number]
            except KeyError:
                element = self.cache[number] = read_only(source.row(number))
                return element

        return MadeRows(row)

    def elements(self, path: Path) -> Stream:
        if _ALL in self.cache:
            return RandomAccess(self.cache[_ALL]).stream(path)
        if is_peek(path):
            return self.input.stream(path)
        # Pass 0, because what is kept must not depend on which pass came first.
        return IteratedStream(self._kept(self.input.stream((0,))))

    def _kept(self, elements: Stream) -> Iterator[Nest]:
        kept = []
        for element in map(read_only, elements):
            kept.append(element)
            yield element
        self.cache[_ALL] = kept


# Operations on several datasets: one after the other, side by side, in turns, in any other way.


class _OfParts(Node):
    """Base class of operations on datasets whose rows can be numbered together."""

    parts: tuple[Node, ...]

    @abc.abstractmethod
    def together(self, sources: Sequence[Rows]) -> Rows:
        """Returns the rows of all parts under common numbers."""

    def source(self) -> Rows | None:
        sources = [part.source_in_order() for part in self.parts]
        known = [source for source in sources if source is not None]
        return self.together(known) if len(known) == len(sources) else None


@final
@dataclass(frozen=True, eq=False)
class Concatenate(_OfParts):
    """The elements of one dataset after the elements of another."""

    parts: tuple[Node, ...]
    pattern = "concatenate"

    def cardinality(self) -> int:
        return combined([part.cardinality() for part in self.parts], sum)

    def together(self, sources: Sequence[Rows]) -> Rows:
        return ChainedRows(sources, [part.cardinality() for part in self.parts])

    def elements(self, path: Path) -> Stream:
        def nth(number: int) -> Stream | None:
            return self.parts[number].stream(path) if number < len(self.parts) else None

        return Chained(nth)

    def spec(self) -> Nest:
        return reduce(common_spec, [part.spec() for part in self.parts])


def common_spec(first: Nest, second: Nest, what: str = "concatenate") -> Nest:
    """Returns the spec of elements of both kinds.

    Raises:
        InvalidValueError: if they differ in more than sizes.
    """
    leaves, tree = flatten(first)
    others, pytree = flatten(second)
    if pytree != tree:
        raise InvalidValueError(
            f"{what}: the first elements have structure {tree}, others have {pytree}; all must have"
            " the same structure."
        )
    merged = []
    for spec, other in zip(leaves, others, strict=True):
        if spec.dtype != other.dtype or len(spec.shape) != len(other.shape):
            raise InvalidValueError(
                f"{what}: {spec} and {other} must have the same dtype and number of dims. Convert"
                " the elements with map."
            )
        shape = [a if a == b else None for a, b in zip(spec.shape, other.shape, strict=True)]
        merged.append(TensorSpec(tuple(shape), spec.dtype))
    return tree.unflatten(merged)


@final
@dataclass(frozen=True, eq=False)
class Zip(_OfParts):
    """Elements of several datasets side by side."""

    parts: tuple[Node, ...]
    structure: PyTreeDef
    pattern = "zip"

    def cardinality(self) -> int:
        sizes = [part.cardinality() for part in self.parts]
        finite = [size for size in sizes if size >= 0]
        if UNKNOWN_CARDINALITY in sizes:
            return UNKNOWN_CARDINALITY
        return min(finite) if finite else INFINITE_CARDINALITY

    def together(self, sources: Sequence[Rows]) -> Rows:
        return ZippedRows(sources, self.structure)

    def elements(self, path: Path) -> Stream:
        return _Zipped([part.stream(path) for part in self.parts], self.structure)

    def spec(self) -> Nest:
        return self.structure.unflatten([part.spec() for part in self.parts])


@final
class _Zipped(Stream):
    def __init__(self, upstreams: Sequence[Stream], tree: PyTreeDef) -> None:
        self._upstreams = upstreams
        self._tree = tree

    def __next__(self) -> Nest:
        return self._tree.unflatten([next(upstream) for upstream in self._upstreams])

    def block(self, count: int) -> Block | None:
        blocks = [upstream.block(count) for upstream in self._upstreams]
        if any(block is None for block in blocks):
            return None
        size = min(num_rows(block) for block in blocks)
        blocks = [some_rows(block, slice(size)) for block in blocks]
        return self._tree.unflatten(blocks)

    def advance(self, count: int) -> int:
        return min(upstream.advance(count) for upstream in self._upstreams)


@final
@dataclass(frozen=True, eq=False)
class Interleave(Random):
    """Elements of the datasets that a function makes, in turns."""

    input: Node
    make: Callable[..., Node]
    cycle_length: int
    block_length: int
    read_ahead: bool
    drawn: int
    seed: int | None = None
    in_memory = False
    pattern = "interleave({cycle_length}, {block_length})"

    def elements(self, path: Path) -> Stream:
        return IteratedStream(self._in_turns(self._streams(path)))

    def _in_turns(self, streams: Iterator[Iterator[Nest]]) -> Iterator[Nest]:
        places: list[Iterator[Nest] | None] = [None] * self.cycle_length
        while True:
            for i in range(self.cycle_length):
                stream = places[i] = places[i] or next(streams, None)
                count = 0
                for element in itertools.islice(stream or (), self.block_length):
                    count += 1
                    yield element
                if count < self.block_length:
                    places[i] = None  # until its next turn, as in tf.data
            if not any(places):
                if (stream := next(streams, None)) is None:
                    return
                places[0] = stream

    def _streams(self, path: Path) -> Iterator[Iterator[Nest]]:
        depth = max(self.block_length, 2)
        for number, element in enumerate(self.input.stream(path)):
            stream = self.make(element).with_drawn(self.seed_of(()), number).stream(path)
            yield Prefetched(stream, depth) if self.read_ahead else stream

    def first_part(self) -> list[Node]:
        """Returns a list with the dataset of the first element; an empty one if there is none."""
        return [self.make(element) for element in self.input.first()]

    def trait(self, name: Trait) -> bool | None:
        if name in ("batched", "own_arrays"):
            return next((part.trait(name) for part in self.first_part()), None)
        return super().trait(name)


@dataclass(frozen=True, eq=False)
class Generated(Node):
    """The elements that a generator makes of the streams of some datasets.

    Attributes:
        parts: The datasets.
        generate: Makes the elements. Keeps no state between passes.
        text: Label.
        count: Returns the number of elements for the cardinalities of the datasets; without it, the
            number is unknown, unless the first dataset is empty.
        in_memory: See `Node`; None if `generate` is no code of the user.
    """

    parts: tuple[Node, ...]
    generate: Callable[..., Iterator[Nest]]
    text: str
    count: Callable[..., int] | None = None
    in_memory: bool | None = field(default=False, kw_only=True)
    pattern = "{text}"

    def cardinality(self) -> int:
        if self.count is None:
            return super().cardinality()
        return self.count(*[part.cardinality() for part in self.parts])

    def elements(self, path: Path) -> Stream:
        return IteratedStream(self.generate(*(part.stream(path) for part in self.parts)))


@final
@dataclass(frozen=True, eq=False)
class Drawn(Generated, Random):
    """Elements of which some are chosen at random; `generate` gets a generator of numbers first."""

    drawn: int = 0
    seed: int | None = None

    def elements(self, path: Path) -> Stream:
        random = np.random.default_rng(self.seed_of(path))
        return IteratedStream(self.generate(random, *(part.stream(path) for part in self.parts)))


def windows(
    size: int, shift: int, stride: int, drop_remainder: bool, elements: Stream
) -> Iterator[Sequence[Nest]]:
    """Yields lists of `size` elements; a window begins `shift` elements after the one before."""
    span = (size - 1) * stride + 1
    held: list[Nest] = []
    while True:
        held += itertools.islice(elements, span - len(held))
        if not held or (drop_remainder and len(held) < span):
            return
        yield held[::stride]
        if len(held) < shift:
            held += itertools.islice(elements, shift - len(held))
        del held[:shift]
