"""TensorFlow's names for programs that use `tf.distribute`, on JAX and Keras 3.

    import distributary.compat.tensorflow as tf

Arrays are JAX arrays. From this import on, all of them have TensorFlow's method `numpy()`, as have
the NumPy arrays that a loop over a `tf.data.Dataset` yields. If you use a name that is not here,
you get an AttributeError that says what to use instead.
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
    return globals().setdefault(name, _namespaces.lookup("", name))


def __dir__() -> list[str]:
    return [*_namespaces.names_in(""), "keras"]


def _numpy(array: jax.Array) -> np.ndarray:
    """Returns a copy as a NumPy array, or a number for a scalar, as TensorFlow does."""
    return np.array(array)[()]


jax.Array.numpy = _numpy  # type: ignore[attr-defined]
_namespaces.install()
expect_keras()  # the first use of Keras may be `tf.random` inside a step
