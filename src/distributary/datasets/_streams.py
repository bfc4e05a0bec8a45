"""One pass over a dataset: streams of elements, and of row numbers that stand for them.

Reordering operations (take, skip, shard, shuffle, repeat) work the same on both. As long as a
dataset only reorders the rows of a source, they work on row numbers. The rows themselves are
gathered only when a batch of them is needed.
"""

import abc
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from sys import getrefcount
from typing import Any, Protocol, final

import numpy as np

from distributary.datasets._structure import (
    Block,
    flatten,
    join,
    num_rows,
    some_rows,
    stack,
    unflatten,
)

# Says which repetition of its dataset a stream belongs to: the number of the pass, then the number
# in every `repeat` on the way. Shuffles derive their order from it.
Path = tuple[int, ...]


class Rows(Protocol):
    """Numbered elements that can be read in any order."""

    def __len__(self) -> int: ...

    def row(self, number: int) -> Any:
        """Returns one element."""

    def rows(self, numbers: np.ndarray) -> Block:
        """Returns several elements, stacked; int64 numbers `[k]`, k > 0."""


class Stream(abc.ABC):
    """An iterator over elements that can hand out several at once, and skip some."""

    def __iter__(self) -> Iterator[Any]:
        return self

    @abc.abstractmethod
    def __next__(self) -> Any: ...

    def block(self, count: int) -> Block | None:
        """Returns the next `count` elements, stacked; fewer at the end, None if none are left."""
        elements = self.several(count)
        return stack(elements) if elements else None

    def several(self, count: int) -> Sequence[Any]:
        """Returns the next `count` elements; fewer only at the end."""
        return list(itertools.islice(self, count))

    def span(self, count: int) -> tuple[int, int] | None:
        """Returns the next row numbers as first and count, if they are known to be consecutive.

        Otherwise returns None and takes nothing.
        """
        return None

    def advance(self, count: int) -> int:
        """Skips `count` elements, fewer only at the end; returns how many it skipped."""
        return sum(1 for _ in itertools.islice(self, count))


@final
class Numbers(Stream):
    """The row numbers 0 to `count - 1`; endless if `count` is None."""

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
        # Returns consecutive rows for their first number and a count, where this is quicker.
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
        """Returns the next row numbers without fetching their rows."""
        return self._order.block(count)

    def rows(self, numbers: np.ndarray) -> Block:
        """Returns rows of the source."""
        return self._source.rows(numbers)

    def advance(self, count: int) -> int:
        return self._order.advance(count)


def call(fn: Callable[..., Any], element: Any) -> Any:
    """Calls a user's function; the items of a tuple become its arguments, as in tf.data."""
    if type(element) is tuple:
        return fn(*element)
    return fn(element)


def mapped(fn: Callable[..., Any], element: Any) -> Any:
    """Returns the result of a user's function. No later call changes its arrays.

    Arrays that the function may write to again are copied: not those that it has been given, and
    not new ones that nobody else holds.
    """
    result = call(fn, element)
    if result is element:
        return result
    if (  # the usual case, without a walk
        type(result) is np.ndarray and result.base is None and getrefcount(result) <= _NEW_ALONE
    ):
        return result
    leaves, tree = flatten(result)
    given = flatten(element)[0]
    known = {id(leaf) for leaf in given} | {id(getattr(leaf, "base", None)) for leaf in given}
    known.discard(id(None))
    of_nest, of_leaves = _num_references(result, leaves)
    new = _NEW_NESTS.get(type(result), (0, [0]))
    is_new = of_nest <= new[0]
    for i, leaf in enumerate(leaves):
        if (
            isinstance(leaf, np.ndarray)
            and id(leaf) not in known
            and id(leaf.base) not in known
            and not (is_new and leaf.base is None and of_leaves[i] <= new[1][0])
        ):
            leaves[i] = leaf.copy()
    return unflatten(tree, leaves)


