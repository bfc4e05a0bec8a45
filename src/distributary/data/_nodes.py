"""The operations that a dataset consists of, and one pass over it.

Nodes are operations: a tree, from the sources to the last one. They hold no state; `stream` starts
a pass. Its streams are of elements, or of numbers that stand for rows of a source.

Reordering operations (take, skip, shard, shuffle, repeat) work the same on both. As long as a
dataset only reorders the rows of a source, they work on row numbers. The rows themselves are
gathered only when a batch of them is needed. In
`from_tensor_slices(x).skip(2).shuffle(3).batch(2)`:

    Numbers    0 1 2 3 4 5      the rows of x
    _Sliced        2 3 4 5
    _Shuffled      3 2 5 4      drawn from a buffer of 3
    Picked         x[[3, 2]]    for the first batch
"""

import abc
import bisect
import dataclasses
import itertools
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar, Final, Literal, TypeAlias, final

import jax
import numpy as np
from jax.tree_util import PyTreeDef

from distributary._threads import Prefetched
from distributary.data._structure import Block, join, num_rows, specs_of, stack
from distributary.devices import Nest
from distributary.errors import InvalidValueError
from distributary.options import Options

Path: TypeAlias = tuple[int, ...]
"""Says which repetition of its dataset a stream belongs to: the number of the pass, then the number
in every `repeat` on the way. Shuffles derive their order from it."""

PEEK: Path = (2**63,)
"""The path of a pass that only looks at the first elements; they are not lost for other passes."""

waiting_iterators: ContextVar[tuple[tuple[Any, int], ...]] = ContextVar("waiting", default=())
"""The locks of the iterators that wait for what this thread makes, each with its own thread."""

RowNumbers: TypeAlias = range | np.ndarray
"""A block of a stream of row numbers: a range if they are at equal distances."""


def is_peek(path: Path) -> bool:
    """Returns whether a pass only looks at the first elements."""
    return path[:1] == PEEK


def as_array(numbers: RowNumbers) -> np.ndarray:
    """Returns row numbers as an int64 array `[number]`."""
    if isinstance(numbers, range):
        return np.arange(numbers.start, numbers.stop, numbers.step)
    return numbers


class Rows(abc.ABC):
    """Base class of numbered elements that can be read in any order."""

    @abc.abstractmethod
    def row(self, number: int) -> Nest:
        """Returns one element."""

    def rows(self, numbers: np.ndarray) -> Block:
        """Returns several elements, stacked; int64 numbers `[k]`, k > 0."""
        return stack([self.row(number) for number in numbers.tolist()])


@final
class MadeRows(Rows):
    """Rows that a function makes one at a time."""

    def __init__(self, make: Callable[[int], Nest]) -> None:
        self._make = make

    def row(self, number: int) -> Nest:
        return self._make(number)


@final
class ZippedRows(Rows):
    """The rows of several sources side by side."""

    def __init__(self, sources: Sequence[Rows], tree: PyTreeDef) -> None:
        self._sources = sources
        self._tree = tree

    def row(self, number: int) -> Nest:
        return self._tree.unflatten([source.row(number) for source in self._sources])

    def rows(self, numbers: np.ndarray) -> Block:
        return self._tree.unflatten([source.rows(numbers) for source in self._sources])


@final
class ChainedRows(Rows):
    """The rows of several sources, one after the other; `sizes` are their numbers of rows."""

    def __init__(self, sources: Sequence[Rows], sizes: Sequence[int]) -> None:
        self._sources = sources
        self._starts = list(itertools.accumulate(sizes, initial=0))

    def row(self, number: int) -> Nest:
        which = bisect.bisect_right(self._starts, number) - 1
        return self._sources[which].row(number - self._starts[which])

    def rows(self, numbers: np.ndarray) -> Block:
        of = np.searchsorted(self._starts, numbers, side="right") - 1
        blocks = [
            self._sources[which].rows(numbers[of == which] - self._starts[which])
            for which in np.unique(of)
        ]
        if len(blocks) == 1:
            return blocks[0]
        # The blocks have the rows in the order of their sources. This puts them where they belong.
        places = np.argsort(np.argsort(of, kind="stable"))
        return jax.tree.map(lambda array: array[places], join(blocks))


