"""Elements that have numbers, and can be read in any order."""

import bisect
import itertools
from collections.abc import Callable, Sequence
from typing import Protocol, final

import jax
import numpy as np
from jax.tree_util import PyTreeDef

from distributary._types import Nest
from distributary.datasets._structure import Block, stack
from distributary.errors import InvalidValueError


class Rows(Protocol):
    """Numbered elements that can be read in any order."""

    def __len__(self) -> int: ...

    def row(self, number: int) -> Nest:
        """Returns one element."""

    def rows(self, numbers: np.ndarray) -> Block:
        """Returns several elements, stacked; int64 numbers `[k]`, k > 0."""


@final
class MadeRows:
    """Rows that a function makes one at a time, from the rows of a source."""

    def __init__(self, source: Rows, make: Callable[[int], Nest]) -> None:
        self._source = source
        self.row = make

    def __len__(self) -> int:
        return len(self._source)

    def rows(self, numbers: np.ndarray) -> Block:
        """Returns several elements, stacked."""
        return stack([self.row(number) for number in numbers.tolist()])


@final
class ZippedRows:
    """The rows of several sources side by side."""

    def __init__(self, sources: Sequence[Rows], tree: PyTreeDef) -> None:
        self._sources = sources
        self._tree = tree

    def __len__(self) -> int:
        return min(map(len, self._sources))

    def row(self, number: int) -> Nest:
        """Returns one element."""
        return self._tree.unflatten([source.row(number) for source in self._sources])

    def rows(self, numbers: np.ndarray) -> Block:
        """Returns several elements, stacked."""
        return self._tree.unflatten([source.rows(numbers) for source in self._sources])


@final
class ChainedRows:
    """The rows of several sources, one after the other."""

    def __init__(self, sources: Sequence[Rows]) -> None:
        self._sources = sources
        self._ends = list(itertools.accumulate(map(len, sources)))

    def __len__(self) -> int:
        return self._ends[-1]

    def row(self, number: int) -> Nest:
        """Returns one element."""
        which = bisect.bisect_right(self._ends, number)
        return self._sources[which].row(number - self._start(which))

    def _start(self, which: int) -> int:
        """Returns the number of the first row of a source."""
        return self._ends[which - 1] if which else 0

    def part(self, start: int, count: int) -> Block:
        """Returns consecutive rows."""
        which = bisect.bisect_right(self._ends, start)
        part = getattr(self._sources[which], "part", None)
        if part is None or start + count > self._ends[which]:
            return self.rows(np.arange(start, start + count))
        return part(start - self._start(which), count)

    def rows(self, numbers: np.ndarray) -> Block:
        """Returns several elements, stacked."""
        of = np.searchsorted(self._ends, numbers, side="right")
        pieces = []
        for which in np.unique(of):
            places = np.flatnonzero(of == which)
            own = numbers[places] - self._start(which)
            pieces.append((places, self._sources[which].rows(own)))
        if len(pieces) == 1:
            return pieces[0][1]

        def placed(*parts: np.ndarray) -> np.ndarray:
            shapes = {part.shape[1:] for part in parts}
            if len(shapes) > 1:
                raise InvalidValueError(
                    f"batch: elements have shapes {sorted(shapes)}; the arrays of a batch must"
                    " agree. Use padded_batch to fill them up."
                )
            result = np.empty((len(numbers), *parts[0].shape[1:]), np.result_type(*parts))
            for (places, _), part in zip(pieces, parts, strict=True):
                result[places] = part
            return result

        return jax.tree.map(placed, *(piece for _, piece in pieces))
