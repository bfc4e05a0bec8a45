"""From the full name of an object to the object."""

import functools
import importlib
from typing import Any

from distributary.keras_bridge import import_keras


@functools.cache
def resolve(path: str) -> Any:
    """The object that `path` names: `"jax.numpy.sum"`.

    Keras is imported by the first name of it, to run on JAX.

    Raises:
        AttributeError: if its module has no such name.
        MissingPackageError: if it is one of Keras, which is not installed.
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
