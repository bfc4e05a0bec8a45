"""Names of a package that are imported on first use, because importing them takes a while."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def late_names(package: str, names_of: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns a `__getattr__` for a package that imports names on first use.

    Args:
        package: The `__name__` of the package.
        names_of: For each module, the names that it defines, or its own last name, separated by
            spaces. Write a module of the package as `"_rows"`, and any other module of distributary
            with its full name.
    """
    modules = {name: module for module, names in names_of.items() for name in names.split()}

    def __getattr__(name: str) -> Any:  # noqa: N807
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        path = modules[name]
        inside = path if path.startswith(f"{__package__}.") else f"{package}.{path}"
        module = importlib.import_module(inside)
        return module if path.endswith(f".{name}") else getattr(module, name)

    return __getattr__
