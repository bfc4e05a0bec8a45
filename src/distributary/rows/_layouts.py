"""Layouts: where the rows of a batch lie in an array that is computed from it.

Every dim of an array is a product of factors, the slowest first. A factor counts either rows or
something else. A reshape only groups the factors anew. With a batch of 8 rows in `a`:

    a:f32[8,5,3]                  ((8 rows,), (5,), (3,))
    b:f32[40,3] = reshape a       ((8 rows, 5), (3,))
    c:f32[4,2,15] = reshape a     ((4 rows with stride 2,), (2 rows,), (15,))

A layout holds for every size of the batch: nothing is concluded from two sizes being equal.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

#: The axis that counts the rows of the batch. Other axes, for rows in another order, refer to it.
BATCH = "batch"


@final
@dataclass(frozen=True, slots=True)
class Rows:
    """The rows that a factor counts: element `i` belongs to row `start + stride * i` of an axis."""

    axis: Any
    stride: int = 1
    start: int = 0

    @property
    def group(self) -> tuple[Any, int, int]:
        """A key for the group of `stride` successive rows in which each row lies."""
        return self.axis, self.stride, self.start // self.stride


Factor: TypeAlias = tuple[int, Rows | None]
Dim: TypeAlias = tuple[Factor, ...]
Dims: TypeAlias = tuple[Dim, ...]


def plain(shape: Sequence[int]) -> Dims:
    """Returns the dims of an array without rows."""
    return tuple([plain_dim(size) for size in shape])


def plain_dim(size: int) -> Dim:
    """Returns a dim without rows."""
    return ((size, None),) if size != 1 else ()


def size_of(dim: Dim) -> int:
    """Returns the number of elements along a dim."""
    return math.prod([count for count, _ in dim])


def tags_of(factors: Dim) -> list[Rows]:
    """Returns the rows that factors count."""
    return [rows for _, rows in factors if rows is not None]


def _merged(factors: Sequence[Factor]) -> Dim:
    """Returns the same factors, with neighbors combined where one continues the other."""
    result: list[Factor] = []
    for size, rows in factors:
        if size == 1 and rows is None:
            continue
        if result and size > 1:
            before, outer = result[-1]
            if rows is None and outer is None:
                result[-1] = before * size, None
                continue
            if (
                rows is not None
                and outer is not None
                and outer.axis == rows.axis
                and outer.stride == rows.stride * size
            ):
                start = outer.start + rows.start
                result[-1] = before * size, Rows(rows.axis, rows.stride, start)
                continue
        result.append((size, rows))
    return tuple(result)


def reshaped(dims: Dims, shape: Sequence[int]) -> Dims | None:
    """Returns the dims after a reshape in row-major order; None if it cuts rows in another way."""
    if 0 in shape:
        return None
    factors = [factor for dim in dims for factor in dim if factor[0] > 1]
    left = list(_merged(factors))[::-1]
    result = []
    for size in shape:
        needed, dim = size, []
        while needed > 1:
            if not left:
                return None
            count, rows = left.pop()
            taken = math.gcd(count, needed)
            if taken not in (count, needed):
                return None
            if taken < count:
                inner = count // taken
                left.append((inner, rows and Rows(rows.axis, rows.stride)))
                rows = rows and Rows(rows.axis, rows.stride * inner, rows.start)
            dim.append((taken, rows))
            needed //= taken
        result.append(_merged(dim))
    return tuple(result)


def _aligned(first: Dim, second: Dim) -> bool:
    """Returns whether two dims that both count rows meet row by row, or group by group."""
    if len(first) != len(second):
        return False
    return all(
        size == other and (rows and rows.group) == (of_other and of_other.group)
        for (size, rows), (other, of_other) in zip(first, second, strict=True)
    )


def joined(all_dims: Sequence[Dims]) -> Dims | None:
    """Returns the dims of the result of an elementwise operation on arrays with rows.

    Returns:
        The dims; None if an element would be computed from several rows.
    """
    result = max(all_dims, key=len)
    for dims in all_dims:
        if len(dims) < len(result):  # a scalar
            if any(tags_of(dim) for dim in result):
                return None
            continue
        for own, other in zip(dims, result, strict=True):
            if (tags_of(own) or tags_of(other)) and not _aligned(own, other):
                return None
    return result
