"""Names of a package whose modules are imported when somebody asks for them: they take a while."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["late_names"]


def late_names(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """A `__getattr__` for the package.

    Args:
        package: Its `__name__`.
        modules: For each name the module of the package that defines it.
    """

    def __getattr__(name: str) -> Any:  # noqa: N807
        if name in modules:
            return getattr(importlib.import_module(f"{package}.{modules[name]}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return __getattr__