class Stream(Iterator[Nest]):
    """An iterator over elements that can hand out several at once, and skip some."""

    def block(self, count: int) -> Block | None:
        """Returns the next `count` elements, stacked; fewer at the end, None if none are left."""
        elements = list(itertools.islice(self, count))
        return stack(elements) if elements else None

    def advance(self, count: int) -> int:
        """Skips `count` elements, fewer only at the end; returns how many it skipped."""
        return sum(1 for _ in itertools.islice(self, count))


@final
class IteratedStream(Stream):
    """The items of a Python iterator.

    Args:
        iterator: The iterator.
        skip: Skips items without making them and returns how many, if there is a way.
    """

    def __init__(self, iterator: Iterator[Nest], skip: Callable[[int], int] | None = None) -> None:
        self._iterator = iterator
        self._skip = skip

    def __next__(self) -> Nest:
        return next(self._iterator)

    def advance(self, count: int) -> int:
        return super().advance(count) if self._skip is None else self._skip(count)


class Pieces(Stream):
    """Elements or row numbers that are made several at a time.

    Args:
        pieces: Yields sequences of them, also empty ones.
    """

    def __init__(self, pieces: Iterator[Any]) -> None:
        self._pieces = pieces
        self._piece: Any = ()
        self._at = 0

    def joined(self, parts: list[Any]) -> Block:
        """Returns a block of consecutive parts of the sequences."""
        return join(parts)

    def _has_more(self) -> bool:
        """Returns whether something is left; makes the next piece if necessary."""
        while self._at >= len(self._piece):
            piece = next(self._pieces, None)
            if piece is None:
                return False
            self._piece, self._at = piece, 0
        return True

    def _parts(self, count: int) -> Iterator[Any]:
        """Yields `count` elements in parts of the pieces, fewer only at the end."""
        while count and self._has_more():
            part = self._piece[self._at : self._at + count]
            self._at += len(part)
            count -= len(part)
            yield part

    def __next__(self) -> Nest:
        if not self._has_more():
            raise StopIteration
        self._at += 1
        return self._piece[self._at - 1]

    def block(self, count: int) -> Block | None:
        parts = list(self._parts(count))
        return self.joined(parts) if parts else None

    def advance(self, count: int) -> int:
        return sum(map(len, self._parts(count)))


@final
class Numbers(Pieces):
    """The row numbers 0 to `count - 1`; endless if `count` is negative."""

    def __init__(self, count: int) -> None:
        super().__init__(iter([range(sys.maxsize if count < 0 else count)]))


@final
class Picked(Stream):
    """The rows of a source in the order of a stream of row numbers."""

    def __init__(self, source: Rows, order: Stream) -> None:
        self._source = source
        self._order = order
        # Returns consecutive rows for their first number and a count, where this is quicker.
        self._part: Callable[[int, int], Block] | None = getattr(source, "part", None)

    def __next__(self) -> Nest:
        return self._source.row(next(self._order))

    def block(self, count: int) -> Block | None:
        numbers = self.numbers(count)
        return None if numbers is None else self.rows(numbers)

    def numbers(self, count: int) -> RowNumbers | None:
        """Returns the next row numbers without fetching their rows; None if none are left."""
        return self._order.block(count)

    def rows(self, numbers: RowNumbers) -> Block:
        """Returns rows of the source."""
        if self._part is not None and isinstance(numbers, range) and numbers.step == 1:
            return self._part(numbers.start, len(numbers))
        return self._source.rows(as_array(numbers))

    def advance(self, count: int) -> int:
        return self._order.advance(count)


