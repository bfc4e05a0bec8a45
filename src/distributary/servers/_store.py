"""A parameter server, which keeps variables and applies the pushes of workers."""

import threading
from collections.abc import Callable
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from distributary.errors import InvalidValueError
from distributary.servers._copies import Copies, frozen
from distributary.servers._messages import Message, from_json
from distributary.servers._plans import (
    ProgramCache,
    Update,
    check_rows,
    padded,
    rows_in_zeros,
    take_rows,
)
from distributary.servers._rows import bucket_of
from distributary.servers._sessions import SessionId, Tenant


@final
class ParameterServer(Tenant):
    """The service of one task `ps`. Nothing else changes its variables.

    A push is applied as a whole, and once per closure, even if it is sent again. Arrays are
    replaced and never changed, except for tables, whose rows change in place. A read always returns
    the state between two pushes.

    It handles these messages, with numbers of variables in `id` or `ids`, and those of `Copies`:

        create   id, arrays                     creates a variable
                 id, zeros, arrays              creates a table of zeros of the shape `zeros`; an
                                                empty array gives its dtype
        read     ids; arrays                    -> arrays; version. The arrays of the request are
                                                numbers of rows: the last variables are read only
                                                in these rows
        assign   id, operation, arrays          operation: assign, assign_add, assign_sub
                 id, operation, start, arrays   the same for some rows of a table
        update   update; blobs: the program     defines what a push with this `Update` does
        finish   finished                       forgets closures with smaller numbers
        push     update, closure, ids, num_row_reads, arrays; version
                                                -> the same as read, after the push. The arrays are
                                                the pushed values, then the numbers of the `rows`,
                                                then the numbers of the rows to read
        statistics                              -> fields of `ServerStatistics`

    All closures with numbers below `finished` have ended. A push for one of them is refused as a
    repetition.
    """

    def __init__(self, session: SessionId, number: int) -> None:
        self._state: dict[int, jax.Array | np.ndarray] = {}
        self._programs = ProgramCache()
        self._updates: dict[str, Update] = {}
        self._lock = threading.Lock()
        self._copies = Copies(number, self._state, self._lock)
        super().__init__(session, f"ps {number}", self._copies)
        self._finished = 0
        self._applied: set[int] = set()
        names = ("num_pushes", "num_repeated", "staleness_sum", "max_staleness")
        self._counts = dict.fromkeys(names, 0)

    def close(self) -> None:
        """Forgets the variables and their copies."""
        self._copies.close()
        with self._lock:
            self._state.clear()

    def statistics(self) -> dict[str, float]:
        """Returns the fields of `ServerStatistics`."""
        with self._lock:
            return {**self._counts}

    def _on_create(self, message: Message) -> None:
        number, zeros = message.fields["id"], message.fields.get("zeros")
        (array,) = message.arrays
        with self._lock:
            if number in self._state:
                raise InvalidValueError(f"{self.name} has variable {number} already.")
            self._state[number] = (
                jnp.array(array) if zeros is None else np.zeros(zeros, array.dtype)
            )

    def _on_read(self, message: Message) -> Message:
        with self._lock:
            return self._values(message.fields["ids"], message.arrays)

    def _values(self, ids: list[int], rows: list[np.ndarray]) -> Message:
        """Returns the values of variables; of the last ones, only the given rows."""
        num_whole = len(ids) - len(rows)
        arrays = self._arrays(ids)
        whole = [frozen(array) for array in arrays[:num_whole]]
        taken = map(take_rows, arrays[num_whole:], rows)
        return Message("ok", {"version": self._counts["num_pushes"]}, [*whole, *taken])

    def _arrays(self, ids: list[int]) -> list[Any]:
        for number in ids:
            if number not in self._state:
                raise InvalidValueError(f"{self.name} has no variable {number}.")
        return [self._state[number] for number in ids]

    def _on_assign(self, message: Message) -> None:
        operation = _OPERATIONS[message.fields["operation"]]
        number, start = message.fields["id"], message.fields.get("start")
        (array,) = message.arrays
        with self._lock:
            (before,) = self._arrays([number])
            if start is not None:
                before = self._table(number)[start : start + len(array)]
            if array.shape != before.shape:
                raise InvalidValueError(
                    f"{self.name}: variable {number} has shape {before.shape}, and is assigned"
                    f" {array.shape}."
                )
            if start is None:
                self._state[number] = operation(before, jnp.asarray(array, before.dtype))
            else:
                before[...] = operation(before, np.asarray(array, before.dtype))

    def _on_update(self, message: Message) -> None:
        update = from_json(Update, message.fields["update"])
        (content,) = message.blobs
        with self._lock:
            shapes = [array.shape for array in self._arrays([*update.states, *update.outputs])]
        for entry in update.rows:  # checked before that many rows are allocated
            if entry.is_whole and not any(shape[:1] == (entry.size,) for shape in shapes):
                raise InvalidValueError(
                    f"{self.name}: an update is for rows of a variable of {entry.size} rows,"
                    f" but its variables have the shapes {shapes}."
                )
        if self._programs.add(content) != update.program:
            raise InvalidValueError(f"{self.name} got an update with another program.")
        self._updates[update.name] = update

    def _on_push(self, message: Message) -> Message:
        fields = message.fields
        update = self._updates.get(fields["update"])
        if update is None:
            raise InvalidValueError(f"{self.name} has no update {fields['update']!r}.")
        num_pushed = len(message.arrays) - fields["num_row_reads"]
        with self._lock:
            closure, counts = fields["closure"], self._counts
            if closure < self._finished or closure in self._applied:
                counts["num_repeated"] += 1
            else:
                # Without a version, the worker has read nothing from this server.
                staleness = counts["num_pushes"] - fields.get("version", counts["num_pushes"])
                self._apply(update, message.arrays[:num_pushed])
                self._applied.add(closure)
                counts["staleness_sum"] += staleness
                counts["max_staleness"] = max(counts["max_staleness"], staleness)
                counts["num_pushes"] += 1
            return self._values(fields["ids"], message.arrays[num_pushed:])

    def _apply(self, update: Update, arrays: list[np.ndarray]) -> None:
        """Runs the program of a push, and stores the new values."""
        tables, states, outputs = update.rows, update.states, update.outputs
        num_pushes = len(arrays) - len(tables)
        numbers = arrays[num_pushes:]
        inputs: list[Any] = [*self._arrays(states), *arrays[:num_pushes]]
        sizes: dict[int, int] = {}  # to pad to, by bucket
        for entry, rows in zip(tables, numbers, strict=True):
            sizes[entry.bucket] = max(sizes.get(entry.bucket, 0), bucket_of(len(rows)))
        rows_of_output: dict[int, np.ndarray] = {}
        for entry, rows in zip(tables, numbers, strict=True):
            for i in entry.states:
                inputs[i] = padded(take_rows(inputs[i], rows), sizes[entry.bucket])
            for i in (len(states) + i for i in entry.pushes):
                inputs[i] = (
                    rows_in_zeros(inputs[i], rows, entry.size)
                    if entry.is_whole
                    else padded(inputs[i], sizes[entry.bucket])
                )
            rows_of_output.update(dict.fromkeys(entry.outputs, rows))
        new = self._programs.run(update.program, inputs)
        changes = [
            (self._table(outputs[i]), rows, np.asarray(new[i])[: len(rows)])
            for i, rows in rows_of_output.items()
        ]
        for table, rows, values in changes:  # checked first, so that all change or none
            check_rows(rows, table.shape)
            if values.shape != (len(rows), *table.shape[1:]):
                raise InvalidValueError(
                    f"{self.name}: an update has computed rows of shape {values.shape} for"
                    f" {len(rows)} rows of a variable of shape {table.shape}."
                )
        for table, rows, values in changes:
            table[rows] = values
        self._state.update(
            (number, value)
            for i, (number, value) in enumerate(zip(outputs, new, strict=True))
            if i not in rows_of_output
        )
        # Waits, because XLA may still read tables that the next push changes.
        jax.block_until_ready(new)

    def _table(self, number: int) -> np.ndarray:
        """Returns a variable as an array that can be changed in place."""
        array = self._state[number]
        if not isinstance(array, np.ndarray):
            array = self._state[number] = np.array(array)
        return array

    def _on_finish(self, message: Message) -> None:
        with self._lock:
            self._finished = max(self._finished, message.fields["finished"])
            self._applied = {closure for closure in self._applied if closure >= self._finished}

    def _on_statistics(self, message: Message) -> Message:
        return Message("ok", {**self.statistics()})


_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "assign": lambda old, new: new,
    "assign_add": lambda old, new: old + new,
    "assign_sub": lambda old, new: old - new,
}
