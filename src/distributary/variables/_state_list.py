"""Lists of the arrays that variables store, which programs take and return as a whole."""

import functools
import weakref
from collections.abc import Sequence
from typing import Any, final

_DISSOLVED = -1  # marks a list whose variables are in other lists now


@final
class StateList:
    """The stored arrays of some variables.

    At first, every variable has a list of its own. `joined` then makes one list for all variables
    that a program writes, in the order of the program. The program takes this list and leaves
    another in its place, without looking at any variable.

    Args:
        arrays: One array per variable.

    Attributes:
        arrays: One array per variable.
        withheld: The reasons, if any, why the list must not be taken as it is: numbers of arrays
            whose buffer is held elsewhere or whose variable is gone, or `_DISSOLVED`.
    """

    __slots__ = ("__weakref__", "_variables", "arrays", "withheld")

    def __init__(self, arrays: list[Any]) -> None:
        self.arrays = arrays
        self.withheld: set[int] = set()
        self._variables: list[weakref.ref[Any]] = []  # empty for the list of a single variable

    def _keep(self, variables: Sequence[Any]) -> None:
        forget, states = _forget, weakref.ref(self)
        self._variables = [
            weakref.ref(variable, functools.partial(forget, states, i))
            for i, variable in enumerate(variables)
        ]
        for i, variable in enumerate(variables):
            # A single assignment, as other threads may be reading.
            variable._slot = self, i

    def _dissolve(self) -> None:
        """Gives each variable a list of its own."""
        self.withheld.add(_DISSOLVED)
        for i, reference in enumerate(self._variables):
            variable = reference()
            # A variable may be in another list, if Ctrl-C has interrupted `_keep`.
            if variable is not None and variable._slot[0] is self:
                state = StateList([self.arrays[i]])
                if i in self.withheld:
                    state.withheld.add(0)
                variable._slot = state, 0


def joined(variables: Sequence[Any]) -> StateList | None:
    """Moves variables from their lists into a new common one, which they keep alive.

    Returns:
        The list, or None if there are no variables or one of them does not store its array itself.
    """
    if not variables or not all(
        getattr(variable, "_stores_array", False) for variable in variables
    ):
        return None
    for variable in variables:
        variable._slot[0]._dissolve()
    states = StateList([variable._value for variable in variables])
    states.withheld.update(i for i, variable in enumerate(variables) if variable._shared)
    states._keep(variables)
    return states


def _forget(states: "weakref.ref[StateList]", number: int, _: object) -> None:
    """Frees the array of a variable that was collected."""
    kept = states()
    if kept is not None:
        kept.withheld.add(number)
        kept.arrays[number] = None
