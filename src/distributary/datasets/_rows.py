"""Rows of several sources, one after the other, and rows that are made one by one."""

import abc
import bisect
import itertools
from collections.abc import Sequence
from typing import Any, final

import jax
import numpy as np

from distributary.datasets._streams import Rows
from distributary.datasets._structure import Block, stack
from distributary.errors import InvalidValueError


class OneByOne(abc.ABC):
    """Base class of rows that are made one at a time."""

    @abc.abstractmethod
    def row(self, number: int) -> Any:
        """Returns one element."""

    def rows(self, numbers: np.ndarray) -> Block:
        """Returns several elements, stacked."""
        return stack([self.row(number) for number in numbers.tolist()])


@final
class ChainedRows:
    """The rows of several sources, one after the other."""

    def __init__(self, sources: Sequence[Rows]) -> None:
        self._sources = sources
        self._ends = list(itertools.accumulate(len(source) for source in sources))

    def __len__(self) -> int:
        return self._ends[-1]

    def row(self, number: int) -> Any:
        """Returns one element."""
        which, start = self._find(number)
        return self._sources[which].row(number - start)

    def _find(self, number: int) -> tuple[int, int]:
        """Returns the number of the source that has a row, and the number of its first row."""
        which = bisect.bisect_right(self._ends, number)
        return which, self._ends[which - 1] if which else 0

    def part(self, start: int, count: int) -> Block:
        """Returns consecutive rows."""
        which, first = self._find(start)
        part = getattr(self._sources[which], "part", None)
        if part is None or start + count > self._ends[which]:
            return self.rows(np.arange(start, start + count))
        return part(start - first, count)

    def rows(self, numbers: np.ndarray) -> Block:
        """Returns several elements, stacked."""
        of = np.searchsorted(self._ends, numbers, side="right")
        pieces = []
        for which in np.unique(of):
            start = self._ends[which - 1] if which else 0
            places = np.flatnonzero(of == which)
            pieces.append((places, self._sources[which].rows(numbers[places] - start)))
        if len(pieces) == 1:
            return pieces[0][1]

        def placed(*parts: Any) -> np.ndarray:
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
