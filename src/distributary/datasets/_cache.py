"""Elements that are kept in memory, so that everything before them is computed only once."""

from dataclasses import dataclass, field
from typing import Any, final

from distributary._types import Nest
from distributary.datasets._iterables import RandomAccess
from distributary.datasets._nodes import Node, SameElements
from distributary.datasets._numbered_rows import MadeRows, Rows
from distributary.datasets._streams import Path, Stream, is_peek

# The key of a cache for the elements of a complete pass; otherwise it holds rows by number.
_ALL = "all"


@final
@dataclass(frozen=True, eq=False)
class Cache(SameElements):
    """Elements kept in memory, either row by row or once a first pass is complete."""

    input: Node
    # Not an argument: a dataset rewritten for a worker or another order has other elements.
    cache: dict[Any, Any] = field(default_factory=dict, init=False)
    pattern = "cache"

    def source(self) -> Rows | None:
        source = self.input.source_in_order()
        if source is None:
            return None

        def row(number: int) -> Nest:
            try:
                return self.cache[number]
            except KeyError:
                element = self.cache[number] = source.row(number)
                return element

        return MadeRows(source, row)

    def elements(self, path: Path) -> Stream:
        if _ALL in self.cache:
            return RandomAccess(self.cache[_ALL]).stream(path)
        if is_peek(path):
            return self.input.stream(path)
        # Pass 0, because what is kept must not depend on which pass came first.
        return _CachingStream(self.input.stream((0,)), self.cache)


@final
class _CachingStream(Stream):
    def __init__(self, upstream: Stream, cache: dict[Any, Any]) -> None:
        self._upstream = upstream
        self._cache = cache
        self._elements: list[Nest] = []

    def __next__(self) -> Nest:
        try:
            element = next(self._upstream)
        except StopIteration:
            self._cache[_ALL] = self._elements
            raise
        self._elements.append(element)
        return element
