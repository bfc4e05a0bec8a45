"""Variables of other libraries, as programs and tapes see them."""

from collections.abc import Callable
from typing import Any

from distributary._late import libraries
from distributary.tracing import Handle
from distributary.variables._layout import VariableLayout
from distributary.variables._variable import Variable


class ForeignVariable:
    """A stand-in for a variable of another library, which keeps the value.

    Attributes:
        holder: A weak reference to that variable, which has the stored array as its `_value`.
    """

    holder: Callable[[], Any]
    _handle: Handle
    _layout: VariableLayout
    _stores_array = False

    @property
    def variable(self) -> Any:
        """The variable of the other library."""
        return self.holder()

    @property
    def trainable(self) -> bool:
        """True if `GradientTape` watches it automatically."""
        return bool(self.variable.trainable)

    @property
    def _value(self) -> Any:
        return self.holder()._value

    @_value.setter
    def _value(self, value: object) -> None:
        self.holder()._value = value

    @property
    def _shared(self) -> bool:
        return getattr(self.holder(), "_shared", False)

    @_shared.setter
    def _shared(self, value: bool) -> None:
        self.holder()._shared = value

    def begin_with(self, array: object) -> bool:
        """Makes an array the first value of a new variable; returns False if it has a value."""
        return False

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


def as_variable(value: object) -> Variable | ForeignVariable | None:
    """Returns `value`, or a stand-in for it, with a handle; None if it is not a variable."""
    if isinstance(value, Variable):
        return value
    for library in libraries():
        stand_in: ForeignVariable | None = library.variable(value)
        if stand_in is not None:
            return stand_in
    return None
