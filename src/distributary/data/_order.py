"""Operations that choose among elements, repeat them, or change their order."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, final

import numpy as np

from distributary.data._nodes import Node, Random, SameElements
from distributary.data._options import INFINITE_CARDINALITY, Options
from distributary.data._streams import Chained, Path, Rows, Stream, as_array
from distributary.data._structure import Block, join
from distributary.devices import Nest

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

    def cardinality(self) -> int:
        size = self.input.cardinality()
        if size == INFINITE_CARDINALITY and self.count < inf:
            return int(self.count)
        if size < 0:
            return size if self.count else 0
        return int(min(self.count, len(range(self.start, size, self.step))))

    def apply(self, make: Callable[[Path], Stream], path: Path, numbers: bool) -> Stream:
        return _Sliced(make(path), numbers, self.start, self.count, self.step)


def shard(node: Node, num_shards: int, index: int) -> Slice:
    """Returns every `num_shards`-th element."""
    return Slice(node, f"shard({num_shards}, {index})", index, step=num_shards)


@final
@dataclass(frozen=True, eq=False)
class ShardHint(Reordering):
    """All elements, until a worker's shard takes the place of this node."""

    input: Node
    pattern = "shard(-1, -1)"


@final
class _Sliced(Stream):
    """Every `step`-th element or row number, from number `start` on.

    Args:
        upstream: The elements.
        numbers: Whether they are row numbers.
        start: Number of the first element.
        count: Number of elements at most.
        step: Distance between two elements.
    """

    def __init__(
        self, upstream: Stream, numbers: bool, start: int, count: float, step: int
    ) -> None:
        self._upstream = upstream
        self._numbers = numbers
        self._to_skip = start
        self._left = count
        self._step = step

    def __next__(self) -> Nest:
        if self._left <= 0:
            raise StopIteration
        self._left -= 1
        if self._to_skip:
            self._upstream.advance(self._to_skip)
        self._to_skip = self._step - 1
        return next(self._upstream)

    def block(self, count: int) -> Block | None:
        if self._step > 1 and not self._numbers:  # the elements between would be made, too
            return super().block(count)
        count = int(min(count, self._left))
        self._left -= count
        if not count:
            return None
        if self._to_skip:
            self._upstream.advance(self._to_skip)
        self._to_skip = 0
        block = self._upstream.block(count * self._step)
        return block if block is None or self._step == 1 else block[:: self._step]

    def advance(self, count: int) -> int:
        count = int(min(count, self._left))
        self._left -= count
        if not count:
            return 0
        skipped = self._upstream.advance(self._to_skip + count * self._step)
        done = max(0, skipped - self._to_skip)
        self._to_skip = 0
        return -(-done // self._step)


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
class _Shuffled(Stream):
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
        self._upstream = upstream
        self._size = buffer_size
        self._seed = seed
        self._numbers = numbers
        self._length = length
        self._buffer: Any = None
        self._random: Any = None
        self._picks: Iterator[int] = iter(())
        self._ended = False
        # Drawn, but not handed out yet.
        self._ready: Any = ()
        self._at = 0

    def _read(self, count: int) -> Any:
        if self._numbers:
            block = self._upstream.block(count)
            return () if block is None else as_array(block)
        return list(itertools.islice(self._upstream, count))

    def _draw(self) -> bool:
        """Makes more elements ready; returns False at the end."""
        if self._ended:
            return False
        if self._random is None:
            # RandomState, because its order never changes between versions of NumPy.
            bits = np.random.MT19937(np.random.SeedSequence(self._seed))
            self._random = np.random.RandomState(bits)
            self._buffer = self._read(self._size)
        self._at = 0
        # Elements are read one at a time, so that the buffer keeps its size.
        incoming = self._read(_CHUNK if self._numbers else 1)
        buffer = self._buffer
        if not len(incoming):
            self._ended = True
            order = self._random.permutation(len(buffer))
            is_array = isinstance(buffer, np.ndarray)
            self._ready = buffer[order] if is_array else [buffer[i] for i in order]
            self._buffer = None
            return bool(len(order))
        if self._numbers:
            # Items of a list are quicker to exchange.
            incoming = incoming.tolist()
            if isinstance(buffer, np.ndarray):
                buffer = self._buffer = buffer.tolist()
        self._ready = []
        for item in incoming:
            pick = next(self._picks, None)
            if pick is None:
                self._picks = iter(self._random.randint(0, self._size, _CHUNK).tolist())
                pick = next(self._picks)
            self._ready.append(buffer[pick])
            buffer[pick] = item
        return True

    def __next__(self) -> Nest:
        if self._at >= len(self._ready) and not self._draw():
            raise StopIteration
        self._at += 1
        return self._ready[self._at - 1]

    def block(self, count: int) -> Block | None:
        if not self._numbers:
            return super().block(count)
        pieces = []
        while count and (self._at < len(self._ready) or self._draw()):
            piece = np.asarray(self._ready[self._at : self._at + count])
            self._at += len(piece)
            count -= len(piece)
            pieces.append(piece)
        return join(pieces) if pieces else None

    def advance(self, count: int) -> int:
        if self._random is None and 0 <= self._length <= count:
            self._ended = True
            self._random = ()
            return self._length
        if not self._numbers:
            return super().advance(count)
        skipped = self.block(count)
        return 0 if skipped is None else len(skipped)


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
    for own in node.tree():
        if isinstance(own, WithOptions):
            merged = merged.merge(own.options)
    return merged
