"""The versions of JAX and Keras with which the tests have passed, and their private names."""

import functools
import logging
import pkgutil
from typing import Any

from distributary.errors import UnsupportedError

#: The oldest version with which the tests have passed, and the minor version after the newest.
TESTED = {"jax": ("0.10.2", "0.13"), "keras": ("3.15", "3.17")}

#: Private names that the installed versions of JAX and Keras do not have.
missing_names: list[str] = []

_log = logging.getLogger(__name__)
_NAMES = {"jax": "JAX", "keras": "Keras"}


@functools.cache
def warn_of_untested(package: str, version: str) -> None:
    """Logs a warning, once per process, if a version is newer than what was tested.

    Args:
        package: "jax" or "keras".
        version: The version of it that is installed.
    """
    if _minor(version) >= _minor(TESTED[package][1]):
        _log.warning(
            "%s %s is newer than what distributary is tested with. If a program fails that should"
            " not, install a tested version: %s.",
            _NAMES[package],
            version,
            _install_tested(package),
        )


def private(place: str, *otherwise: Any) -> Any:
    """Returns the object that has a private name of JAX or Keras.

    Args:
        place: The module, a colon, and the name in it, or the module alone.
        otherwise: What to return if the installed version does not have the name.

    Raises:
        UnsupportedError: if there is no such object, and nothing to return otherwise.
    """
    try:
        return pkgutil.resolve_name(place)
    except (ImportError, AttributeError) as error:
        missing_names.append(place)
        if otherwise:
            return otherwise[0]
        raise no_private_name(place) from error


def no_private_name(place: str) -> UnsupportedError:
    """Returns the error for a private name that the installed version of a package lacks."""
    package = place.partition(".")[0]
    version = pkgutil.resolve_name(f"{package}:__version__")
    return UnsupportedError(
        f"{_NAMES[package]} {version} has no {place.replace(':', '.')}, which distributary needs."
        f" Install a tested version: {_install_tested(package)}."
    )


def _install_tested(package: str) -> str:
    oldest, beyond = TESTED[package]
    return f"pip install '{package}>={oldest},<{beyond}'"


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
