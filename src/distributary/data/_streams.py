"""One pass over a dataset: streams of elements, or of numbers that stand for rows of a source.

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
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, final

import jax
import numpy as np
from jax.tree_util import PyTreeDef

from distributary.data._structure import Block, join, num_rows, stack
from distributary.devices import Nest

Path: TypeAlias = tuple[int, ...]
"""Says which repetition of its dataset a stream belongs to: the number of the pass, then the number
in every `repeat` on the way. Shuffles derive their order from it."""

PEEK: Path = (2**63,)
"""The path of a pass that only looks at the first elements; they are not lost for other passes."""

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


class Stream(abc.ABC):
    """An iterator over elements that can hand out several at once, and skip some."""

    def __iter__(self) -> Iterator[Nest]:
        return self

    @abc.abstractmethod
    def __next__(self) -> Nest: ...

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
