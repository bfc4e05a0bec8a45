"""One pass over a dataset: streams of elements, and of row numbers that stand for them.

Reordering operations (take, skip, shard, shuffle, repeat) work the same on both. As long as a
dataset only reorders the rows of a source, they work on row numbers, and the rows themselves are
gathered where a batch of them is needed.
"""

import abc
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, final

import numpy as np

from distributary.datasets._structure import Block, flatten, join, num_rows, stack, unflatten

# Which of the repetitions of its dataset a stream belongs to: the number of the pass, then that of
# every `repeat` on the way. Shuffles derive their order from it.
Path = tuple[int, ...]


class Rows(Protocol):
    """Elements with numbers that can be had in any order."""

    def __len__(self) -> int: ...

    def row(self, number: int) -> Any:
        """One element."""

    def rows(self, numbers: np.ndarray) -> Block:
        """Several elements, stacked; int64 numbers `[k]`, k > 0."""


class Stream(abc.ABC):
    """Iterator over elements that can hand out several at once and skip some."""

    def __iter__(self) -> Iterator[Any]:
        return self

    @abc.abstractmethod
    def __next__(self) -> Any: ...

    def block(self, count: int) -> Block | None:
        """The next `count` elements, stacked; fewer only at the end, None if there are none."""
        elements = self.several(count)
        return stack(elements) if elements else None

    def several(self, count: int) -> Sequence[Any]:
        """The next `count` elements; fewer only at the end."""
        return list(itertools.islice(self, count))

    def span(self, count: int) -> tuple[int, int] | None:
        """The next row numbers as first and count, if they are consecutive by construction.

        Otherwise None, and nothing is taken.
        """
        return None

    def advance(self, count: int) -> int:
        """Skips `count` elements, fewer only at the end; returns how many."""
        return sum(1 for _ in itertools.islice(self, count))


@final
class Numbers(Stream):
    """The row numbers 0 to `count - 1`; without end if `count` is None."""

    def __init__(self, count: int | None) -> None:
        self._count = count
        self._at = 0

    def _left(self, wanted: int) -> int:
        return wanted if self._count is None else min(wanted, self._count - self._at)

    def __next__(self) -> int:
        if not self._left(1):
            raise StopIteration
        self._at += 1
        return self._at - 1

    def block(self, count: int) -> Block | None:
        count = self._left(count)
        self._at += count
        return np.arange(self._at - count, self._at) if count else None

    def several(self, count: int) -> Sequence[Any]:
        block = self.block(count)
        return [] if block is None else block.tolist()

    def span(self, count: int) -> tuple[int, int] | None:
        count = self._left(count)
        self._at += count
        return self._at - count, count

    def advance(self, count: int) -> int:
        count = self._left(count)
        self._at += count
        return count


@final
class Picked(Stream):
    """The rows of a source in the order of a stream of row numbers."""

    def __init__(self, source: Rows, order: Stream) -> None:
        self._source = source
        self._order = order
        # From the first number and a count to consecutive rows, where that is quicker.
        self._part: Callable[[int, int], Block] | None = getattr(source, "part", None)

    def __next__(self) -> Any:
        return self._source.row(next(self._order))

    def block(self, count: int) -> Block | None:
        if self._part is not None:
            span = self._order.span(count)
            if span is not None:
                return self._part(*span) if span[1] else None
        numbers = self._order.block(count)
        return None if numbers is None else self._source.rows(numbers)

    def numbers(self, count: int) -> np.ndarray | None:
        """The next row numbers, whose rows are not fetched."""
        return self._order.block(count)

    def rows(self, numbers: np.ndarray) -> Block:
        """Rows of the source."""
        return self._source.rows(numbers)

    def advance(self, count: int) -> int:
        return self._order.advance(count)


class _Joined(Stream):
    """Base of reordering streams, which may hold row numbers or elements.

    Args:
        numbers: Whether they are row numbers.
    """

    def __init__(self, numbers: bool) -> None:
        self._numbers = numbers

    def several(self, count: int) -> Sequence[Any]:
        if not self._numbers:
            return super().several(count)
        block = self.block(count)
        return [] if block is None else block.tolist()


