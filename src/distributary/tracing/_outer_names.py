"""Finds names outside of a step that the step has given traced values.

    def step(batch):
        global params
        params = update(params, batch)     # runs while the step is traced, and never again

The compiled step would start from the first parameters each time, and raise no error until somebody
reads `params`.
"""

import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any, final

import jax
import numpy as np

from distributary.errors import TracedValueError

_DEPTH = 8  # a list can contain itself


@final
class OuterNames:
    """The names outside of a function that hold arrays before it is traced.

    Args:
        function: The function. Names outside of it that it uses count, their attributes, and those
            that functions of the same file use that it calls.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        # By name: the list or dict, if it is one, and the arrays.
        self._before = {name: (value, _leaves(value)) for name, value in _names(function)}

    def check(self, step: str) -> None:
        """Checks that no name holds a traced value in the place of an array, or besides others.

        Raises:
            TracedValueError: naming `step` and the name.
        """
        for name, value in _names(self._function):
            before, arrays = self._before.get(name, (None, []))
            leaves = _leaves(value)
            known, held = set(map(id, arrays)), set(map(id, leaves))
            if not any(isinstance(x, jax.core.Tracer) and id(x) not in known for x in leaves):
                continue
            if not all(id(array) in held for array in arrays if _is_known(array)):
                raise TracedValueError(
                    f"{step} assigns {name}, which is outside of it. The step is compiled, so later"
                    f" runs would start from the first value again. Return the new {name} from"
                    " the step, or keep it in a distributary.Variable."
                )
            if value is before and known <= held:
                raise TracedValueError(
                    f"{step} puts a value into {name}, which is outside of it. The step is"
                    " compiled: its Python runs once, and what it puts there never has a number."
                    f" Return the value from the step, and put the result of run into {name}."
                )


def _is_known(leaf: object) -> bool:
    is_array = isinstance(leaf, (jax.Array, np.ndarray))
    return is_array and not isinstance(leaf, jax.core.Tracer)


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
        if inspect.isfunction(value) and value.__code__.co_filename == code.co_filename:
            yield from _names(value, seen)
        elif not inspect.isclass(value) and not inspect.ismodule(value):
            held = getattr(value, "__dict__", {})
            yield from [(f"{name}.{k}", held[k]) for k in code.co_names if k in held]


def _leaves(value: object, depth: int = 0) -> list[Any]:
    """Returns the arrays of a container of Python; the keys of its dicts may have no order."""
    if isinstance(value, (jax.Array, np.ndarray)):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, (list, tuple)) or depth > _DEPTH:
        return []
    return [leaf for part in value for leaf in _leaves(part, depth + 1)]