def _num_references(nest: Any, leaves: list[Any]) -> tuple[int, list[int]]:
    return getrefcount(nest), [getrefcount(leaf) for leaf in leaves]


def _references_of_new(nest: Any) -> tuple[int, list[int]]:
    """Returns what `mapped` counts if nobody else holds a result; versions of Python differ."""
    result = call(lambda: nest.pop(), ())
    leaves, _ = flatten(result)
    return _num_references(result, leaves)


def _references_of_new_alone() -> int:
    result = call(lambda: np.zeros(1), ())
    return getrefcount(result)


_NEW_ALONE = _references_of_new_alone()
# Arrays in deeper nests are always copied.
_NEW_NESTS: dict[type, tuple[int, list[int]]] = {
    tuple: _references_of_new([(np.zeros(1),)]),
    dict: _references_of_new([{"x": np.zeros(1)}]),
}


@final
class Mapped(Stream):
    """The results of a function."""

    def __init__(self, upstream: Stream, fn: Callable[..., Any]) -> None:
        self._upstream = upstream
        self._fn = fn

    def __next__(self) -> Any:
        return mapped(self._fn, next(self._upstream))

    def advance(self, count: int) -> int:
        return self._upstream.advance(count)


@final
class MappedInThreads(Stream):
    """The results of a function that runs in `num_threads` threads, in order."""

    def __init__(self, upstream: Stream, fn: Callable[..., Any], num_threads: int) -> None:
        self._upstream = upstream
        self._fn = fn
        self._num_threads = num_threads
        self._executor: ThreadPoolExecutor | None = None
        self._running: list[Future[Any]] = []

    def __next__(self) -> Any:
        if self._executor is None:
            # Its threads end when it is garbage collected, together with this stream.
            self._executor = ThreadPoolExecutor(self._num_threads, "distributary-map")
        while len(self._running) <= self._num_threads:
            try:
                element = next(self._upstream)
            except StopIteration:
                break
            self._running.append(self._executor.submit(mapped, self._fn, element))
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
    """The elements for which a function returns True."""

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
        size: Number of elements in a batch.
        drop_remainder: Whether to drop a last batch that has fewer elements.
        stack: Makes a batch from a list of elements; None stacks elements of equal shape.
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
        """Returns some rows of the next batch, and the number of rows in the whole batch.

        Args:
            bounds: Returns the wanted rows, at least one, for the size of the batch. The other rows
                are not fetched, where the source allows that.
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
            return some_rows(upstream.rows(numbers[:1]), slice(0)), size
        elements = upstream.several(self._size)
        self._check(len(elements))
        wanted = elements[bounds(len(elements))]
        make = self._stack or stack
        return (make(wanted) if wanted else some_rows(make(elements[:1]), slice(0))), len(elements)

    def _check(self, size: int) -> None:
        if not size or (self._drop_remainder and size < self._size):
            raise StopIteration

    def advance(self, count: int) -> int:
        skipped = self._upstream.advance(count * self._size)
        whole, rest = divmod(skipped, self._size)
        return whole + (rest > 0 and not self._drop_remainder)


@final
class Unbatched(Stream):
    """The rows of batches."""

    def __init__(self, upstream: Stream) -> None:
        self._upstream = upstream
        self._leaves: list[Any] = []
        self._tree: Any = None
        self._left = 0

    def _more(self) -> bool:
        """Returns whether there is a row; fetches the next batch if necessary."""
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
        blocks = [some_rows(block, slice(size)) for block in blocks]
        return unflatten(self._tree, blocks)

    def advance(self, count: int) -> int:
        return min(upstream.advance(count) for upstream in self._upstreams)


@final
class Interleaved(Stream):
    """Elements of several streams in turns.

    Args:
        make: The streams.
        cycle_length: Number of streams that take turns.
        block_length: Number of elements that a stream gives before it is the next one's turn.
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
