"""Elements in random order."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from distributary._types import Nest
from distributary.datasets._nodes import Node, Random
from distributary.datasets._order import Reordering
from distributary.datasets._streams import Path, Stream, as_array
from distributary.datasets._structure import Block, join

# Random numbers are drawn, and row numbers read, this many at a time.
_CHUNK = 1024


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
