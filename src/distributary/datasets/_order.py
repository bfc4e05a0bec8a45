"""Operations that choose among elements, or repeat them."""

import abc
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import final

from distributary._types import Nest
from distributary.datasets._nodes import Node, Run, SameElements
from distributary.datasets._numbered_rows import Rows
from distributary.datasets._options import INFINITE_CARDINALITY, Options
from distributary.datasets._streams import Chained, Path, Stream
from distributary.datasets._structure import Block


class Reordering(SameElements):
    """Base class of operations that work the same on elements and on row numbers."""

    def source(self) -> Rows | None:
        return self.input.source()

    def order(self, path: Path) -> Stream:
        return self.apply(self.input.order, path, True)

    def elements(self, path: Path) -> Stream:
        return self.apply(self.input.stream, path, False)

    @abc.abstractmethod
    def apply(self, make: Callable[[Path], Stream], path: Path, numbers: bool) -> Stream:
        """Applies the operation to the streams of `make`, which give row numbers if `numbers`."""

    def fixed_spec(self) -> Nest | None:
        return self.input.fixed_spec()


@final
@dataclass(frozen=True, eq=False)
class Take(Reordering):
    """The first `count` elements."""

    input: Node
    count: int
    pattern = "take({count})"

    def cardinality(self) -> int:
        size = self.input.cardinality()
        if size == INFINITE_CARDINALITY:
            return self.count
        return size if size < 0 else min(size, self.count)

    def apply(self, make: Callable[[Path], Stream], path: Path, numbers: bool) -> Stream:
        return _Sliced(make(path), numbers, count=self.count)


@final
@dataclass(frozen=True, eq=False)
class Skip(Reordering):
    """All but the first `count` elements; none if it is -1."""

    input: Node
    count: int
    pattern = "skip({count})"

    def cardinality(self) -> int:
        size = self.input.cardinality()
        if self.count < 0:
            return 0
        return size if size < 0 else max(0, size - self.count)

    def apply(self, make: Callable[[Path], Stream], path: Path, numbers: bool) -> Stream:
        if self.count < 0:
            return _Sliced(make(path), numbers, count=0)
        return _Sliced(make(path), numbers, self.count)


@final
@dataclass(frozen=True, eq=False)
class Shard(Reordering):
    """Every `num_shards`-th element; all elements while `num_shards` is a hint."""

    input: Node
    num_shards: int
    index: int
    pattern = "shard({num_shards}, {index})"

    @property
    def is_hint(self) -> bool:
        """True if a worker's shard will replace it."""
        return self.num_shards < 0

    def cardinality(self) -> int:
        size = self.input.cardinality()
        if size < 0 or self.is_hint:
            return size
        return len(range(self.index, size, self.num_shards))

    def apply(self, make: Callable[[Path], Stream], path: Path, numbers: bool) -> Stream:
        if self.is_hint:
            return make(path)
        return _Sliced(make(path), numbers, self.index, step=self.num_shards)


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
        self, upstream: Stream, numbers: bool, start: int = 0, count: float = inf, step: int = 1
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
class WithOptions(Reordering):
    """Options for the operations before and after."""

    input: Node
    options: Options
    pattern = "with_options"

    def apply(self, make: Callable[[Path], Stream], path: Path, numbers: bool) -> Stream:
        return make(path)

    def runs(self) -> list[Run] | None:
        return self.input.runs()


def options_of(node: Node) -> Options:
    """Returns the options of a whole tree; later ones win."""
    merged = Options()
    for own in node.tree():
        if isinstance(own, WithOptions):
            merged = merged.merge(own.options)
    return merged
