"""Rows of tables, as workers and servers exchange them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from jax.typing import ArrayLike

from distributary.errors import InvalidValueError
from distributary.servers._messages import aligned_empty
from distributary.servers._rows import RowSpace, UpdatedRows, bucket_of


@final
@dataclass(frozen=True, slots=True)
class TablePart:
    """A variable that holds a range of the rows of a space.

    Attributes:
        server: Number of its server.
        number: Number of the variable.
        start: Its first row in the space.
        size: Number of its rows.
    """

    server: int
    number: int
    start: int
    size: int


@final
@dataclass(frozen=True, slots=True)
class RowPlan:
    """The rows that a closure needs, and where to find them.

    Attributes:
        program: Name of the program that computes the numbers of the rows.
        inputs: The origins of its inputs, as in `WorkerPlan`.
        spaces: Groups of tables that are looked up by the same numbers.
        buffers: For every table of which the worker takes rows, its space and the variables that
            hold its rows.
    """

    program: str
    inputs: list[tuple[str, int]]
    spaces: list[RowSpace]
    buffers: list[tuple[int, list[TablePart]]]

    def find(self, numbers: Sequence[Any]) -> "list[FoundRows]":
        """Returns the rows to take of every space.

        Args:
            numbers: The results of `program`.
        """
        left = iter(numbers)
        return [
            _find(space, [np.asarray(next(left)) for at in space.lookups if not at.is_again])
            for space in self.spaces
        ]


@final
@dataclass(frozen=True, slots=True)
class FoundRows:
    """The rows that a closure takes of a space.

    Attributes:
        rows: The int64 numbers of the rows, each once and in order.
        positions: For every lookup, the int32 positions of its numbers in `rows`, in the shape of
            the lookup. A number that is not a row has the capacity as its position.
    """

    rows: np.ndarray
    positions: list[np.ndarray]

    def part(self, start: int, size: int) -> tuple[slice, np.ndarray]:
        """Returns the slice of `rows` that a variable holds, and their numbers in the variable."""
        low, high = np.searchsorted(self.rows, (start, start + size))
        return slice(low, high), self.rows[low:high] - start


def take_rows(array: ArrayLike, numbers: np.ndarray, num_rows: int | None = None) -> np.ndarray:
    """Returns rows of an array, padded with zeros to `num_rows` if it is given.

    Raises:
        InvalidValueError: if the array does not have these rows.
    """
    source = np.asarray(array)
    check_rows(numbers, source.shape)
    if num_rows is None:
        return source.take(numbers, axis=0, mode="clip")  # checked above; "raise" is slower
    out = aligned_empty((num_rows, *source.shape[1:]), source.dtype)
    source.take(numbers, axis=0, out=out[: len(numbers)], mode="clip")
    out[len(numbers) :] = 0
    return out


def check_rows(numbers: np.ndarray, shape: Sequence[int]) -> None:
    """Checks that numbers are those of rows of an array, each once and in order.

    Raises:
        InvalidValueError: if they are not.
    """
    if numbers.ndim != 1 or numbers.dtype != np.int64 or not shape:
        raise InvalidValueError(
            f"Rows of a variable of shape {tuple(shape)} are asked for by an array {numbers.dtype}"
            f"{list(numbers.shape)}, expected int64[number of rows]."
        )
    if len(numbers) and not (
        numbers[0] >= 0 and numbers[-1] < shape[0] and (np.diff(numbers) > 0).all()
    ):
        raise InvalidValueError(
            f"Rows {numbers.min()} to {numbers.max()} of a variable of shape {tuple(shape)} are"
            f" asked for, expected numbers from 0 to {shape[0] - 1}, each once and in order."
        )


def padded(rows: np.ndarray, num_rows: int) -> np.ndarray:
    """Returns rows, padded with zeros to a number of rows."""
    out = aligned_empty((num_rows, *rows.shape[1:]), rows.dtype)
    out[: len(rows)], out[len(rows) :] = rows, 0
    return out


def rows_in_zeros(rows: np.ndarray, numbers: np.ndarray, size: int) -> np.ndarray:
    """Returns an array of `size` rows, with `rows` at `numbers` and zeros elsewhere."""
    check_rows(numbers, (size,))
    out = np.zeros((size, *rows.shape[1:]), rows.dtype)
    out[numbers] = rows
    return out


def bucket_sizes(rows: Sequence[UpdatedRows], numbers: Sequence[np.ndarray]) -> Mapping[int, int]:
    """Returns the number of rows to pad to, for each bucket."""
    sizes: dict[int, int] = {}
    for own, found in zip(rows, numbers, strict=True):
        sizes[own.bucket] = max(sizes.get(own.bucket, 0), bucket_of(len(found)))
    return sizes


def _find(space: RowSpace, numbers: Sequence[np.ndarray]) -> FoundRows:
    end = max(at.start + at.size for at in space.lookups)  # the number of no row
    firsts = [at for at in space.lookups if not at.is_again]
    flat = [own.reshape(-1).astype(np.int64) for own in numbers]
    wanted = [
        own.clip(0, at.size - 1) + at.start
        if at.is_clipped
        else np.where((own >= 0) & (own < at.size), own + at.start, end)
        for at, own in zip(firsts, flat, strict=True)
    ]
    rows, inverse = np.unique(np.concatenate(wanted), return_inverse=True)
    inverse = inverse.reshape(-1).astype(np.int32)
    if len(rows) and rows[-1] == end:
        rows = rows[:-1]
        inverse = np.where(inverse == len(rows), np.int32(space.capacity), inverse)
    parts = np.split(inverse, np.cumsum([len(own) for own in flat])[:-1])
    positions: list[np.ndarray] = []
    i = -1
    for at in space.lookups:
        if not at.is_again:
            i += 1
            positions.append(parts[i].reshape(numbers[i].shape))
            continue
        is_row = (numbers[i] >= 0) & (numbers[i] < at.size)
        positions.append(np.where(is_row, positions[-1], np.int32(space.capacity)))
    return FoundRows(rows, positions)