@final
class Chained(Stream):
    """Streams of elements or of row numbers, one after the other.

    Args:
        make: Returns the stream with a number; None after the last.
        length: Number of elements of every stream if it is the same for all, else None.
    """

    def __init__(self, make: Callable[[int], Stream | None], length: int | None = None) -> None:
        self._make = make
        self._length = length
        self._number = -1
        self._current: Stream | None = None
        self._from_current = 0
        self._ended = False

    def _over(self) -> bool:
        """Moves on from the end of a stream to the next one; returns whether there is none."""
        # Invariant: once it is True it stays so, however often `block` and `advance` ask again.
        # Repeating an empty stream forever would never end.
        empty = self._current is not None and not self._from_current and self._length is not None
        self._ended = self._ended or empty
        if not self._ended:
            self._current, self._from_current = self._make(self._number + 1), 0
            self._number += 1
            self._ended = self._current is None
        return self._ended

    def __next__(self) -> Nest:
        while True:
            if self._current is not None:
                for element in self._current:
                    self._from_current += 1
                    return element
            if self._over():
                raise StopIteration

    def block(self, count: int) -> Block | None:
        pieces: list[Block] = []
        while count:
            piece = None if self._current is None else self._current.block(count)
            if piece is None:
                if self._over():
                    break
                continue
            taken = len(piece) if isinstance(piece, range) else num_rows(piece)
            self._from_current += taken
            count -= taken
            pieces.append(piece)
        return join(pieces) if pieces else None

    def advance(self, count: int) -> int:
        skipped = 0
        while skipped < count:
            taken = 0 if self._current is None else self._current.advance(count - skipped)
            self._from_current += taken
            skipped += taken
            if taken:
                continue
            if self._over():
                break
            if self._length and self._length > 0:
                whole = (count - skipped) // self._length
                later = self._make(self._number + whole) if whole else None
                if later is not None:
                    self._number += whole
                    skipped += whole * self._length
                    self._current = later
        return skipped


# Operations


# Upper bound of the numbers drawn for shuffles without a seed.
MAX_SEED = 2**63


Trait: TypeAlias = Literal["batched", "own_arrays", "in_memory"]


