"""TensorFlow's names for programs that use `tf.distribute`, on JAX and Keras 3.

    import distributary.compat.tensorflow as tf

Arrays are JAX arrays. From this import on, all of them have TensorFlow's methods `numpy()`,
`get_shape()` and `set_shape()`, as have the NumPy arrays that a loop over a `tf.data.Dataset`
yields, and slices of variables have `assign`. If you use a name that is not here, you get an
AttributeError that says what to use instead.
"""

import importlib
from typing import Any

from distributary.compat.tensorflow import _namespaces
from distributary.keras_bridge import expect_keras
from distributary.tensorflow import _methods


def __getattr__(name: str) -> Any:
    if name == "keras":
        return importlib.import_module(f"{__name__}.keras")
    return globals().setdefault(name, _namespaces.lookup("", name))


def __dir__() -> list[str]:
    return [*_namespaces.names_in(""), "keras"]


_methods.install()
_namespaces.install()
expect_keras()  # the first use of Keras may be `tf.random` inside a step
