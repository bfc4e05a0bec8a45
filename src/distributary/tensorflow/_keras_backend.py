"""Functions of `tf.keras.backend` that have no other name; the others are in the tables."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from distributary.keras_bridge import import_keras
from distributary.tensorflow._math import concat
from distributary.tensorflow._operations import array

_keras = import_keras()


def batch_get_value(tensors: Iterable[Any]) -> list[np.ndarray]:
    """`tf.keras.backend.batch_get_value`: copies as NumPy arrays."""
    return [get_value(tensor) for tensor in tensors]


def batch_set_value(tuples: Iterable[tuple[Any, Any]]) -> None:
    """`tf.keras.backend.batch_set_value`: assigns values to variables."""
    for variable, value in tuples:
        set_value(variable, value)


def concatenate(tensors: list[Array], axis: int = -1) -> Array:
    """`tf.keras.backend.concatenate`."""
    return concat(tensors, axis)


def count_params(x: Array) -> int:
    """`tf.keras.backend.count_params`: the number of elements."""
    return x.size


def dtype(x: Array) -> str:
    """`tf.keras.backend.dtype`: the name of the dtype."""
    return x.dtype.name


def get_value(x: Any) -> np.ndarray:
    """`tf.keras.backend.get_value`: a copy as a NumPy array, a number for a scalar."""
    return np.array(array(x))[()]


def set_value(x: Any, value: ArrayLike) -> None:
    """`tf.keras.backend.set_value`: assigns a value to a variable, such as a learning rate."""
    x.assign(np.asarray(value, _keras.backend.standardize_dtype(x.dtype)))


def update(x: Any, new_x: Array) -> Any:
    """`tf.keras.backend.update`."""
    return x.assign(new_x)


def update_add(x: Any, increment: Array) -> Any:
    """`tf.keras.backend.update_add`."""
    return x.assign_add(increment)


def update_sub(x: Any, decrement: Array) -> Any:
    """`tf.keras.backend.update_sub`."""
    return x.assign_sub(decrement)


def variable(value: Array, dtype: DTypeLike | None = None) -> Any:
    """`tf.keras.backend.variable`: a Keras variable with `value`."""
    return _keras.Variable(value, dtype=dtype)
