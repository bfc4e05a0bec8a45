"""Plans: what workers and servers do for every closure of a function, and for rows of tables.

The coordinator makes them once for a function and shapes of data, and sends them as JSON. A closure
is then no more than its number, its arguments and the number of the function.
"""

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any, final

import numpy as np
from jax.typing import ArrayLike

from distributary.errors import InvalidValueError
from distributary.servers._messages import aligned_empty
from distributary.servers._rows import RowSpace, TablePart, UpdatedRows
from distributary.servers._split import Origin


@final
@dataclass(frozen=True)
class Update:
    """The work of a server on values that a worker pushes.

    The coordinator defines it; workers only refer to it, by its name.

    Attributes:
        program: Name of the program that computes new states from states and pushed values.
        states: Numbers of the variables that it reads.
        outputs: Numbers of the variables that it changes.
        rows: The states, pushed values and outputs that are only rows of tables.
    """

    program: str
    states: list[int]
    outputs: list[int]
    rows: list[UpdatedRows]

    @functools.cached_property
    def name(self) -> str:
        """A hash of the update, so that two functions with the same update share it."""
        return hashlib.sha256(json.dumps(astuple(self)).encode()).hexdigest()


@final
@dataclass(frozen=True, slots=True)
class Push:
    """The values that a worker pushes to one server at the end of a closure.

    Attributes:
        server: Number of the server.
        update: Name of the update that they are for.
        values: Their positions among the pushed values.
        rows: Those that are only rows of tables.
    """

    server: int
    update: str
    values: list[int]
    rows: list[UpdatedRows]


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
    inputs: list[Origin]
    spaces: list[RowSpace]
    buffers: list[tuple[int, list[TablePart]]]

    def find(self, numbers: Sequence[Any]) -> "list[FoundRows]":
        """Returns the rows to take of every space.

        Args:
            numbers: The results of `program`.
        """
        left = iter(numbers)
        return [
            _find(space, [np.asarray(next(left)) for _ in space.lookups]) for space in self.spaces
        ]


@final
@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """The work of a worker for a closure.

    Attributes:
        program: Name of the program that it runs.
        inputs: The origin of each input of the program. `("data", i)` is the i-th leaf of the data
            of all sources; `("replicas", i)` is that leaf and the following ones, one per replica;
            `("argument", i)` is a leaf of the arguments; `("state", n)` is variable n;
            `("constant", i)` is one of the arrays that the function has captured; `("rows", i)`
            holds the rows of the i-th buffer of `rows`; `("position", i)` says where the numbers of
            the i-th lookup are among these rows.
        num_results: Number of outputs that are returned. They come first; the others are pushed.
        pulls: The numbers of the variables that it reads as a whole, for each server.
        pushes: The values that it pushes, for each server.
        rows: The tables of which it takes only rows; None if there are none.
    """

    program: str
    inputs: list[Origin]
    num_results: int
    pulls: list[tuple[int, list[int]]]
    pushes: list[Push]
    rows: RowPlan | None


@final
@dataclass(frozen=True, slots=True)
class FoundRows:
    """The rows that a closure takes of a space.

    Attributes:
        rows: The int64 numbers of the rows, each once and in order.
        positions: For every lookup, the int32 positions of its numbers in `rows`, in the shape of
            the numbers. Those of numbers that are no rows mean nothing; steps do not use them.
        capacity: Number of rows in the buffers of the space; those after `rows` are zero.
    """

    rows: np.ndarray
    positions: list[np.ndarray]
    capacity: int

    def part(self, start: int, size: int) -> tuple[slice, np.ndarray]:
        """Returns the slice of `rows` that a variable holds, and their numbers in the variable."""
        low, high = np.searchsorted(self.rows, (start, start + size))
        return slice(low, high), self.rows[low:high] - start


def take_rows(array: ArrayLike, numbers: np.ndarray) -> np.ndarray:
    """Returns rows of an array.

    Raises:
        InvalidValueError: if the array does not have these rows.
    """
    source = np.asarray(array)
    check_rows(numbers, source.shape)
    return source.take(numbers, axis=0, mode="clip")  # checked above; "raise" is slower


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


def _find(space: RowSpace, numbers: Sequence[np.ndarray]) -> FoundRows:
    end = max(at.start + at.size for at in space.lookups)  # the number of no row
    flat = [array.reshape(-1).astype(np.int64) for array in numbers]
    wanted = [
        array.clip(0, at.size - 1) + at.start
        if at.is_clipped
        else np.where((array >= 0) & (array < at.size), array + at.start, end)
        for at, array in zip(space.lookups, flat, strict=True)
    ]
    rows, inverse = np.unique(np.concatenate(wanted), return_inverse=True)
    inverse = inverse.reshape(-1).astype(np.int32)
    parts = np.split(inverse, np.cumsum([len(array) for array in flat])[:-1])
    positions = [part.reshape(a.shape) for part, a in zip(parts, numbers, strict=True)]
    return FoundRows(rows[rows < end], positions, space.capacity)