class Node:
    """An operation; its fields hold the nodes that it reads from.

    Attributes:
        batched: Whether dim 0 of the arrays counts examples; None if the inputs tell.
        own_arrays: Whether every element has arrays of its own, to which nobody writes; None if
            the inputs tell.
        in_memory: Whether elements are made of arrays in memory, without files and user code; None
            if the inputs tell.
        pattern: Label, with names of fields in braces.
    """

    batched: bool | None = None
    own_arrays: bool | None = None
    in_memory: bool | None = None
    pattern: ClassVar[str]

    def cardinality(self) -> int:
        """Returns the number of elements, INFINITE_CARDINALITY or UNKNOWN_CARDINALITY.

        By default it is unknown, unless the first input is empty.
        """
        sizes = [node.cardinality() for node in self.inputs()[:1]]
        return 0 if sizes == [0] else UNKNOWN_CARDINALITY

    def label(self) -> str:
        """Returns the operation and its arguments, by which a pipeline is recognized."""
        return self.pattern.format_map(vars(self))

    def source(self) -> Rows | None:
        """Returns the rows that this node only reorders; None if it makes new elements."""
        return None

    def order(self, path: Path) -> Stream:
        """Returns the numbers of the rows of `source`, in order."""
        return Numbers(self.cardinality())

    def elements(self, path: Path) -> Stream:
        """Starts a pass over the elements, for nodes without a `source`."""
        raise NotImplementedError

    def stream(self, path: Path) -> Stream:
        """Starts a pass over the elements."""
        source = self.source()
        return self.elements(path) if source is None else Picked(source, self.order(path))

    def source_in_order(self) -> Rows | None:
        """Returns the finite `source` if `order` is 0, 1, 2, ... in every pass, else None."""
        source = self.source()
        in_order = source is not None and isinstance(self.order(PEEK), Numbers)
        return source if in_order and self.cardinality() >= 0 else None

    def first(self) -> list[Nest]:
        """Returns a list with the first element, which is still there for other passes."""
        for element in self.stream(PEEK):
            return [element]
        return []

    def spec(self) -> Nest:
        """Returns a nest of `TensorSpec` like the elements; may have to read the first element."""
        for element in self.first():
            return specs_of(element)
        raise InvalidValueError(
            f"element_spec: the dataset {self.describe()} is empty, so nothing is known about its"
            " elements. For a generator, output_signature says what they are."
        )

    def trait(self, name: Trait) -> bool | None:
        """Returns an attribute of the elements; None if it is not known."""
        value: bool | None = getattr(self, name)
        if value is not None:
            return value
        answers = {node.trait(name) for node in self.inputs()}
        return answers.pop() if len(answers) == 1 else None

    # The tree

    def inputs(self) -> "tuple[Node, ...]":
        """Returns the nodes that it reads from."""
        values = vars(self).values()
        items = [item for v in values for item in (v if isinstance(v, tuple) else (v,))]
        return tuple(item for item in items if isinstance(item, Node))

    def tree(self) -> "Iterator[Node]":
        """Yields the nodes of the tree, inputs first."""
        for upstream in self.inputs():
            yield from upstream.tree()
        yield self

    def replace(self, **changes: object) -> "Node":
        """Returns the node with other values of some fields."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    def rewrite(self, change: "Callable[[Node], Node]") -> "Node":
        """Returns the tree with `change` applied to every node, inputs first."""

        def rewritten(value: object) -> object:
            if isinstance(value, Node):
                return value.rewrite(change)
            if isinstance(value, tuple) and any(isinstance(item, Node) for item in value):
                new = tuple(map(rewritten, value))
                return value if all(map(operator.is_, new, value)) else new
            return value

        fields = vars(self)
        new = {name: rewritten(value) for name, value in fields.items()}
        changes = {name: value for name, value in new.items() if value is not fields[name]}
        return change(self.replace(**changes) if changes else self)

    def describe(self) -> str:
        """Returns the operations of the tree, in the order in which data goes through them."""
        inputs = [node.describe() for node in self.inputs()]
        if not inputs:
            return self.label()
        before = inputs[0] if len(inputs) == 1 else f"({', '.join(inputs)})"
        return f"{before} > {self.label()}"

    def drawn_seeds(self) -> list[int]:
        """Returns the numbers that determine the orders without a seed, inputs first."""
        return [n.drawn for n in self.tree() if isinstance(n, Random) and n.seed is None]

    def with_drawn_seeds(self, seeds: Sequence[int]) -> "Node":
        """Returns the same dataset with other numbers in place of `drawn_seeds`."""
        left = iter(seeds)

        def change(node: Node) -> Node:
            if not isinstance(node, Random) or node.seed is not None:
                return node
            seed = next(left)
            return node if seed == node.drawn else node.replace(drawn=seed)

        return self.rewrite(change)

    def with_drawn(self, seed: Sequence[int], number: int) -> "Node":
        """Returns the same dataset, orders without a seed derived from `seed` and a number."""
        count = len(self.drawn_seeds())
        if not count:
            return self
        words = np.random.SeedSequence([*seed, number]).generate_state(count, np.uint64)
        return self.with_drawn_seeds([int(word) % MAX_SEED for word in words])


class FileSource(Node):
    """Base class of nodes that read files, or list them.

    Attributes:
        files: Names of the files.
    """

    files: tuple[str, ...]


class NumberedNode(Node, Rows):
    """Base class of nodes whose elements have numbers."""

    def source(self) -> Rows | None:
        return self


class SameElements(Node):
    """Base class of operations that make no new elements, and usually keep their number."""

    input: Node

    def cardinality(self) -> int:
        return self.input.cardinality()

    def spec(self) -> Nest:
        return self.input.spec()


def drawn_seed() -> int:
    """Draws a number from NumPy's global generator, for an order without a seed."""
    return int(np.random.randint(0, MAX_SEED, dtype=np.int64))


class Random(Node):
    """Base class of nodes with an order of their own, from `seed` or, without one, from `drawn`."""

    seed: int | None
    drawn: int

    def seed_of(self, path: Path) -> list[int]:
        """Returns the numbers that determine the order of a pass."""
        return [self.drawn if self.seed is None else self.seed, *path]


#: For `num_parallel_calls` and `prefetch`: chooses a number that suits the machine.
AUTOTUNE: Final = -1
#: Result of `Dataset.cardinality` for a dataset without end.
INFINITE_CARDINALITY: Final = -1
#: Result of `Dataset.cardinality` if only reading the data would tell.
UNKNOWN_CARDINALITY: Final = -2


