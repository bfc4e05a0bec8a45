"""TensorFlow's names for programs that use `tf.distribute`, on JAX and Keras 3.

    import distributary.compat.tensorflow as tf

Arrays are JAX arrays. Importing this module adds TensorFlow's method `numpy()` to them, and to the
NumPy arrays that a loop over a `tf.data.Dataset` yields. If you use a name that is not here, you
get an AttributeError that says what to use instead.
"""

import importlib
from typing import Any, final

import jax
import numpy as np

from distributary.compat.tensorflow import _namespaces
from distributary.datasets import show_arrays_by
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
    """Returns a copy as a NumPy array, or a number for a scalar, as TensorFlow does."""
    return np.array(array)[()]


@final
class _Element(np.ndarray):
    """An array that a loop over a dataset yields."""

    def numpy(self) -> Any:
        """Returns a copy as a NumPy array, or a number for a scalar, as TensorFlow does."""
        return np.array(self)[()]


def as_element(array: object) -> object:
    """Returns an array in the form in which loops over datasets yield it."""
    return array.view(_Element) if type(array) is np.ndarray else array


# TensorFlow programs call it everywhere, and JAX has no method of this name.
jax.Array.numpy = _numpy  # type: ignore[attr-defined]
show_arrays_by(as_element)
_namespaces.install()
expect_keras()  # the first use of Keras may be `tf.random` inside a step