@final
class Taken(_Joined):
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
class Skipped(_Joined):
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
class Sharded(_Joined):
    """Every `num_shards`-th element, from number `index` on."""

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
class Chained(_Joined):
    """Streams one after the other.

    Args:
        make: From the number of a stream to the stream; None after the last.
        numbers: Whether they hold row numbers.
        length: Number of elements of every stream if they all have as many, else None.
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
        """Goes on to the next stream; False after the last."""
        if self._current is not None:
            self._number += 1
        current = self._make(self._number)
        if current is None:
            return False
        self._current = current
        self._from_current = 0
        return True

    def _over(self) -> bool:
        """Whether there is nothing more to come, seen at the end of a stream."""
        # A stream without elements that repeats for ever would never end.
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


# Random numbers are drawn this many at a time, and row numbers read so many.
_CHUNK = 1024


@final
class Shuffled(_Joined):
    """Elements in random order, drawn from a buffer as tf.data does.

    Args:
        upstream: The elements.
        buffer_size: How many wait to be drawn from; a buffer for all gives a uniform permutation.
        seed: Numbers that determine the order.
        numbers: Whether they are row numbers.
        length: Number of elements if it is known.
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
        # Drawn and not yet handed out.
        self._ready: Any = ()
        self._at = 0

    def _read(self, count: int) -> Any:
        if self._numbers:
            block = self._upstream.block(count)
            return np.empty(0, np.int64) if block is None else block
        return self._upstream.several(count)

    def _draw(self) -> bool:
        """Makes more elements ready; False at the end."""
        if self._ended:
            return False
        if self._random is None:
            # The order that RandomState gives never changes between versions of NumPy.
            bits = np.random.MT19937(np.random.SeedSequence(self._seed))
            self._random = np.random.RandomState(bits)
            self._buffer = self._read(self._size)
        self._at = 0
        # Of elements one at a time, which keeps the buffer at its size.
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


def call(fn: Callable[..., Any], element: Any) -> Any:
    """Applies a user's function; the items of a tuple are its arguments, as in tf.data."""
    if type(element) is tuple:
        return fn(*element)
    return fn(element)


@final
class Mapped(Stream):
    """The results of a function."""

    def __init__(self, upstream: Stream, fn: Callable[..., Any]) -> None:
        self._upstream = upstream
        self._fn = fn

    def __next__(self) -> Any:
        return call(self._fn, next(self._upstream))

    def advance(self, count: int) -> int:
        return self._upstream.advance(count)


@final
class MappedInThreads(Stream):
    """The results of a function that runs in `num_threads` threads, in the order of elements."""

    def __init__(self, upstream: Stream, fn: Callable[..., Any], num_threads: int) -> None:
        self._upstream = upstream
        self._fn = fn
        self._num_threads = num_threads
        self._executor: ThreadPoolExecutor | None = None
        self._running: list[Future[Any]] = []

    def __next__(self) -> Any:
        if self._executor is None:
            # Its threads end when it is collected, which is when this stream is.
            self._executor = ThreadPoolExecutor(self._num_threads, "distributary-map")
        while len(self._running) <= self._num_threads:
            try:
                element = next(self._upstream)
            except StopIteration:
                break
            self._running.append(self._executor.submit(call, self._fn, element))
        if not self._running:
            self._executor.shutdown(wait=False)
            raise StopIteration
        return self._running.pop(0).result()

    def advance(self, count: int) -> int:
        started = len(self._running[:count])
        del self._running[:count]
        return started + self._upstream.advance(count - started)


@final
class Filtered(Stream):
    """The elements of which a function says True."""

    def __init__(self, upstream: Stream, predicate: Callable[..., Any]) -> None:
        self._upstream = upstream
        self._predicate = predicate

    def __next__(self) -> Any:
        for element in self._upstream:
            if bool(call(self._predicate, element)):
                return element
        raise StopIteration


@final
class Batched(Stream):
    """Elements, `size` at a time.

    Args:
        upstream: The elements.
        size: How many.
        drop_remainder: Whether a last batch of fewer is left out.
        stack: Makes a batch of a list of elements; None for stacking those of equal shape.
    """

    def __init__(
        self,
        upstream: Stream,
        size: int,
        drop_remainder: bool,
        stack: Callable[[Sequence[Any]], Block] | None = None,
    ) -> None:
        self._upstream = upstream
        self._size = size
        self._drop_remainder = drop_remainder
        self._stack = stack

    def __next__(self) -> Block:
        if self._stack is None:
            batch = self._upstream.block(self._size)
        else:
            elements = self._upstream.several(self._size)
            batch = self._stack(elements) if elements else None
        if batch is None or (self._drop_remainder and num_rows(batch) < self._size):
            raise StopIteration
        return batch

    def part(self, bounds: Callable[[int], slice]) -> tuple[Block, int]:
        """Some rows of the next batch, and how many the whole batch has.

        Args:
            bounds: From the size of the batch to the rows that are wanted, one at least. The other
                rows are not fetched where the source allows that.
        """
        upstream = self._upstream
        if isinstance(upstream, Picked) and self._stack is None:
            numbers = upstream.numbers(self._size)
            size = 0 if numbers is None else len(numbers)
            self._check(size)
            assert numbers is not None
            own = numbers[bounds(size)]
            if len(own):
                return upstream.rows(own), size
            return _empty(upstream.rows(numbers[:1])), size
        elements = upstream.several(self._size)
        self._check(len(elements))
        wanted = elements[bounds(len(elements))]
        make = self._stack or stack
        return (make(wanted) if wanted else _empty(make(elements[:1]))), len(elements)

    def _check(self, size: int) -> None:
        if not size or (self._drop_remainder and size < self._size):
            raise StopIteration

    def advance(self, count: int) -> int:
        skipped = self._upstream.advance(count * self._size)
        whole, rest = divmod(skipped, self._size)
        return whole + (rest > 0 and not self._drop_remainder)