def combined(cardinalities: Sequence[int], combine: Callable[[Sequence[int]], int] = max) -> int:
    """Returns the number of elements of several datasets together, if none of them is unusual."""
    for unusual in (INFINITE_CARDINALITY, UNKNOWN_CARDINALITY):
        if unusual in cardinalities:
            return unusual
    return combine(cardinalities)


# Operations that choose among elements, repeat them, read them ahead, or change their order.

# Random numbers are drawn, and row numbers read, this many at a time.
_CHUNK = 1024


class Reordering(SameElements):
    """Base class of operations that work the same on elements and on row numbers."""

    def source(self) -> Rows | None:
        return self.input.source()

    def order(self, path: Path) -> Stream:
        return self.apply(self.input.order, path, True)

    def elements(self, path: Path) -> Stream:
        return self.apply(self.input.stream, path, False)

    def apply(self, make: Callable[[Path], Stream], path: Path, numbers: bool) -> Stream:
        """Applies the operation to the streams of `make`, which give row numbers if `numbers`."""
        return make(path)


@final
@dataclass(frozen=True, eq=False)
class Slice(Reordering):
    """Every `step`-th element from number `start` on, at most `count` of them.

    Attributes:
        name: The method of `Dataset` and its arguments, for labels.
    """

    input: Node
    name: str
    start: int = 0
    count: float = inf
    step: int = 1
    pattern = "{name}"

    @classmethod
    def shard(cls, node: Node, num_shards: int, index: int) -> "Slice":
        """Makes it of every `num_shards`-th element."""
        return cls(node, f"shard({num_shards}, {index})", index, step=num_shards)

    def cardinality(self) -> int:
        size = self.input.cardinality()
        if size == INFINITE_CARDINALITY and self.count < inf:
            return int(self.count)
        if size < 0:
            return size if self.count else 0
        return int(min(self.count, len(range(self.start, size, self.step))))

    def apply(self, make: Callable[[Path], Stream], path: Path, numbers: bool) -> Stream:
        return _Sliced(make(path), numbers, self.start, self.count, self.step)


@final
@dataclass(frozen=True, eq=False)
class ShardHint(Reordering):
    """All elements, until a worker's shard takes the place of this node."""

    input: Node
    pattern = "shard(-1, -1)"


