"""The arrays that variables store, in lists that programs take and give back whole."""

import functools
import weakref
from collections.abc import Sequence
from typing import Any, final

_DISSOLVED = -1  # the variables are in other lists


@final
class StateList:
    """The stored arrays of some variables.

    A variable has a list of its own until `joined` puts it into one with others: those that a
    program writes, in the program's order. The program then takes one list and leaves another,
    and looks at no variable.

    Args:
        arrays: One per variable.

    Attributes:
        arrays: One per variable.
        withheld: Why the list must not be taken as it is: the numbers of arrays whose buffer
            somebody else may hold, or whose variable is gone; `_DISSOLVED`.
    """

    __slots__ = ("__weakref__", "_variables", "arrays", "withheld")

    def __init__(self, arrays: list[Any]) -> None:
        self.arrays = arrays
        self.withheld: set[int] = set()
        self._variables: list[weakref.ref[Any]] = []  # if there are several

    def _keep(self, variables: Sequence[Any]) -> None:
        forget, states = _forget, weakref.ref(self)
        self._variables = [
            weakref.ref(variable, functools.partial(forget, states, i))
            for i, variable in enumerate(variables)
        ]
        for i, variable in enumerate(variables):
            # One assignment: other threads read meanwhile.
            variable._slot = self, i

    def _dissolve(self) -> None:
        """Gives each variable a list of its own."""
        self.withheld.add(_DISSOLVED)
        for i, reference in enumerate(self._variables):
            variable = reference()
            # One may be elsewhere: Ctrl-C may have come while they were put here.
            if variable is not None and variable._slot[0] is self:
                own = StateList([self.arrays[i]])
                if i in self.withheld:
                    own.withheld.add(0)
                variable._slot = own, 0


def joined(variables: Sequence[Any]) -> StateList | None:
    """One list for variables, which leave those that they are in; the variables keep it alive.

    Returns:
        None if one of them does not store its array itself.
    """
    if not variables or not all(variable._stores_array for variable in variables):
        return None
    for variable in variables:
        variable._slot[0]._dissolve()
    states = StateList([variable._value for variable in variables])
    states.withheld.update(i for i, variable in enumerate(variables) if variable._shared)
    states._keep(variables)
    return states


def _forget(states: "weakref.ref[StateList]", number: int, _: Any) -> None:
    """Frees the array of a variable that was collected."""
    kept = states()
    if kept is not None:
        kept.withheld.add(number)
        kept.arrays[number] = None
