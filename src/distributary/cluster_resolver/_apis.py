"""Asks APIs through clients of optional packages."""

import importlib
from collections.abc import Callable
from typing import Any

from distributary.errors import ClusterError, MissingPackageError


def imported(module: str, package: str, field: str) -> Any:
    """Imports a module of an optional package.

    Args:
        module: Name of the module.
        package: Name with which pip installs it.
        field: The argument with which the user can do without the package: `"Resolver: client"`.

    Raises:
        MissingPackageError: if the package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        who, _, argument = field.partition(": ")
        raise MissingPackageError(
            f"{who} needs the package {package}, which cannot be imported ({error}). Run pip"
            f" install {package}, or pass {argument}."
        ) from error


def ask(request: Callable[[], Any], what: str, cure: str) -> Any:
    """Returns the answer to a request.

    Args:
        request: Sends the request.
        what: Description of the request, for messages: `"Resolver: listing the pods"`.
        cure: Advice for messages.

    Raises:
        ClusterError: if the request fails.
    """
    try:
        return request()
    except Exception as error:  # its classes are unknown, because the packages are optional
        raise ClusterError(f"{what} failed with {type(error).__name__}: {error}. {cure}") from error
