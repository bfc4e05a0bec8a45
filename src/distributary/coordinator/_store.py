"""A parameter server: keeps variables and applies what workers push."""

import threading
from collections.abc import Callable
from typing import Any, ClassVar, final

import jax
import jax.numpy as jnp

from distributary.coordinator._messages import Message
from distributary.coordinator._programs import ProgramCache
from distributary.errors import InvalidValueError

__all__ = ["ParameterServer"]


@final
class ParameterServer:
    """The state of one task `ps`, and the only one that changes it.

    A push is applied as a whole, once for each closure, whatever is sent again. Arrays are replaced
    and never changed, so what is read is the state between two pushes.

    Messages, with the numbers of variables in `ids`:

        create   ids, arrays                    new variables
        read     ids                            -> arrays
        assign   ids, operation, arrays         operation: assign, assign_add, assign_sub
        delete   ids
        program  blobs                          a program that pushes refer to
        finish   finished
        push     closure, program, states, outputs, ids, arrays; finished
                                                -> arrays of ids, after the push

    Workers may send what `for_workers` names, the chief everything.

    A closure has a number; all below `finished` have ended: what is still pushed for them is
    refused as a repetition.
    """

    for_workers = frozenset(("program", "push", "read"))

    def __init__(self, number: int) -> None:
        self.number = number
        self._state: dict[int, jax.Array] = {}
        self._programs = ProgramCache()
        self._lock = threading.Lock()
        self._finished = 0
        self._applied: set[int] = set()
        self.num_applied = 0
        self.num_repeated = 0

    def close(self) -> None:
        """Forgets the variables."""
        with self._lock:
            self._state.clear()

    def handle(self, message: Message, peer: Any) -> Message:
        """The reply to a message.

        Raises:
            InvalidValueError: for messages that make no sense here.
        """
        method = self._methods.get(message.kind)
        if method is None:
            raise InvalidValueError(f"ps {self.number} got the message {message.kind!r}.")
        return method(self, message)

    def _create(self, message: Message) -> Message:
        with self._lock:
            for number, array in zip(message.fields["ids"], message.arrays, strict=True):
                if number in self._state:
                    raise InvalidValueError(f"ps {self.number} has variable {number} already.")
                self._state[number] = jnp.array(array)
        return Message("ok")

    def _read(self, message: Message) -> Message:
        with self._lock:
            arrays = self._arrays(message.fields["ids"])
        return Message("ok", arrays=arrays)

    def _arrays(self, ids: list[int]) -> list[Any]:
        for number in ids:
            if number not in self._state:
                raise InvalidValueError(f"ps {self.number} has no variable {number}.")
        return [self._state[number] for number in ids]

    def _assign(self, message: Message) -> Message:
        operation = _OPERATIONS[message.fields["operation"]]
        with self._lock:
            ids = message.fields["ids"]
            old = self._arrays(ids)
            for number, before, array in zip(ids, old, message.arrays, strict=True):
                if array.shape != before.shape:
                    raise InvalidValueError(
                        f"ps {self.number}: variable {number} has shape {before.shape}, and is"
                        f" assigned {array.shape}."
                    )
                self._state[number] = operation(before, jnp.asarray(array, before.dtype))
        return Message("ok")

    def _delete(self, message: Message) -> Message:
        with self._lock:
            for number in message.fields["ids"]:
                self._state.pop(number, None)
        return Message("ok")

    def _program(self, message: Message) -> Message:
        for content in message.blobs:
            self._programs.add(content)
        return Message("ok")

    def _push(self, message: Message) -> Message:
        fields = message.fields
        if fields["program"] not in self._programs:
            return Message("unknown program")
        with self._lock:
            self._forget(fields["finished"])
            closure = fields["closure"]
            if closure < self._finished or closure in self._applied:
                self.num_repeated += 1
            else:
                states = self._arrays(fields["states"])
                new = self._programs.run(fields["program"], [*states, *message.arrays])
                self._state.update(zip(fields["outputs"], new, strict=True))
                self._applied.add(closure)
                self.num_applied += 1
            arrays = self._arrays(fields["ids"])
        return Message("ok", arrays=arrays)

    def _finish(self, message: Message) -> Message:
        with self._lock:
            self._forget(message.fields["finished"])
        return Message("ok")

    def _forget(self, finished: int) -> None:
        if finished > self._finished:
            self._finished = finished
            self._applied = {closure for closure in self._applied if closure >= finished}

    _methods: ClassVar[dict[str, Callable[["ParameterServer", Message], Message]]] = {
        "assign": _assign,
        "create": _create,
        "delete": _delete,
        "finish": _finish,
        "program": _program,
        "push": _push,
        "read": _read,
    }


_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "assign": lambda old, new: new,
    "assign_add": lambda old, new: old + new,
    "assign_sub": lambda old, new: old - new,
}
