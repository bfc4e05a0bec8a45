"""Variables of other libraries, as programs and tapes see them."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from distributary._late import import_what_registers
from distributary.tracing import Handle
from distributary.variables._layout import VariableLayout
from distributary.variables._variable import Variable


class ForeignVariable:
    """A stand-in for a variable of another library, which keeps the value."""

    _handle: Handle
    _layout: VariableLayout
    _value: Any
    _stores_array = False
    _shared: bool

    @property
    def variable(self) -> Any:
        """The variable of the other library."""
        raise NotImplementedError

    @property
    def trainable(self) -> bool:
        """True if `GradientTape` watches it automatically."""
        raise NotImplementedError

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


_resolvers: list[Callable[[Any], ForeignVariable | None]] = []
_openers: list[Callable[[Any], Mapping[str, Any] | None]] = []
_builders: list[Callable[[Any, Iterable[Any]], bool]] = []
_waiting: list[Callable[[Any], bool]] = []
_listeners: list[Callable[[Any, int | None], None]] = []


def register_foreign_variables(resolve: Callable[[Any], ForeignVariable | None]) -> None:
    """Adds a library: `resolve(object)` returns the stand-in for its variables, else None."""
    _resolvers.append(resolve)


def as_variable(value: object) -> Variable | ForeignVariable | None:
    """Returns `value`, or a stand-in for it, with a handle; None if it is not a variable."""
    if isinstance(value, Variable):
        return value
    import_what_registers()
    for resolve in _resolvers:
        found = resolve(value)
        if found is not None:
            return found
    return None


def register_foreign_objects(parts_of: Callable[[Any], Mapping[str, Any] | None]) -> None:
    """Adds a library: `parts_of(object)` returns the state of its objects, by name, else None.

    The parts are variables or further objects. Their names must be the same in every process that
    builds the same object.
    """
    _openers.append(parts_of)


def register_foreign_builder(build: Callable[[Any, Iterable[Any]], bool]) -> None:
    """Adds a library: `build(object, others)` makes the state of an object that waits for it.

    It may depend on the other objects of a checkpoint. Returns whether there is new state.
    """
    _builders.append(build)


def build_foreign(value: object, others: Iterable[Any]) -> bool:
    """Makes the state of another library's object, if it waits for it and can be known."""
    import_what_registers()
    return any(build(value, others) for build in _builders)


def foreign_parts(value: object) -> Mapping[str, Any] | None:
    """Returns the parts that hold the state of another library's object, by name, or None."""
    import_what_registers()
    for parts_of in _openers:
        parts = parts_of(value)
        if parts is not None:
            return parts
    return None


def register_foreign_waiting(waits: Callable[[Any], bool]) -> None:
    """Adds a library: `waits(object)` returns whether an object gets state later.

    The library calls `tell_new_state` when it does.
    """
    _waiting.append(waits)


def foreign_waits(value: object) -> bool:
    """Returns whether another library's object gets state later, when it is built."""
    import_what_registers()
    return any(waits(value) for waits in _waiting)


def listen_to_new_state(listener: Callable[[Any, int | None], None]) -> None:
    """Adds a listener to `tell_new_state`."""
    _listeners.append(listener)


def tell_new_state(value: object, num_variables: int | None = None) -> None:
    """Tells that an object of another library has new state.

    Args:
        value: The object.
        num_variables: Number of variables that it has so far; None if it is complete.
    """
    for listener in _listeners:
        listener(value, num_variables)
