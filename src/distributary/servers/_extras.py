"""Packages that an extra of distributary installs."""

import importlib
from types import ModuleType

from distributary.errors import MissingPackageError, pip_install


def import_extra(package: str, purpose: str, extra: str = "ps") -> ModuleType:
    """Imports a package when it is needed.

    Args:
        package: Name of the package.
        purpose: Begin of the message if it is not installed: what needs it.
        extra: The extra that installs it.

    Raises:
        MissingPackageError: if it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError:
        raise MissingPackageError(f"{purpose}: {pip_install(extra)}") from None
