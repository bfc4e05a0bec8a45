"""Finds names outside of a step that the step has given traced values.

    def step(batch):
        global params
        params = update(params, batch)     # runs while the step is traced, and never again

The compiled step would start from the first parameters each time, and raise no error until somebody
reads `params`.
"""

import inspect
import logging
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import jax
import numpy as np

from distributary.errors import TracedValueError

_log = logging.getLogger(__name__)
_DEPTH = 8  # a list can contain itself
_ARRAYS = (jax.Array, np.ndarray)


@final
class OuterNames:
    """The names outside of a function that hold arrays before it is traced.

    Args:
        function: The function. Names outside of it that it uses count, their attributes, and those
            that functions of the same file use that it calls.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._before = {
            name: [leaf for leaf in leaves if _is_known(leaf)]
            for name, leaves in _names(function)
            if any(map(_is_known, leaves))
        }

    def check(self, step: str, numbers: Sequence[Any] = ()) -> None:
        """Checks that no name holds a traced value in the place of an array or number.

        Args:
            step: The function, for messages.
            numbers: The traced values that Python code has asked for as numbers.

        Raises:
            TracedValueError: naming `step` and the name.
        """
        collected = set(map(id, numbers))
        for name, leaves in _names(self._function):
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


def _names(function: Any, seen: set[int] | None = None) -> Iterator[tuple[str, list[Any]]]:
    """Yields the names outside of a function and the leaves of what they hold."""
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
        yield name, _leaves(value)
        if inspect.isfunction(value) and value.__code__.co_filename == code.co_filename:
            yield from _names(value, seen)
        elif not inspect.isclass(value) and not inspect.ismodule(value):
            held = getattr(value, "__dict__", {})
            yield from [(f"{name}.{k}", _leaves(held[k])) for k in code.co_names if k in held]


def _leaves(value: object, depth: int = 0) -> list[Any]:
    """Returns the arrays of a container; the keys of a dict may have no order."""
    if isinstance(value, _ARRAYS):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if depth > _DEPTH:
        return []
    if not isinstance(value, (list, tuple)):  # such as a module of equinox
        leaves = jax.tree.leaves(value)
        return [leaf for leaf in leaves if leaf is not value and isinstance(leaf, _ARRAYS)]
    return [leaf for part in value for leaf in _leaves(part, depth + 1)]
