"""Variables in parts of several workers, read and assigned one by one while Keras saves and loads.

Keras does that in one process. But no worker can put a variable together alone, and none should
hold the whole model. So the worker whose turn it is says which variable it is about to read or to
assign, and the others do that with it.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np

from distributary._threads import bound
from distributary.devices import fetch_whole, is_divided, job_programs, put_sharded
from distributary.errors import InvalidValueError
from distributary.job import Turn, consensus, in_turn

_READ, _ASSIGN = "read", "assign"


def saved_variables(model: Any) -> list[Any]:
    """Returns all variables that Keras saves with a model, in the same order on all workers.

    Keras follows attributes, such as an optimizer of one's own, and not only `model.variables`.
    """
    by_id: dict[int, Any] = {}
    seen: set[int] = set()

    def search(value: Any) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, (keras.Layer, keras.optimizers.Optimizer)):
            by_id.update((id(variable), variable) for variable in value.variables)
            parts: Iterable[Any] = [vars(value)[name] for name in sorted(vars(value))]
        elif isinstance(value, dict):
            parts = value.values()
        else:
            parts = value if isinstance(value, (list, tuple)) else ()
        for part in parts:
            search(part)

    search(model)
    return list(by_id.values())


def is_in_parts_of_workers(variable: Any) -> bool:
    """Returns whether each worker has only a part of a variable."""
    layout = variable._layout
    return is_divided(layout) and not layout.is_fully_addressable


# The `extended` of the strategy whose workers save or load together. If it is the turn of this one,
# also a function that tells the others what it does next with a variable.
_together: ContextVar[tuple[Any, Callable[[str, Any], None] | None] | None] = ContextVar(
    "workers that save or load together", default=None
)


def take_turn(worker: int, model: Any, strategy: Any, act: Callable[[], None]) -> None:
    """Runs `act` on one worker, which may read and assign the model's variables in parts.

    All workers call this. Only the first worker may assign.

    Raises:
        OSError: on the other workers, if `act` raises one.
        InvalidValueError: on the other workers, if `act` raises another error.
    """
    extended = strategy.extended
    if extended.num_workers == 1:
        act()
        return
    name = getattr(model, "name", type(model).__name__)
    variables = list(filter(is_in_parts_of_workers, saved_variables(model)))

    def act_on(turn: Turn) -> None:
        def say(what: str, variable: Any) -> None:
            number = next((i for i, v in enumerate(variables) if v is variable), None)
            if number is None:
                raise InvalidValueError(
                    f"{turn.place}: {variable.path!r} is in parts on several workers, and belongs"
                    " to no attribute of the model that Keras saves. Make it a variable of a layer,"
                    " or save it with dist.checkpoint."
                )
            turn.say(what, number)

        with bound(_together, (extended, say)):
            act()

    def take_part(what: str, number: int) -> None:
        variable = variables[number]
        if what == _READ:
            fetch_whole(variable._value, variable.shape)
            return
        zeros = np.zeros(variable.shape, jnp.dtype(variable._dtype))
        variable._value = put_sharded(_of_chief(extended, variable, zeros), variable._layout)
        variable._shared = False

    problem = in_turn(worker, f"saving or loading {name}", act_on, take_part)
    if problem is not None:
        raise type(problem)(f"Worker {worker} could not save or load {name}: {problem}")


@contextmanager
def loading_together(strategy: Any) -> Iterator[None]:
    """Runs the block, in which all workers load the same model; the first worker's values count."""
    with bound(_together, (strategy.extended, None)), job_programs.alone():
        yield


def before_read(variable: Any) -> None:
    """Lets the other workers take part in reading a variable in parts, if they wait for that."""
    _, say = _together.get() or (None, None)
    if say is not None:
        say(_READ, variable)


def before_assign(variable: Any, value: Any) -> Any:
    """Returns the value to assign to a variable in parts: that of the first worker, if all load."""
    extended, say = _together.get() or (None, None)
    if extended is None:
        return value
    if say is not None:
        say(_ASSIGN, variable)
    elif (job := consensus()) is not None:
        # The file of another worker may lack what this one has.
        job.exchange(f"loading {variable.path} {list(variable.shape)}", b"")
    return _of_chief(extended, variable, value)


def _of_chief(extended: Any, variable: Any, value: Any) -> np.ndarray:
    array = np.asarray(value, jnp.dtype(variable._dtype))
    (of_chief,) = extended.from_chief([array], f"the value of {variable.path} that is loaded")
    return np.asarray(of_chief)
