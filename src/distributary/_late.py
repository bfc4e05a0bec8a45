"""Names of a package whose modules are imported when somebody asks for them: they take a while."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["late_names"]


def late_names(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """A `__getattr__` for the package.

    Args:
        package: Its `__name__`.
        modules: For each name the module that defines it, or is it: one of the package,
            `"_rows"`, or any other of distributary by its full name.
    """

    def __getattr__(name: str) -> Any:  # noqa: N807
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        path = modules[name]
        inside = path if path.startswith(f"{__package__}.") else f"{package}.{path}"
        module = importlib.import_module(inside)
        return module if path.endswith(f".{name}") else getattr(module, name)

    return __getattr__
