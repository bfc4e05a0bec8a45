"""Functions of `tf.keras.backend` that have no other name; the others are in the tables."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from distributary.keras_bridge import import_keras
from distributary.tensorflow import _arrays, _math, _random
from distributary.tensorflow._operations import (
    REQUIRED,
    Operation,
    array,
    keras_of_tensorflow,
    named,
    operations,
    taking,
)

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
    return _arrays.concat(tensors, axis)


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


def permute_dimensions(x: ArrayLike, pattern: Sequence[int]) -> Array:
    """`tf.keras.backend.permute_dimensions`."""
    return jnp.transpose(x, pattern)


def relu(
    x: ArrayLike, alpha: float = 0.0, max_value: float | None = None, threshold: float = 0.0
) -> Array:
    """`tf.keras.backend.relu`."""
    return _keras.activations.relu(x, alpha, max_value, threshold)


def tile(x: ArrayLike, n: Sequence[int]) -> Array:
    """`tf.keras.backend.tile`."""
    return jnp.tile(x, n)


_SAME = (
    "abs cos equal exp greater greater_equal less less_equal maximum minimum not_equal round"
    " sigmoid sign sin sqrt square tanh"
)

#: The names of `tf.keras.backend`.
BACKEND: dict[str, Any] = {
    **named(
        _keras.backend,
        "backend clear_session epsilon floatx get_uid image_data_format is_keras_tensor"
        " result_type set_epsilon set_floatx set_image_data_format standardize_dtype",
    ),
    **{name: _math.EVERYWHERE[name] for name in _SAME.split()},
    **taking(
        named(jnp, "log ndim transpose")
        | {
            "flatten": jnp.ravel,
            "hard_sigmoid": _keras.ops.hard_sigmoid,
            "int_shape": jnp.shape,
            "softplus": jax.nn.softplus,
            "softsign": jax.nn.soft_sign,
        },
        "x",
    ),
    **taking(named(jnp, "all any max mean min prod std sum var"), "x", axis=None, keepdims=False),
    **taking(named(jnp, "argmax argmin expand_dims") | named(jax.nn, "softmax"), "x", axis=-1),
    **taking(named(jnp, "cumprod cumsum stack"), "x", axis=0),
    **taking(named(jnp, "ones_like zeros_like"), "x", dtype=None),
    **taking(named(jnp, "ones zeros"), shape=REQUIRED, dtype=None),
    **taking(
        named(_keras.ops, "categorical_crossentropy sparse_categorical_crossentropy"),
        "target",
        "output",
        from_logits=False,
        axis=-1,
    ),
    "arange": Operation(jnp.arange, "start", stop=None, step=1, dtype="int32"),
    "binary_crossentropy": Operation(
        _keras.ops.binary_crossentropy, "target", "output", from_logits=False
    ),
    "clip": Operation(jnp.clip, "x", "min_value", "max_value"),
    "cast_to_floatx": keras_of_tensorflow().backend.cast_to_floatx,
    "dot": Operation(jnp.dot, "x", "y"),
    "elu": Operation(jax.nn.elu, "x", alpha=1.0),
    "eye": Operation(jnp.eye, "size", dtype=None),
    "one_hot": Operation(jax.nn.one_hot, "indices", num_classes=REQUIRED),
    "pow": Operation(jnp.power, "x", "a"),
    "repeat_elements": Operation(jnp.repeat, "x", "rep", "axis"),
    "reshape": Operation(jnp.reshape, "x", shape=REQUIRED),
    "squeeze": Operation(jnp.squeeze, "x", axis=REQUIRED),
    "stop_gradient": Operation(jax.lax.stop_gradient, "variables"),
    "switch": Operation(jnp.where, "condition", "then_expression", "else_expression"),
    **operations(sys.modules[__name__]),
    **operations(_arrays, "cast constant shape"),
    **operations(_math, "l2_normalize"),
    "batch_get_value": batch_get_value,
    "batch_set_value": batch_set_value,
    "random_normal": Operation(_random.normal),
    "random_uniform": Operation(_random.uniform),
    "truncated_normal": Operation(_random.truncated_normal),
}
