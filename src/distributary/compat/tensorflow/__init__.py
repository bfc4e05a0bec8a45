"""TensorFlow's names for programs that use `tf.distribute`, on JAX and Keras 3.

    import distributary.compat.tensorflow as tf

Arrays are arrays of JAX, which importing this module gives the method `numpy()` of TensorFlow's; so
have the arrays of NumPy that a loop over a `tf.data.Dataset` gets.
Names that are not here raise an AttributeError that says what to use in their place.
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
    """The values as an array of NumPy of its own; a number for a scalar, as with TensorFlow."""
    return np.array(array)[()]


@final
class _Element(np.ndarray):
    """What a loop over a dataset gets."""

    def numpy(self) -> Any:
        """The values as an array of NumPy of its own; a number for a scalar, as with TensorFlow."""
        return np.array(self)[()]


def as_element(array: Any) -> Any:
    """An array as loops over datasets get it."""
    return array.view(_Element) if type(array) is np.ndarray else array


# Programs of TensorFlow call it everywhere, and JAX has nothing under this name.
jax.Array.numpy = _numpy  # type: ignore[attr-defined]
show_arrays_by(as_element)
_namespaces.install()
expect_keras()  # `tf.random` in a step may be the first that needs it
