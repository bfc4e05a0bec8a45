"""Finds names outside of a step that the step has given traced values, or has changed.

    def step(batch):
        global params
        params = update(params, batch)     # runs while the step is traced, and never again

The compiled step would start from the first parameters each time, and raise no error until somebody
reads `params`.
"""

import collections
import inspect
import logging
import pickle
import random
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import jax
import numpy as np

from distributary.errors import TracedValueError

_log = logging.getLogger(__name__)
_DEPTH = 8  # a list can contain itself
_ARRAYS = (jax.Array, np.ndarray)
_NUMBERS = (int, float)
_CHANGED = (
    "%s changes the number %s, which is outside of it, while it is traced. Its Python runs once, so"
    " later runs do not. Count outside of the step, or in a distributary.Variable; ignore this if"
    " it counts traces, or keeps a size."
)
_DRAWN = (
    "%s draws random numbers from %s while it is traced. Its Python runs once, so every run has the"
    " same ones. Draw them outside and pass them in args, or with jax.random and a key from args;"
    " ignore this if another thread draws them."
)


@final
class OuterNames:
    """The names outside of a function, and what they hold before it is traced.

    Args:
        function: The function. Names outside of it that it uses count, their attributes, and those
            that functions of the same file use that it calls.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._before: dict[str, list[Any]] = {}
        self._states: dict[str, list[Any]] = {}
        for name, value in _names(function):
            known, state = [leaf for leaf in _leaves(value) if _is_known(leaf)], _state(value)
            if known:
                self._before[name] = known
            # Two functions can use one name for different numbers.
            self._states.setdefault(name, []).extend([] if state is None else [state])

    def check(self, step: str, numbers: Sequence[Any] = ()) -> None:
        """Checks that no name holds a traced value in the place of an array or number.

        Args:
            step: The function, for messages.
            numbers: The traced values that Python code has asked for as numbers.

        Raises:
            TracedValueError: naming `step` and the name.
        """
        collected = set(map(id, numbers))
        for name, value in _names(self._function):
            leaves = _leaves(value)
            before, state = self._states.get(name, []), _state(value)
            if state is not None and before and state not in before:
                _log.warning(_CHANGED if type(state) in _NUMBERS else _DRAWN, step, name)
            if any(id(leaf) in collected for leaf in leaves):
                raise TracedValueError(
                    f"{step} keeps a number in {name}, which is outside of it. The step is"
                    " compiled: its Python runs once, before there are numbers. Return the value"
                    f" from the step, and put what run returns into {name}."
                )
            held = set(map(id, leaves))
            if not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
                continue
            if any(id(array) not in held for array in self._before.get(name, ())):
                raise TracedValueError(
                    f"{step} assigns {name}, which is outside of it. The step is compiled, so later"
                    f" runs would start from the first value again. Return the new {name} from"
                    " the step, or keep it in a distributary.Variable."
                )
            # It may only count traces, so there is no warning that a program can make an error.
            _log.warning(
                "%s keeps an array in %s, which is outside of it. Arrays of a step have no values"
                " there. Return it, and put what run returns into %s.",
                step,
                name,
                name,
            )


def _is_known(leaf: object) -> bool:
    return isinstance(leaf, _ARRAYS) and not isinstance(leaf, jax.core.Tracer)


def _state(value: object) -> Any:
    """Returns a number, or the state of a generator of random numbers; None for other objects."""
    owner: object = value
    if isinstance(value, (types.BuiltinFunctionType, types.MethodType)):
        owner = value.__self__  # such as of `from random import gauss`
    if isinstance(owner, np.random.Generator):
        return pickle.dumps(owner.bit_generator.state)
    if owner is np.random or isinstance(owner, np.random.RandomState):
        return pickle.dumps(owner.get_state())
    if owner is random or isinstance(owner, random.Random):
        return owner.getstate()
    return value if type(value) in _NUMBERS else None


def _names(function: Any, seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """Yields the names outside of a function and what they hold."""
    seen = set() if seen is None else seen
    function = inspect.unwrap(function)
    if not hasattr(function, "__code__"):  # an object that can be called
        function = getattr(function, "__call__", None)  # noqa: B004
    code = getattr(function, "__code__", None)
    if code is None or id(code) in seen:
        return
    seen.add(id(code))
    cells = zip(code.co_freevars, function.__closure__ or (), strict=False)
    # A cell without contents equals another one: the name is assigned later.
    outer = {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}
    known = function.__globals__
    outer |= {name: known[name] for name in code.co_names if name in known}
    if inspect.ismethod(function):
        outer[(*code.co_varnames, "self")[0]] = function.__self__
    for name, value in outer.items():
        yield name, value
        if value is np and "random" in code.co_names:
            yield f"{name}.random", np.random
        if inspect.isfunction(value) and value.__code__.co_filename == code.co_filename:
            yield from _names(value, seen)
        elif not inspect.isclass(value) and not inspect.ismodule(value):
            held = {**vars(type(value)), **getattr(value, "__dict__", {})}
            yield from [(f"{name}.{k}", held[k]) for k in code.co_names if k in held]


def _leaves(value: object, depth: int = 0) -> list[Any]:
    """Returns the arrays of a container; the keys of a dict may have no order."""
    if isinstance(value, _ARRAYS):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if depth > _DEPTH:
        return []
    if not isinstance(value, (list, tuple, collections.deque)):  # such as a module of equinox
        leaves = jax.tree.leaves(value)
        return [leaf for leaf in leaves if leaf is not value and isinstance(leaf, _ARRAYS)]
    return [leaf for part in value for leaf in _leaves(part, depth + 1)]