@final
@dataclass(eq=False)
class _Sliced(Stream):
    """Every `step`-th element or row number, from number `start` on.

    Args:
        upstream: The elements.
        numbers: Whether they are row numbers.
        start: Number of the first element.
        count: Number of elements at most.
        step: Distance between two elements.
    """

    _upstream: Stream
    _numbers: bool
    _to_skip: int
    _left: float
    _step: int

    def _begin(self, count: int) -> int:
        """Goes to the next element; returns how many of `count` elements the limit leaves."""
        count = int(min(count, self._left))
        self._left -= count
        if count and self._to_skip:
            self._upstream.advance(self._to_skip)
            self._to_skip = 0
        return count

    def __next__(self) -> Nest:
        if not self._begin(1):
            raise StopIteration
        self._to_skip = self._step - 1  # not before it is needed: it may take long
        return next(self._upstream)

    def block(self, count: int) -> Block | None:
        if self._step > 1 and not self._numbers:  # the elements between would be made, too
            return super().block(count)
        count = self._begin(count)
        block = self._upstream.block(count * self._step) if count else None
        return block if block is None or self._step == 1 else block[:: self._step]

    def advance(self, count: int) -> int:
        count = self._begin(count)
        return -(-self._upstream.advance(count * self._step) // self._step)


@final
@dataclass(frozen=True, eq=False)
class Repeat(Reordering):
    """The elements `count` times; forever if it is -1."""

    input: Node
    count: int
    pattern = "repeat({count})"

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

        return Chained(nth, self.input.cardinality())


@final
@dataclass(frozen=True, eq=False)
class Shuffle(Reordering, Random):
    """Elements in random order."""

    input: Node
    buffer_size: int
    seed: int | None
    reshuffle: bool
    drawn: int
    pattern = "shuffle({buffer_size}, seed={seed}, reshuffle={reshuffle})"

    def apply(self, make: Callable[[Path], Stream], path: Path, numbers: bool) -> Stream:
        seed = self.seed_of(path if self.reshuffle else ())
        return _Shuffled(make(path), self.buffer_size, seed, numbers, self.cardinality())


@final
class _Shuffled(Pieces):
    """Elements in random order, drawn from a buffer as tf.data does.

    Args:
        upstream: The elements.
        buffer_size: Number of elements that wait to be drawn. If all of them fit, all orders are
            equally likely.
        seed: Numbers that determine the order.
        numbers: Whether they are row numbers.
        length: Number of elements, negative if it is unknown or there is no end.
    """

    def __init__(
        self, upstream: Stream, buffer_size: int, seed: Sequence[int], numbers: bool, length: int
    ) -> None:
        super().__init__(_Draws(upstream, buffer_size, seed, numbers))
        self._numbers = numbers
        self._length = length

    def joined(self, parts: list[Any]) -> Block:
        if self._numbers:
            return np.concatenate(parts)
        return stack(list(itertools.chain.from_iterable(parts)))

    def advance(self, count: int) -> int:
        length, self._length = self._length, -1
        if not len(self._piece) and 0 <= length <= count:  # all, and none is drawn yet
            self._pieces = iter(())
            return length
        return super().advance(count)


@final
class _Draws(Iterator[Any]):
    """The elements in random order, some at a time; goes on after an error of what it reads."""

    def __init__(self, upstream: Stream, size: int, seed: Sequence[int], numbers: bool) -> None:
        # RandomState, because its order never changes between versions of NumPy.
        self._random = random = np.random.RandomState(
            np.random.MT19937(np.random.SeedSequence(seed))
        )
        self._picks = (
            i for _ in itertools.count() for i in random.randint(0, size, _CHUNK).tolist()
        )
        self._upstream, self._size, self._numbers = upstream, size, numbers
        self._buffer: Any = None if numbers else []
        self._is_full = self._is_over = False

    def __next__(self) -> Any:
        if self._is_over:
            raise StopIteration
        if not self._is_full:
            self._fill()
        # Elements are read one at a time, so that the buffer keeps its size.
        incoming = _read(self._upstream, _CHUNK if self._numbers else 1, self._numbers)
        if not len(incoming):
            self._is_over, rest = True, self._buffer
            order = self._random.permutation(len(rest))
            return rest[order] if isinstance(rest, np.ndarray) else [rest[i] for i in order]
        # The items of lists are quicker to exchange than those of arrays.
        buffer, incoming = (
            x if isinstance(x, list) else x.tolist() for x in (self._buffer, incoming)
        )
        self._buffer, drawn = buffer, []
        for item, pick in zip(incoming, self._picks, strict=False):
            drawn.append(buffer[pick])
            buffer[pick] = item
        return drawn

    def _fill(self) -> None:
        if self._numbers:
            self._buffer = _read(self._upstream, self._size, True)
        else:
            for element in itertools.islice(self._upstream, self._size - len(self._buffer)):
                self._buffer.append(element)
        self._is_full = True


def _read(upstream: Stream, count: int, numbers: bool) -> Any:
    if not numbers:
        return list(itertools.islice(upstream, count))
    block = upstream.block(count)
    return () if block is None else as_array(block)


@final
@dataclass(frozen=True, eq=False)
class Prefetch(SameElements):
    """Elements that a thread makes ahead of time."""

    input: Node
    depth: int
    pattern = "prefetch"

    def elements(self, path: Path) -> Stream:
        source = self.input.stream(path)
        ahead = Prefetched(source, self.depth)

        def skip(count: int) -> int:
            # Until the thread has started, skipped elements need not be made.
            return (IteratedStream(ahead) if ahead.has_started else source).advance(count)

        return IteratedStream(ahead, skip)


@final
@dataclass(frozen=True, eq=False)
class WithOptions(Reordering):
    """Options for the operations before and after."""

    input: Node
    options: Options
    pattern = "with_options"


def options_of(node: Node) -> Options:
    """Returns the options of a whole tree; later ones win."""
    merged = Options()
    for part in node.tree():
        if isinstance(part, WithOptions):
            merged = merged.merge(part.options)
    return merged
