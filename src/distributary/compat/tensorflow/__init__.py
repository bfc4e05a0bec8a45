"""TensorFlow's names for programs that use `tf.distribute`, on JAX and Keras 3.

    import distributary.compat.tensorflow as tf

Arrays are arrays of JAX, which importing this module gives the method `numpy()` of TensorFlow's.
Names that are not here raise an AttributeError that says what to use in their place.
"""

import importlib
from typing import Any

import jax
import numpy as np

from distributary.compat.tensorflow import _namespaces
from distributary.keras_bridge import expect_keras


def __getattr__(name: str) -> Any:
    if name == "keras":
        return importlib.import_module(f"{__name__}.keras")
    found = _namespaces.lookup(name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return _namespaces.names_in("")


def _numpy(array: jax.Array) -> np.ndarray:
    """The values as an array of NumPy of its own; a number for a scalar, as with TensorFlow."""
    return np.array(array)[()]


# Programs of TensorFlow call it everywhere, and JAX has nothing under this name.
jax.Array.numpy = _numpy  # type: ignore[attr-defined]
_namespaces.install()
expect_keras()  # `tf.random` in a step may be the first that needs it
