"""Operations that choose among elements, repeat them, read them ahead, or change their order."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, final

import numpy as np

from distributary._threads import Prefetched
from distributary.data._nodes import (
    INFINITE_CARDINALITY,
    Chained,
    IteratedStream,
    Node,
    Path,
    Pieces,
    Random,
    Rows,
    SameElements,
    Stream,
    as_array,
)
from distributary.data._structure import Block, stack
from distributary.devices import Nest
from distributary.options import Options

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
