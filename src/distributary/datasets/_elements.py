"""Operations that make new elements, keep them, or read them ahead."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

from distributary.datasets._nodes import Node
from distributary.datasets._options import AUTOTUNE, INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from distributary.datasets._prefetch import Prefetched
from distributary.datasets._rows import OneByOne
from distributary.datasets._sources import from_list
from distributary.datasets._streams import (
    Batched,
    Filtered,
    Mapped,
    MappedInThreads,
    Numbers,
    Path,
    Rows,
    Stream,
    Unbatched,
    mapped,
)
from distributary.datasets._structure import Block, TensorSpec, map_specs, pad_and_stack


@final
class _MappedRows(OneByOne):
    def __init__(self, source: Rows, fn: Callable[..., Any]) -> None:
        self._source = source
        self._fn = fn

    def __len__(self) -> int:
        return len(self._source)

    def row(self, number: int) -> Any:
        return mapped(self._fn, self._source.row(number))


def num_threads(num_parallel_calls: int | None) -> int | None:
    """Returns the number of threads that `num_parallel_calls` means; None for no threads."""
    if num_parallel_calls == AUTOTUNE:
        return os.cpu_count() or 1
    return num_parallel_calls


@final
@dataclass(frozen=True, eq=False)
class Map(Node):
    """The results of a function."""

    input: Node
    fn: Callable[..., Any]
    threads: int | None

    def cardinality(self) -> int:
        return self.input.cardinality()

    def source(self) -> Rows | None:
        source = self.input.source() if self.threads is None else None
        return None if source is None else _MappedRows(source, self.fn)

    def order(self, path: Path) -> Stream:
        return self.input.order(path)

    def is_identity(self) -> bool:
        return self.threads is None and self.input.is_identity()

    def elements(self, path: Path) -> Stream:
        upstream = self.input.stream(path)
        if self.threads is None:
            return Mapped(upstream, self.fn)
        return MappedInThreads(upstream, self.fn, self.threads)

    def is_in_memory(self) -> bool:
        return False

    def label(self) -> str:
        return f"map({_name(self.fn)})"


def _name(fn: Any) -> str:
    return getattr(fn, "__qualname__", None) or type(fn).__name__


@final
@dataclass(frozen=True, eq=False)
class Filter(Node):
    """The elements for which a function returns True."""

    input: Node
    predicate: Callable[..., Any]

    def cardinality(self) -> int:
        size = self.input.cardinality()
        return size if size == 0 else UNKNOWN_CARDINALITY

    def elements(self, path: Path) -> Stream:
        return Filtered(self.input.stream(path), self.predicate)

    def spec(self) -> Any:
        return self.input.spec()

    def is_in_memory(self) -> bool:
        return False

    def label(self) -> str:
        return f"filter({_name(self.predicate)})"


@final
@dataclass(frozen=True, eq=False)
class Batch(Node):
    """Elements stacked, `size` at a time; padded to one shape if `padding` is given."""

    input: Node
    size: int
    drop_remainder: bool
    padding: tuple[Any, Any] | None = None

    def cardinality(self) -> int:
        count = self.input.cardinality()
        if count < 0:
            return count
        return count // self.size if self.drop_remainder else -(-count // self.size)

    def elements(self, path: Path) -> Batched:
        return Batched(self.input.stream(path), self.size, self.drop_remainder, self._stacking())

    def _stacking(self) -> Callable[[Sequence[Any]], Block] | None:
        if self.padding is None:
            return None
        shapes, values = self.padding
        return lambda elements: pad_and_stack(elements, shapes, values)

    def spec(self) -> Any:
        size = self.size if self.drop_remainder else None
        padded = self.padding is not None

        def batched(spec: TensorSpec) -> TensorSpec:
            own = tuple(None for _ in spec.shape) if padded else spec.shape
            return TensorSpec((size, *own), spec.dtype)

        return map_specs(batched, self.input.spec())

    def is_batched(self) -> bool | None:
        return True

    def makes_arrays(self) -> bool:
        return True

    def label(self) -> str:
        name = "batch" if self.padding is None else "padded_batch"
        return f"{name}({self.size}, drop_remainder={self.drop_remainder})"


@final
@dataclass(frozen=True, eq=False)
class Unbatch(Node):
    """The rows of batches."""

    input: Node

    def cardinality(self) -> int:
        size = self.input.cardinality()
        return size if size in (0, INFINITE_CARDINALITY) else UNKNOWN_CARDINALITY

    def elements(self, path: Path) -> Stream:
        return Unbatched(self.input.stream(path))

    def spec(self) -> Any:
        return map_specs(lambda s: TensorSpec(s.shape[1:], s.dtype), self.input.spec())

    def is_batched(self) -> bool | None:
        return False

    def label(self) -> str:
        return "unbatch"


@final
class _CachedRows(OneByOne):
    def __init__(self, source: Rows, cache: dict[int, Any]) -> None:
        self._source = source
        self._cache = cache

    def __len__(self) -> int:
        return len(self._source)

    def row(self, number: int) -> Any:
        try:
            return self._cache[number]
        except KeyError:
            element = self._cache[number] = self._source.row(number)
            return element


# The key of a cache for the elements of a complete pass; otherwise it holds rows by number.
_ALL = "all"


@final
class _CachingStream(Stream):
    def __init__(self, upstream: Stream, cache: dict[Any, Any]) -> None:
        self._upstream = upstream
        self._cache = cache
        self._elements: list[Any] = []

    def __next__(self) -> Any:
        try:
            element = next(self._upstream)
        except StopIteration:
            self._cache[_ALL] = self._elements
            raise
        self._elements.append(element)
        return element


@final
@dataclass(frozen=True, eq=False)
class Cache(Node):
    """Elements kept in memory, either row by row or once a first pass is complete."""

    input: Node
    cache: dict[Any, Any]

    def cardinality(self) -> int:
        return self.input.cardinality()

    def source(self) -> Rows | None:
        source = self.input.source() if self.input.is_identity() else None
        return None if source is None else _CachedRows(source, self.cache)

    def order(self, path: Path) -> Stream:
        return Numbers(self.cardinality())

    def is_identity(self) -> bool:
        return self.input.is_identity()

    def elements(self, path: Path) -> Stream:
        if _ALL in self.cache:
            return from_list(self.cache[_ALL]).stream(path)
        # Pass 0, because what is kept must not depend on which pass came first.
        return _CachingStream(self.input.stream((0,)), self.cache)

    def spec(self) -> Any:
        return self.input.spec()

    def label(self) -> str:
        return "cache"


@final
class PrefetchedStream(Stream):
    """Elements that a thread makes ahead of time."""

    def __init__(self, upstream: Stream, depth: int) -> None:
        self._upstream = upstream
        self._depth = depth
        self._prefetched: Prefetched | None = None

    def __next__(self) -> Any:
        if self._prefetched is None:
            self._prefetched = Prefetched(self._upstream, self._depth)
        return next(self._prefetched)

    def advance(self, count: int) -> int:
        # Until the thread has started, skipped elements need not be made.
        return self._upstream.advance(count) if self._prefetched is None else super().advance(count)


@final
@dataclass(frozen=True, eq=False)
class Prefetch(Node):
    """Elements that a thread makes ahead of time."""

    input: Node
    depth: int

    def cardinality(self) -> int:
        return self.input.cardinality()

    def elements(self, path: Path) -> Stream:
        return PrefetchedStream(self.input.stream(path), self.depth)

    def spec(self) -> Any:
        return self.input.spec()

    def label(self) -> str:
        return "prefetch"
