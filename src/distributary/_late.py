"""Imports on first use: names of packages, and libraries that register.

Keras is such a library, TensorFlow's names are another: scopes, traces, variables and checkpoints
meet them without importing them. `distributary/__init__` says which packages register one: Python
runs it before any module of the package, whichever a program imports first.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any


def late_names(
    package: str, names_of: Mapping[str, str], advice: Mapping[str, str] | None = None
) -> Callable[[str], Any]:
    """Returns a `__getattr__` for a package that imports names on first use.

    Args:
        package: The `__name__` of the package.
        names_of: For each module, the names that it defines, or its own last name, separated by
            spaces. Write a module of the package as `"_rows"`, and any other module of distributary
            with its full name.
        advice: See `no_attribute`.
    """
    modules = {name: module for module, names in names_of.items() for name in names.split()}

    def __getattr__(name: str) -> Any:  # noqa: N807
        if name not in modules:
            names = dir(sys.modules[package])
            raise no_attribute(f"module {package!r}", name, advice or {}, names)
        path = modules[name]
        inside = path if path.startswith(f"{__package__}.") else f"{package}.{path}"
        module = importlib.import_module(inside)
        value = module if path.endswith(f".{name}") else getattr(module, name)
        setattr(sys.modules[package], name, value)  # the next use does not come here
        return value

    return __getattr__


def no_attribute(
    owner: str, name: str, advice: Mapping[str, str], names: Iterable[str]
) -> AttributeError:
    """Returns the error for a name that does not exist.

    Args:
        owner: The object, for the message.
        name: The name.
        advice: What to use instead of names that people know from elsewhere. Keys are names,
            separated by spaces.
        names: The names that exist, for the case of a typing error.
    """
    text = f"{owner} has no attribute {name!r}"
    for others, remedy in advice.items():
        if name in others.split():
            return AttributeError(f"{text}. {remedy}", name=name)
    if not name.startswith("_"):
        import difflib

        public = [known for known in names if not known.startswith("_")]
        for close in difflib.get_close_matches(name, public, 1, 0.75):
            # With a name of our own, Python does not add what it would suggest.
            return AttributeError(f"{text}. Did you mean {close!r}?", name=name)
    return AttributeError(text, name=name)


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

    def infers_shapes(self) -> bool:
        """Returns whether the library runs the caller only for the shapes of its results."""
        return False

    def drops_assignments(self) -> bool:
        """Returns whether the library runs the caller so that no state changes."""
        return False

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
_assemble: Callable[[], None] = lambda: None


def register(library: Library) -> None:
    """Adds a library."""
    _libraries.append(library)


def assemble_with(imports: Callable[[], None]) -> None:
    """Sets the function that imports the packages that register."""
    global _assemble
    _assemble = functools.cache(imports)


def converted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function whose Python control flow is that of JAX, if a library converts it."""
    forms = (library.converted(function) for library in libraries())
    return next((one for one in forms if one is not None), function)


def libraries() -> Sequence[Library]:
    """Returns the libraries that are registered; the first time, imports the packages of them."""
    _assemble()  # another thread that comes meanwhile waits for the imports as well
    return _libraries
