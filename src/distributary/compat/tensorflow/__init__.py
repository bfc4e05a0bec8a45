"""TensorFlow's names for programs that use `tf.distribute`, on JAX and Keras 3.

    import distributary.compat.tensorflow as tf

Arrays are JAX arrays. In your program they have TensorFlow's method `numpy()`, as have the NumPy
arrays that a loop over a `tf.data.Dataset` yields. If you use a name that is not here, you get an
AttributeError that says what to use instead.
"""

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any, final

import jax
import numpy as np

from distributary.compat.tensorflow import _namespaces
from distributary.compat.tensorflow._callers import is_program
from distributary.keras_bridge import expect_keras


def __getattr__(name: str) -> Any:
    if name == "keras":
        return importlib.import_module(f"{__name__}.keras")
    return globals().setdefault(name, _namespaces.lookup(name))


def __dir__() -> list[str]:
    return _namespaces.names_in("")


def _numpy(array: jax.Array) -> np.ndarray:
    """Returns a copy as a NumPy array, or a number for a scalar, as TensorFlow does."""
    return np.array(array)[()]


@final
class _NumpyMethod:
    """TensorFlow's method `numpy()` of arrays, for the code of programs.

    JAX makes all arrays of one class, so that only this class can have the method. Code of
    installed packages that do not use this module does not see it.
    """

    def __get__(self, array: jax.Array | None, owner: type) -> Callable[[], np.ndarray]:
        if array is None or not is_program(sys._getframe(1)):
            raise AttributeError(f"{owner.__name__!r} object has no attribute 'numpy'")
        return functools.partial(_numpy, array)


jax.Array.numpy = _NumpyMethod()  # type: ignore[attr-defined]
_namespaces.install()
expect_keras()  # the first use of Keras may be `tf.random` inside a step
