"""TensorFlow's names for programs that use `tf.distribute`, on JAX and Keras 3.

    import distributary.compat.tensorflow as tf

Arrays are JAX arrays. From this import on, all of them have TensorFlow's methods `numpy()`,
`get_shape()` and `set_shape()`, as have the NumPy arrays that a loop over a `tf.data.Dataset`
yields, and slices of variables have `assign`. Models of Keras have what steps for Keras 2 use, such
as `compiled_loss`. Where TensorFlow is missing, Keras gets what it lacks: layers of text, and this
module for its functions that make datasets. If you use a name that is not here, you get an
AttributeError that says what to use instead.
"""

import importlib
import sys
from typing import Any

from distributary.compat.tensorflow import _names
from distributary.keras_bridge import would_use_jax
from distributary.tensorflow import _objects


def __getattr__(name: str) -> Any:
    if name == "keras":
        return importlib.import_module(f"{__name__}.keras")
    return globals().setdefault(name, _names.lookup("", name))


def __dir__() -> list[str]:
    return [*_names.names_in(""), "keras"]


_objects.install()
_names.install()
if would_use_jax():  # before the first trace, in which `tf.random` may be the first to need it
    from distributary.tensorflow import _keras_parts

    _keras_parts.complete(sys.modules[__name__])