def _empty(block: Block) -> Block:
    leaves, tree = flatten(block)
    return unflatten(tree, [leaf[:0] for leaf in leaves])


@final
class Unbatched(Stream):
    """The rows of batches."""

    def __init__(self, upstream: Stream) -> None:
        self._upstream = upstream
        self._leaves: list[Any] = []
        self._tree: Any = None
        self._left = 0

    def _more(self) -> bool:
        """Whether there is a row; fetches the next batch if need be."""
        while not self._left:
            try:
                batch = next(self._upstream)
            except StopIteration:
                return False
            leaves, self._tree = flatten(batch)
            self._leaves = [leaf if hasattr(leaf, "shape") else np.asarray(leaf) for leaf in leaves]
            self._left = num_rows(self._leaves)
        return True

    def __next__(self) -> Any:
        if not self._more():
            raise StopIteration
        row = [leaf[-self._left] for leaf in self._leaves]
        self._left -= 1
        return unflatten(self._tree, row)

    def block(self, count: int) -> Block | None:
        pieces = []
        while count and self._more():
            taken = min(count, self._left)
            start = len(self._leaves[0]) - self._left
            rows = [leaf[start : start + taken] for leaf in self._leaves]
            pieces.append(unflatten(self._tree, rows))
            self._left -= taken
            count -= taken
        return join(pieces) if pieces else None

    def advance(self, count: int) -> int:
        skipped = 0
        while skipped < count and self._more():
            taken = min(count - skipped, self._left)
            self._left -= taken
            skipped += taken
        return skipped


@final
class Zipped(Stream):
    """Elements of several streams side by side; ends with the shortest."""

    def __init__(self, upstreams: Sequence[Stream], tree: Any) -> None:
        self._upstreams = upstreams
        self._tree = tree

    def __next__(self) -> Any:
        return unflatten(self._tree, [next(upstream) for upstream in self._upstreams])

    def block(self, count: int) -> Block | None:
        blocks = [upstream.block(count) for upstream in self._upstreams]
        if any(block is None for block in blocks):
            return None
        size = min(num_rows(block) for block in blocks)
        blocks = [_first_rows(block, size) for block in blocks]
        return unflatten(self._tree, blocks)

    def advance(self, count: int) -> int:
        return min(upstream.advance(count) for upstream in self._upstreams)


def _first_rows(block: Block, count: int) -> Block:
    leaves, tree = flatten(block)
    return unflatten(tree, [leaf[:count] for leaf in leaves])


@final
class Interleaved(Stream):
    """Elements of several streams in turns.

    Args:
        make: The streams.
        cycle_length: How many take turns.
        block_length: How many elements one gives before it is the next one's turn.
    """

    def __init__(self, make: Iterator[Stream], cycle_length: int, block_length: int) -> None:
        self._make = make
        self._cycle_length = cycle_length
        self._block_length = block_length
        self._open: list[Stream | None] = [None] * cycle_length
        self._ended = False
        self._at = 0
        self._given = 0

    def __next__(self) -> Any:
        while not self._ended or any(stream is not None for stream in self._open):
            current = self._open[self._at]
            if current is None:
                current = self._open[self._at] = self._next_stream()
            if current is None:
                self._turn()
                continue
            for element in current:
                self._given += 1
                if self._given == self._block_length:
                    self._turn()
                return element
            # The place stays empty until its next turn, as in tf.data.
            self._open[self._at] = None
            self._turn()
        raise StopIteration

    def _next_stream(self) -> Stream | None:
        stream = None if self._ended else next(self._make, None)
        self._ended = stream is None
        return stream

    def _turn(self) -> None:
        self._at = (self._at + 1) % self._cycle_length
        self._given = 0
