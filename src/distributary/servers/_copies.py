"""Copies of variables on servers, for values being saved and values just loaded."""

import contextlib
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any, final

import jax.numpy as jnp
import numpy as np

from distributary.checkpoint import (
    ArrayReader,
    SavedPart,
    WrittenFile,
    box_of,
    common_box,
    write_arrays,
)
from distributary.errors import CheckpointError, InvalidValueError, UnavailableError
from distributary.servers._messages import JSON, Message
from distributary.servers._partitioners import Shard
from distributary.servers._sessions import SessionLink, call_all

_TOKEN = "token"


@final
class Copies:
    """The copies on one server, a part of a `Tenant`.

    It handles these messages. Each has the number of the copy in `copy`, and can be sent again:

        copy    ids                        copies the current values of variables
        load    ids, path, parts           reads values from a checkpoint, given for each
                                           variable where it begins and a list of `SavedPart`
        save    path, token -> file        writes the copy to a new file `ps-<number>.safetensors`
                                           in a folder that has a file `token` with this text; the
                                           reply has a `WrittenFile`
        adopt                              assigns the copy to the variables
        drop                               forgets the copy

    Args:
        number: Number of the server.
        state: Variables of the server.
        lock: Lock to hold while reading or changing the state.
    """

    def __init__(self, number: int, state: dict[int, Any], lock: threading.Lock) -> None:
        self._number = number
        self._state = state
        self._lock = lock
        self._copies: dict[int, dict[int, Any]] = {}
        self._files: dict[int, WrittenFile] = {}  # of the copies that have been written
        self._writing = threading.Lock()

    def close(self) -> None:
        """Drops all copies."""
        self._copies.clear()

    def _on_copy(self, message: Message) -> None:
        with self._lock:
            arrays = {number: frozen(array) for number, array in self._variables(message).items()}
        self._copies[message.fields["copy"]] = arrays

    def _on_load(self, message: Message) -> None:
        path = Path(message.fields["path"])
        if not path.is_dir():
            raise CheckpointError(
                f"ps {self._number} does not see the checkpoint {path}. Servers read and write"
                " their variables themselves, so all tasks need the same folder."
            )
        with self._lock:
            variables = self._variables(message)
        arrays = {number: np.empty(old.shape, old.dtype) for number, old in variables.items()}
        with ArrayReader(path) as reader:
            for array, (begin, saved) in zip(arrays.values(), message.fields["parts"], strict=True):
                parts = [SavedPart(*part) for part in saved]
                reader.fill(array, box_of(array.shape, begin), parts)
        self._copies[message.fields["copy"]] = arrays

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
                f"ps {self._number} does not see what the coordinator has written to {path}"
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

    def _variables(self, message: Message) -> dict[int, Any]:
        return {number: self._state[number] for number in message.fields["ids"]}

    def _copy(self, message: Message) -> dict[int, Any]:
        copy = self._copies.get(message.fields["copy"])
        if copy is None:
            raise InvalidValueError(
                f"ps {self._number} has no copy {message.fields['copy']} of variables."
            )
        return copy


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


def frozen(array: Any) -> Any:
    """Returns an array that will not change. On a server, only tables change in place."""
    return array.copy() if isinstance(array, np.ndarray) else array
