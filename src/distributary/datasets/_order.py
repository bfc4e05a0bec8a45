"""Operations that reorder elements or choose among them."""

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from distributary.datasets._nodes import Node, Random, all_nodes
from distributary.datasets._options import INFINITE_CARDINALITY, Options
from distributary.datasets._order_streams import Chained, Sharded, Shuffled, Skipped, Taken
from distributary.datasets._streams import Path, Rows, Stream


class _Reordering(Node):
    """Base class of operations that work the same on elements and on row numbers."""

    input: Node

    def source(self) -> Rows | None:
        return self.input.source()

    def order(self, path: Path) -> Stream:
        return self.apply(self.input.order, path, True)

    def elements(self, path: Path) -> Stream:
        return self.apply(self.input.stream, path, False)

    @abc.abstractmethod
    def apply(self, make: Callable[[Path], Stream], path: Path, numbers: bool) -> Stream:
        """Applies the operation to the streams of `make`, which give row numbers if `numbers`."""

    def spec(self) -> Any:
        return self.input.spec()

    def fixed_spec(self) -> Any | None:
        return self.input.fixed_spec()


@final
@dataclass(frozen=True, eq=False)
class Take(_Reordering):
    """The first `count` elements."""

    input: Node
    count: int

    def cardinality(self) -> int:
        size = self.input.cardinality()
        if size == INFINITE_CARDINALITY:
            return self.count
        return size if size < 0 else min(size, self.count)

    def apply(self, make: Callable[[Path], Stream], path: Path, numbers: bool) -> Stream:
        return Taken(make(path), self.count, numbers)

    def label(self) -> str:
        return f"take({self.count})"


@final
@dataclass(frozen=True, eq=False)
class Skip(_Reordering):
    """All but the first `count` elements; none if it is -1."""

    input: Node
    count: int

    def cardinality(self) -> int:
        size = self.input.cardinality()
        if self.count < 0:
            return 0
        return size if size < 0 else max(0, size - self.count)

    def apply(self, make: Callable[[Path], Stream], path: Path, numbers: bool) -> Stream:
        if self.count < 0:
            return Taken(make(path), 0, numbers)
        return Skipped(make(path), self.count, numbers)

    def label(self) -> str:
        return f"skip({self.count})"


@final
@dataclass(frozen=True, eq=False)
class Shard(_Reordering):
    """Every `num_shards`-th element; all elements while `num_shards` is a hint."""

    input: Node
    num_shards: int
    index: int

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
        return Sharded(make(path), self.num_shards, self.index, numbers)

    def label(self) -> str:
        return f"shard({self.num_shards}, {self.index})"


@final
@dataclass(frozen=True, eq=False)
class Shuffle(_Reordering, Random):
    """Elements in random order."""

    input: Node
    buffer_size: int
    seed: int | None
    reshuffle: bool
    drawn: int

    def cardinality(self) -> int:
        return self.input.cardinality()

    def apply(self, make: Callable[[Path], Stream], path: Path, numbers: bool) -> Stream:
        size = self.cardinality()
        seed = self.seed_of(path if self.reshuffle else ())
        return Shuffled(make(path), self.buffer_size, seed, numbers, size if size >= 0 else None)

    def label(self) -> str:
        return f"shuffle({self.buffer_size}, seed={self.seed}, reshuffle={self.reshuffle})"


@final
@dataclass(frozen=True, eq=False)
class Repeat(_Reordering):
    """The elements `count` times; forever if it is -1."""

    input: Node
    count: int

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

        size = self.input.cardinality()
        return Chained(nth, numbers, size)

    def label(self) -> str:
        return f"repeat({self.count})"


@final
@dataclass(frozen=True, eq=False)
class WithOptions(_Reordering):
    """Options for the operations before and after."""

    input: Node
    options: Options

    def cardinality(self) -> int:
        return self.input.cardinality()

    def apply(self, make: Callable[[Path], Stream], path: Path, numbers: bool) -> Stream:
        return make(path)

    def is_identity(self) -> bool:
        return self.input.is_identity()

    def label(self) -> str:
        return "with_options"


def options_of(node: Node) -> Options:
    """Returns the options of a whole tree; later ones win."""
    merged = Options()
    for own in all_nodes(node):
        if isinstance(own, WithOptions):
            merged = merged.merge(own.options)
    return merged
