"""Variables of other libraries, as programs and tapes see them."""

from collections.abc import Callable
from typing import Any

from distributary.tracing import Handle
from distributary.variables._layout import VariableLayout
from distributary.variables._variable import Variable


class ForeignVariable:
    """Stands for a variable of another library, which keeps the value."""

    _handle: Handle
    _layout: VariableLayout
    _value: Any
    # Its library hands out values that it says become invalid at the next step.
    _shared = False

    @property
    def variable(self) -> Any:
        """The variable itself."""
        raise NotImplementedError

    @property
    def trainable(self) -> bool:
        """Whether `GradientTape` watches it by itself."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """Name used in messages."""
        return self._handle.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        return self._handle.shape

    @property
    def dtype(self) -> Any:
        """Dtype of the value."""
        return self._handle.dtype


_resolvers: list[Callable[[Any], ForeignVariable | None]] = []


def register_foreign_variables(resolve: Callable[[Any], ForeignVariable | None]) -> None:
    """Adds a library: `resolve(object)` gives what stands for its variables, None for the rest."""
    _resolvers.append(resolve)


def as_variable(value: Any) -> Variable | ForeignVariable | None:
    """`value` as something with a handle, if it is a variable."""
    if isinstance(value, Variable):
        return value
    for resolve in _resolvers:
        found = resolve(value)
        if found is not None:
            return found
    return None
