"""Names of a package that are imported on first use, and advice for names that do not exist."""

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
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
        found = module if path.endswith(f".{name}") else getattr(module, name)
        setattr(sys.modules[package], name, found)  # the next use does not come here
        return found

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
