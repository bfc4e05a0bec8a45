"""Rows of tables on their way between workers and servers."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, final

import numpy as np

from distributary.coordinator._messages import JSON, aligned_empty
from distributary.errors import InvalidValueError
from distributary.tracing import Lookup, RowSpace, UpdatedRows

__all__ = [
    "FoundRows",
    "PushedRows",
    "RowPlan",
    "TablePart",
    "bucket_of",
    "bucket_sizes",
    "check_rows",
    "padded",
    "rows_in_zeros",
    "take_rows",
]

_MIN_BUCKET = 16


@final
@dataclass(frozen=True, slots=True)
class TablePart:
    """A variable that is some rows of a space.

    Attributes:
        server: Number of its server.
        number: Of the variable.
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
    """Which rows a closure needs.

    Attributes:
        program: Name of the program that computes their numbers.
        inputs: Where its inputs come from, as in `Plan`.
        spaces: What is looked up together.
        buffers: For every table that the worker takes rows of: its space, and where the rows are.
    """

    program: str
    inputs: list[tuple[str, int]]
    spaces: list[RowSpace]
    buffers: list[tuple[int, list[TablePart]]]

    def find(self, numbers: Sequence[Any]) -> "list[FoundRows]":
        """The rows of every space.

        Args:
            numbers: What `program` has returned.
        """
        left = iter(numbers)
        return [
            _find(space, [np.asarray(next(left)) for at in space.lookups if not at.is_again])
            for space in self.spaces
        ]

    def to_json(self) -> JSON:
        """What `from_json` makes the plan of."""
        spaces = [(space.capacity, [astuple(at) for at in space.lookups]) for space in self.spaces]
        buffers = [(space, [astuple(part) for part in parts]) for space, parts in self.buffers]
        return self.program, self.inputs, spaces, buffers

    @classmethod
    def from_json(cls, value: JSON) -> "RowPlan":
        """The plan that `to_json` has described."""
        program, inputs, spaces, buffers = value
        return cls(
            program,
            [(kind, number) for kind, number in inputs],
            [RowSpace([Lookup(*at) for at in lookups], capacity) for capacity, lookups in spaces],
            [(space, [TablePart(*part) for part in parts]) for space, parts in buffers],
        )


@final
@dataclass(frozen=True, slots=True)
class FoundRows:
    """The rows that a closure takes of a space.

    Attributes:
        rows: Their numbers, int64, each once and in order.
        positions: For every lookup where its numbers are among `rows`, int32 of its shape; those
            of no row are at the capacity.
    """

    rows: np.ndarray
    positions: list[np.ndarray]

    def part(self, start: int, size: int) -> tuple[slice, np.ndarray]:
        """Which of the rows a variable has, and their numbers there."""
        low, high = np.searchsorted(self.rows, (start, start + size))
        return slice(low, high), self.rows[low:high] - start


@final
@dataclass(frozen=True, slots=True)
class PushedRows(UpdatedRows):
    """`UpdatedRows` on their way to a server.

    Attributes:
        bucket: Those with an equal number are padded to an equal number of rows.
    """

    bucket: int


def take_rows(array: Any, numbers: np.ndarray, num_rows: int | None = None) -> np.ndarray:
    """Rows of an array, and zeros after them up to a number of rows, if one is given.

    Raises:
        InvalidValueError: if there are no such rows.
    """
    source = np.asarray(array)
    check_rows(numbers, source.shape)
    if num_rows is None:
        return source.take(numbers, axis=0, mode="clip")  # checked: faster than "raise"
    out = aligned_empty((num_rows, *source.shape[1:]), source.dtype)
    source.take(numbers, axis=0, out=out[: len(numbers)], mode="clip")
    out[len(numbers) :] = 0
    return out


def check_rows(numbers: np.ndarray, shape: Sequence[int]) -> None:
    """Refuses what are no numbers of rows, each once and in order, of an array.

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
    """Rows, and zeros after them."""
    out = aligned_empty((num_rows, *rows.shape[1:]), rows.dtype)
    out[: len(rows)], out[len(rows) :] = rows, 0
    return out


def rows_in_zeros(rows: np.ndarray, numbers: np.ndarray, size: int) -> np.ndarray:
    """An array of `size` rows, zeros but for those with the numbers."""
    check_rows(numbers, (size,))
    out = np.zeros((size, *rows.shape[1:]), rows.dtype)
    out[numbers] = rows
    return out


def bucket_of(num_rows: int) -> int:
    """To how many rows a number of rows is padded, so that few programs are compiled."""
    return max(_MIN_BUCKET, 1 << max(0, num_rows - 1).bit_length())


def bucket_sizes(rows: Sequence[PushedRows], numbers: Sequence[np.ndarray]) -> Mapping[int, int]:
    """By bucket, the number of rows to pad to."""
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
