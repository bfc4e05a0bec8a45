"""Variables in parts of several workers, read and assigned one by one while Keras saves and loads.

Keras does that in one process. But no worker can put a variable together alone, and none should
hold the whole model. So the worker whose turn it is says which variable it is about to read or to
assign, and the others do that with it.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, final

import jax.numpy as jnp
import numpy as np

from distributary.devices import fetch_whole, is_divided, job_programs, put_sharded
from distributary.job import consensus

_READ, _ASSIGN, _END = "read", "assign", "end"


def in_parts_of_workers(model: Any) -> list[Any]:
    """Returns the variables of a model and its optimizer of which each worker has only a part."""
    optimizer = getattr(model, "optimizer", None)
    variables = [*getattr(model, "variables", ()), *getattr(optimizer, "variables", ())]
    divided = [v for v in variables if is_divided(v._layout)]
    return [v for v in divided if not v._layout.is_fully_addressable]


@final
@dataclass(frozen=True)
class _Turn:
    """What one worker does with variables in parts.

    Args:
        variables: The variables, in the same order on all workers.
        place: Name of what the worker does, for people.
    """

    variables: list[Any]
    place: str

    def say(self, what: str, detail: object) -> None:
        """Tells the others what this worker does next, or how its turn has ended."""
        self._meet(json.dumps([what, detail]).encode())

    def follow(self, worker: int) -> str | None:
        """Does what a worker says until its turn ends; returns the text of its error, or None."""
        while True:
            what, detail = json.loads(self._meet(b"")[worker])
            if what == _END:
                return detail if detail is None else str(detail)
            variable = self.variables[detail]
            if what == _READ:
                fetch_whole(variable._value, variable.shape)
            else:
                own = np.zeros(variable.shape, jnp.dtype(variable._dtype))
                variable._value = put_sharded(_of_chief(variable, own), variable._layout)
                variable._shared = False

    def _meet(self, message: bytes) -> list[bytes]:
        job = consensus()
        assert job is not None
        return job.exchange(self.place, message)


_turn: ContextVar[_Turn | None] = ContextVar("turn of this worker", default=None)
_loads_together: ContextVar[bool] = ContextVar("workers load a model together", default=False)


def in_turn(worker: int, model: Any, strategy: Any, act: Callable[[], None]) -> None:
    """Runs `act` on one worker, which may read and assign the model's variables in parts.

    All workers call this. Only the first worker may assign.

    Raises:
        OSError: on the other workers, if `act` raises an error.
    """
    variables = in_parts_of_workers(model)
    is_its_turn = strategy.extended.worker_number == worker
    if not variables:
        if is_its_turn:
            act()
        return
    turn = _Turn(variables, f"saving or loading {model.name}")
    with job_programs.alone():
        if not is_its_turn:
            problem = turn.follow(worker)
            if problem is not None:
                raise OSError(f"Worker {worker} could not save or load {model.name}: {problem}")
            return
        token, error = _turn.set(turn), None
        try:
            act()
        except BaseException as raised:
            error = f"{type(raised).__name__}: {raised}"
            raise
        finally:
            _turn.reset(token)
            turn.say(_END, error)


@contextmanager
def loading_together() -> Iterator[None]:
    """Runs the block, in which all workers load the same model; the first worker's values count."""
    token = _loads_together.set(True)
    try:
        with job_programs.alone():
            yield
    finally:
        _loads_together.reset(token)


def before_read(variable: Any) -> None:
    """Lets the other workers take part in reading a variable in parts, if they wait for that."""
    turn = _turn.get()
    if turn is not None:
        turn.say(_READ, _number(turn, variable))


def before_assign(variable: Any, value: Any) -> Any:
    """Returns the value to assign to a variable in parts: that of the first worker, if all load."""
    turn = _turn.get()
    if turn is None and not _loads_together.get():
        return value
    if turn is not None:
        turn.say(_ASSIGN, _number(turn, variable))
    return _of_chief(variable, value)


def _number(turn: _Turn, variable: Any) -> int:
    return next(i for i, own in enumerate(turn.variables) if own is variable)


def _of_chief(variable: Any, value: Any) -> np.ndarray:
    own = np.asarray(value, jnp.dtype(variable._dtype))
    extended = variable._distributary_strategy.extended
    (of_chief,) = extended.from_chief([own], f"the value of {variable.path} that is loaded")
    return np.asarray(of_chief)
