"""Lookup of objects by their full names."""

import functools
import importlib
from typing import Any

from distributary.keras_bridge import import_keras


@functools.cache
def resolve(path: str) -> Any:
    """Returns the object with a full name such as `"jax.numpy.sum"`.

    The first name of Keras imports it, to run on JAX.

    Raises:
        AttributeError: if the module has no such name.
        MissingPackageError: if the name is one of Keras and Keras is not installed.
    """
    top, *names = path.split(".")
    found = import_keras() if top == "keras" else importlib.import_module(top)
    module = top
    for name in names:
        if not hasattr(found, name):
            importlib.import_module(f"{module}.{name}")
        found = getattr(found, name)
        module = f"{module}.{name}"
    return found
