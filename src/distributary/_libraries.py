"""Libraries that scopes, traces, variables and checkpoints meet, without being imported by them.

Keras is one, TensorFlow's names are another. `distributary/__init__` says which packages register
one here: Python runs it before any module of the package, whichever a program imports first.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any


class Library:
    """What is asked of a library; the answers here are those of one that has no such objects."""

    def strategy_created(self) -> None:
        """Runs when a strategy is created."""

    def scope_entered(self, strategy: Any) -> object:
        """Runs when a scope is entered; `scope_left` receives the result."""
        return None

    def scope_left(self, strategy: Any, entered: Any) -> None:
        """Runs when a scope is left."""

    def around_trace(self) -> AbstractContextManager[object]:
        """Returns a context in which a function is traced."""
        return nullcontext()

    def variable(self, value: object) -> Any:
        """Returns the `ForeignVariable` that stands for a variable of the library, else None."""
        return None

    def parts(self, value: object) -> Mapping[str, Any] | None:
        """Returns the variables and objects that hold the state of an object, else None.

        Their names must be the same in every process that builds the same object.
        """
        return None

    def is_unbuilt(self, value: object) -> bool:
        """Returns whether an object gets state later, for which `checkpoint.settle` is called."""
        return False

    def build(self, value: object, others: Iterable[Any]) -> bool:
        """Builds an unbuilt object, if the other objects of a checkpoint say how.

        Returns:
            Whether there is new state.
        """
        return False

    def converted(self, function: Callable[..., Any]) -> Callable[..., Any] | None:
        """Returns a function with Python's control flow as control flow of JAX, else None."""
        return None


_libraries: list[Library] = []
_assemble: Callable[[], None] | None = None


def register(library: Library) -> None:
    """Adds a library."""
    _libraries.append(library)


def assemble_with(imports: Callable[[], None]) -> None:
    """Sets the function that imports the packages that register."""
    global _assemble
    _assemble = imports


def assemble() -> None:
    """Imports the packages that register, the first time."""
    global _assemble
    imports = _assemble
    if imports is not None:
        imports()
        _assemble = None  # only now: another thread waits for the imports as well


def converted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function whose Python control flow is that of JAX, if a library converts it."""
    made = (library.converted(function) for library in libraries())
    return next((one for one in made if one is not None), function)


def libraries() -> Sequence[Library]:
    """Returns the libraries that are registered."""
    assemble()
    return _libraries
