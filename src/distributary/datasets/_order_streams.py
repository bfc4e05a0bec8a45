"""Streams in another order, of elements or of row numbers that stand for them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import numpy as np

from distributary.datasets._streams import Stream
from distributary.datasets._structure import Block, join, num_rows


class Reordered(Stream):
    """Base class of reordering streams, which hold row numbers or elements.

    Args:
        numbers: Whether they hold row numbers.
    """

    def __init__(self, numbers: bool) -> None:
        self._numbers = numbers

    def several(self, count: int) -> Sequence[Any]:
        if not self._numbers:
            return super().several(count)
        block = self.block(count)
        return [] if block is None else block.tolist()


@final
class Taken(Reordered):
    """The first `count` elements."""

    def __init__(self, upstream: Stream, count: int, numbers: bool) -> None:
        super().__init__(numbers)
        self._upstream = upstream
        self._left = count

    def __next__(self) -> Any:
        if self._left <= 0:
            raise StopIteration
        self._left -= 1
        return next(self._upstream)

    def block(self, count: int) -> Block | None:
        count = min(count, self._left)
        self._left -= count
        return self._upstream.block(count) if count else None

    def span(self, count: int) -> tuple[int, int] | None:
        count = min(count, self._left)
        span = self._upstream.span(count)
        if span is not None:
            self._left -= count
        return span

    def advance(self, count: int) -> int:
        count = min(count, self._left)
        self._left -= count
        return self._upstream.advance(count) if count else 0


@final
class Skipped(Reordered):
    """All but the first `count` elements."""

    def __init__(self, upstream: Stream, count: int, numbers: bool) -> None:
        super().__init__(numbers)
        self._upstream = upstream
        self._count = count

    def _started(self) -> Stream:
        if self._count:
            self._upstream.advance(self._count)
            self._count = 0
        return self._upstream

    def __next__(self) -> Any:
        return next(self._started())

    def block(self, count: int) -> Block | None:
        return self._started().block(count)

    def span(self, count: int) -> tuple[int, int] | None:
        return self._started().span(count)

    def advance(self, count: int) -> int:
        return self._started().advance(count)


@final
class Sharded(Reordered):
    """Every `num_shards`-th element, starting with element `index`."""

    def __init__(self, upstream: Stream, num_shards: int, index: int, numbers: bool) -> None:
        super().__init__(numbers)
        self._upstream = upstream
        self._num_shards = num_shards
        self._index = index

    def __next__(self) -> Any:
        self._upstream.advance(self._index)
        element = next(self._upstream)
        self._upstream.advance(self._num_shards - self._index - 1)
        return element

    def block(self, count: int) -> Block | None:
        if not self._numbers:
            return super().block(count)
        block = self._upstream.block(count * self._num_shards)
        own = None if block is None else block[self._index :: self._num_shards]
        return None if own is None or not len(own) else own

    def advance(self, count: int) -> int:
        skipped = self._upstream.advance(count * self._num_shards)
        groups, rest = divmod(skipped, self._num_shards)
        return groups + (rest > self._index)


@final
class Chained(Reordered):
    """Streams one after the other.

    Args:
        make: Returns the stream with a number; None after the last.
        numbers: Whether they hold row numbers.
        length: Number of elements of every stream if it is the same for all, else None.
    """

    def __init__(
        self, make: Callable[[int], Stream | None], numbers: bool, length: int | None = None
    ) -> None:
        super().__init__(numbers)
        self._make = make
        self._length = length
        self._number = 0
        self._current: Stream | None = None
        self._from_current = 0
        self._ended = False

    def _next_stream(self) -> bool:
        """Moves on to the next stream; returns False after the last."""
        if self._current is not None:
            self._number += 1
        current = self._make(self._number)
        if current is None:
            return False
        self._current = current
        self._from_current = 0
        return True

    def _over(self) -> bool:
        """Returns whether nothing more will come; to be called at the end of a stream."""
        # Repeating an empty stream forever would never end.
        empty = self._current is not None and not self._from_current and self._length is not None
        self._ended = self._ended or empty or not self._next_stream()
        return self._ended

    def __next__(self) -> Any:
        while True:
            if self._current is not None:
                for element in self._current:
                    self._from_current += 1
                    return element
            if self._over():
                raise StopIteration

    def block(self, count: int) -> Block | None:
        pieces = []
        while count:
            piece = None if self._current is None else self._current.block(count)
            if piece is None:
                if self._over():
                    break
                continue
            taken = len(piece) if self._numbers else num_rows(piece)
            self._from_current += taken
            count -= taken
            pieces.append(piece)
        return join(pieces) if pieces else None

    def advance(self, count: int) -> int:
        skipped = 0
        while skipped < count:
            taken = 0
            if self._current is not None:
                taken = self._current.advance(count - skipped)
                self._from_current += taken
                skipped += taken
            if taken:
                continue
            if self._over():
                break
            if self._length and self._length > 0:
                whole = (count - skipped) // self._length
                if whole and self._make(self._number + whole) is not None:
                    self._number += whole
                    skipped += whole * self._length
                    self._current = self._make(self._number)
        return skipped


# Random numbers are drawn, and row numbers read, this many at a time.
_CHUNK = 1024


@final
class Shuffled(Reordered):
    """Elements in random order, drawn from a buffer as tf.data does.

    Args:
        upstream: The elements.
        buffer_size: Number of elements that wait to be drawn. If all of them fit, all orders are
            equally likely.
        seed: Numbers that determine the order.
        numbers: Whether they are row numbers.
        length: Number of elements, if known.
    """

    def __init__(
        self,
        upstream: Stream,
        buffer_size: int,
        seed: Sequence[int],
        numbers: bool,
        length: int | None,
    ) -> None:
        super().__init__(numbers)
        self._upstream = upstream
        self._size = buffer_size
        self._seed = seed
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
            return np.empty(0, np.int64) if block is None else block
        return self._upstream.several(count)

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
        if not len(incoming):
            self._ended = True
            order = self._random.permutation(len(self._buffer))
            last = self._buffer
            self._ready = last[order] if isinstance(last, np.ndarray) else [last[i] for i in order]
            self._buffer = None
            return bool(len(order))
        if self._numbers:
            incoming = incoming.tolist()
            if isinstance(self._buffer, np.ndarray):
                self._buffer = self._buffer.tolist()
        buffer, ready = self._buffer, []
        for item in incoming:
            pick = next(self._picks, None)
            if pick is None:
                self._picks = iter(self._random.randint(0, self._size, _CHUNK).tolist())
                pick = next(self._picks)
            ready.append(buffer[pick])
            buffer[pick] = item
        self._ready = ready
        return True

    def __next__(self) -> Any:
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
        if self._random is None and self._length is not None and count >= self._length:
            self._ended = True
            self._random = ()
            return self._length
        if not self._numbers:
            return super().advance(count)
        skipped = self.block(count)
        return 0 if skipped is None else len(skipped)
