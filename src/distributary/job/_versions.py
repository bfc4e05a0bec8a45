"""The versions of packages. It does not import them."""

import contextlib
import importlib.metadata

_PACKAGES = ("distributary", "jax", "jaxlib", "keras", "keras-nightly")


def package_versions() -> dict[str, str]:
    """Returns the versions of packages that all tasks of a job must have in common."""
    versions = {}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions
