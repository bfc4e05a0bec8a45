"""A parameter server, which keeps variables and applies pushes, and copies of what it keeps.

Copies are for values being saved and values just loaded.
"""

import contextlib
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from distributary.checkpoint import (
    ArrayReader,
    SavedPart,
    WrittenFile,
    box_of,
    common_box,
    write_arrays,
)
from distributary.errors import CheckpointError, InvalidValueError, UnavailableError
from distributary.servers._links import SessionId, SessionLink, Tenant, call_all
from distributary.servers._messages import JSON, Message, aligned_empty, from_json
from distributary.servers._plans import ProgramCache, Update
from distributary.servers._rows import bucket_of
from distributary.servers._split import Shard


@final
class ParameterServer(Tenant):
    """The service of one task `ps`. Nothing else changes its variables.

    A push is applied as a whole, and once per closure, even if it is sent again. Arrays are
    replaced and never changed, except for tables, whose rows change in place. A read always returns
    the state between two pushes.

    It handles these messages, with numbers of variables in `id` or `ids`:

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

    The following have the number of a copy of variables in `copy`, and can be sent again:

        copy     ids                        copies the current values of variables
        load     ids, path, parts           reads values from a checkpoint, given for each
                                            variable where it begins and a list of `SavedPart`
        save     path, token -> file        writes the copy to a new file `ps-<number>.safetensors`
                                            in a folder that has a file `token` with this text; the
                                            reply has a `WrittenFile`
        adopt                               assigns the copy to the variables
        drop                                forgets the copy

    All closures with numbers below `finished` have ended. A push for one of them is refused as a
    repetition.
    """

    def __init__(self, session: SessionId, number: int) -> None:
        self._state: dict[int, jax.Array | np.ndarray] = {}
        self._programs = ProgramCache()
        self._updates: dict[str, Update] = {}
        self._lock = threading.Lock()
        self._number = number
        self._copies: dict[int, dict[int, Any]] = {}
        self._files: dict[int, WrittenFile] = {}  # of the copies that have been written
        self._writing = threading.Lock()
        super().__init__(session, f"ps {number}")
        self._finished = 0
        self._applied: set[int] = set()
        names = ("num_pushes", "num_repeated", "staleness_sum", "max_staleness")
        self._counts = dict.fromkeys(names, 0)

    def close(self) -> None:
        """Forgets the variables and their copies."""
        self._copies.clear()
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
        whole = [_frozen(array) for array in arrays[:num_whole]]
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

    def _on_copy(self, message: Message) -> None:
        ids = message.fields["ids"]
        with self._lock:
            arrays = [_frozen(array) for array in self._arrays(ids)]
        self._copies[message.fields["copy"]] = dict(zip(ids, arrays, strict=True))

    def _on_load(self, message: Message) -> None:
        path = Path(message.fields["path"])
        if not path.is_dir():
            raise CheckpointError(
                f"{self.name} does not see the checkpoint {path}. Servers read and write"
                " their variables themselves, so all tasks need the same folder."
            )
        ids = message.fields["ids"]
        with self._lock:
            arrays = [np.empty(array.shape, array.dtype) for array in self._arrays(ids)]
        with ArrayReader(path) as reader:
            for array, (begin, saved) in zip(arrays, message.fields["parts"], strict=True):
                parts = [SavedPart(*part) for part in saved]
                reader.fill(array, box_of(array.shape, begin), parts)
        self._copies[message.fields["copy"]] = dict(zip(ids, arrays, strict=True))

    def _on_save(self, message: Message) -> Message:
        path, token = Path(message.fields["path"]), message.fields["token"]
        copy, arrays = message.fields["copy"], self._copy(message)
        with self._writing:  # a repeated message waits until the first one is done
            if copy not in self._files:
                self._check_token(path, token)
                named = {str(number): np.asarray(array) for number, array in arrays.items()}
                self._files[copy] = write_arrays(path / _file(self._number), named)
        return Message("ok", {"file": astuple(self._files[copy])})

    def _check_token(self, path: Path, token: str) -> None:
        """Checks by a token that the coordinator itself has written to the folder."""
        try:
            text = (path / _TOKEN).read_text(encoding="utf-8")
        except OSError as error:
            text = str(error)
        if text != token:
            raise CheckpointError(
                f"{self.name} does not see what the coordinator has written to {path}"
                f" ({text[:200]}). Servers read and write their variables themselves, so all tasks"
                " need the same folder."
            )

    def _on_adopt(self, message: Message) -> None:
        arrays = self._copy(message)
        with self._lock:
            for number, array in arrays.items():
                is_table = isinstance(self._state[number], np.ndarray)
                self._state[number] = array if is_table else jnp.asarray(array)

    def _on_drop(self, message: Message) -> None:
        for kept in (self._copies, self._files):
            kept.pop(message.fields["copy"], None)

    def _copy(self, message: Message) -> dict[int, Any]:
        copy = self._copies.get(message.fields["copy"])
        if copy is None:
            raise InvalidValueError(
                f"{self.name} has no copy {message.fields['copy']} of variables."
            )
        return copy

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


