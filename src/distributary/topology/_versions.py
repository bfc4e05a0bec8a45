"""The versions of JAX with which the tests have passed."""

import functools
import logging

#: The newest minor version with which the tests have passed.
NEWEST_TESTED_JAX = "0.12"

_log = logging.getLogger(__name__)


@functools.cache
def warn_of_untested_jax(version: str) -> None:
    """Logs a warning, once per process, if a version of JAX is newer than what was tested."""
    if _minor(version) > _minor(NEWEST_TESTED_JAX):
        _log.warning(
            "JAX %s is newer than what distributary is tested with. If a program fails that should"
            " not, install the newest tested version: pip install 'jax==%s.*'.",
            version,
            NEWEST_TESTED_JAX,
        )


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