_TOKEN = "token"


@final
class CopyOnServers:
    """A copy of variables as the coordinator sees it; a `RemoteCopy`.

    Args:
        number: Number of the copy.
        shards: The shards of each variable, by name.
        shapes: The shape of each variable, by name.
        connect: Opens a link to a server for this copy alone, so that other calls do not wait.
    """

    def __init__(
        self,
        number: int,
        shards: Mapping[str, Sequence[Shard]],
        shapes: Mapping[str, Sequence[int]],
        connect: Callable[[int], SessionLink],
    ) -> None:
        self._number = number
        self._shards = shards
        self._shapes = shapes
        self._ids: dict[int, list[int]] = {}
        for places in shards.values():
            for server, number, _ in places:
                self._ids.setdefault(server, []).append(number)
        self._links = {server: connect(server) for server in sorted(self._ids)}

    def make(self) -> "CopyOnServers":
        """Makes the servers copy the current values of the variables."""
        return self._begin("copy", {})

    def load(self, path: Path, parts: Mapping[str, Sequence[SavedPart]]) -> "CopyOnServers":
        """Makes the servers read values from a checkpoint; see `RemoteStore.load`."""
        wanted: dict[int, list[JSON]] = {server: [] for server in self._links}
        for name, places in self._shards.items():
            for server, _, begin, shape in _places(places, self._shapes[name]):
                box = box_of(shape, begin)
                pieces = [part for part in parts[name] if common_box(part.box, box) is not None]
                wanted[server].append([begin, [astuple(part) for part in pieces]])
        fields = {i: {"path": str(path), "parts": entries} for i, entries in wanted.items()}
        return self._begin("load", fields)

    def save(self, path: Path) -> Mapping[str, Sequence[SavedPart]]:
        """Makes the servers write the copy to a folder; see `RemoteCopy`.

        Raises:
            CheckpointError: if servers cannot write, or do not see the folder.
            PSUnavailableError: if a server is lost.
        """
        token = secrets.token_hex(16)
        (path / _TOKEN).write_text(token, encoding="utf-8")
        fields = {"path": str(path), "token": token}
        replies = self._call("save", dict.fromkeys(self._links, fields))
        (path / _TOKEN).unlink()
        files = {server: WrittenFile(*reply.fields["file"]) for server, reply in replies.items()}
        for server, written in files.items():
            file = path / _file(server)
            seen = file.stat().st_size if file.exists() else 0
            if written.num_bytes != seen:
                raise CheckpointError(
                    f"ps {server} has written {written.num_bytes} bytes to {file}, of which the"
                    f" coordinator sees {seen}. All tasks need the same folder."
                )
        return {
            name: [
                SavedPart(_file(server), files[server].checksum, str(number), begin, shape)
                for server, number, begin, shape in _places(places, self._shapes[name])
            ]
            for name, places in self._shards.items()
        }

    def adopt(self) -> None:
        """Assigns the copy to the variables; see `RemoteCopy`."""
        self._call("adopt", {})

    def drop(self) -> None:
        """Drops the copy; see `RemoteCopy`."""
        for link in self._links.values():
            with contextlib.suppress(UnavailableError):  # the copy of a lost server is gone anyway
                link.call(Message("drop", {"copy": self._number}))
            link.close()

    def _begin(self, kind: str, fields: Mapping[int, dict[str, JSON]]) -> "CopyOnServers":
        try:
            self._call(kind, fields)
        except BaseException:
            self.drop()
            raise
        return self

    def _call(self, kind: str, fields: Mapping[int, dict[str, JSON]]) -> dict[int, Message]:
        """Sends a message to each server, all at the same time, and returns the replies.

        The message has the numbers of the server's variables, and its `fields`.
        """
        messages = {
            i: Message(kind, {"copy": self._number, "ids": ids, **fields.get(i, {})})
            for i, ids in self._ids.items()
        }
        return call_all(self._links, messages)


def _places(
    shards: Sequence[Shard], shape: Sequence[int]
) -> Iterator[tuple[int, int, list[int], list[int]]]:
    """Yields the server and number of each shard, where it begins, and its shape."""
    row = 0
    for server, number, num_rows in shards:
        size = [num_rows, *shape[1:]] if shape else []
        yield server, number, [row, *[0] * len(shape[1:])] if shape else [], size
        row += num_rows


def _file(server: int) -> str:
    return f"ps-{server}.safetensors"


def _frozen(array: Any) -> Any:
    """Returns an array that will not change. On a server, only tables change in place."""
    return array.copy() if isinstance(array, np.ndarray) else array
