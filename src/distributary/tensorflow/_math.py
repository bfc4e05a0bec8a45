"""Operations of `tf.math`; see `Operation` for how arguments are converted."""

import functools
import operator
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from distributary.tensorflow._operations import (
    REQUIRED,
    Axes,
    Operation,
    TensorLike,
    array,
    named,
    taking,
)


def add_n(inputs: list[Array]) -> Array:
    """`tf.add_n`."""
    return functools.reduce(operator.add, inputs)


def argmax(input: Array, axis: int | None = None, output_type: DTypeLike = np.int64) -> Array:
    """`tf.argmax`: along dim 0 by default."""
    return jnp.argmax(input, axis or 0).astype(output_type)


def argmin(input: Array, axis: int | None = None, output_type: DTypeLike = np.int64) -> Array:
    """`tf.argmin`: along dim 0 by default."""
    return jnp.argmin(input, axis or 0).astype(output_type)


def reduce_mean(input_tensor: Array, axis: Axes = None, keepdims: bool = False) -> Array:
    """`tf.reduce_mean`: keeps the dtype of the input, even for integers."""
    mean, dtype = jnp.mean(input_tensor, axis, keepdims=keepdims), input_tensor.dtype
    return jnp.trunc(mean).astype(dtype) if dtype.kind in "iu" else mean


def confusion_matrix(
    labels: Array,
    predictions: Array,
    num_classes: int | None = None,
    weights: TensorLike | None = None,
    dtype: DTypeLike = np.int32,
) -> Array:
    """`tf.math.confusion_matrix`; without `num_classes`, not inside a compiled step."""
    if num_classes is None:
        num_classes = int(max(labels.max(), predictions.max())) + 1
    counts = jnp.zeros((num_classes, num_classes), dtype)
    return counts.at[labels, predictions].add(1 if weights is None else array(weights, dtype))


def count_nonzero(
    input: Array, axis: Axes = None, keepdims: bool = False, dtype: DTypeLike = np.int64
) -> Array:
    """`tf.math.count_nonzero`."""
    return jnp.count_nonzero(input, axis, keepdims=keepdims).astype(dtype)


def divide_no_nan(x: Array, y: Array) -> Array:
    """`tf.math.divide_no_nan`: 0 where `y` is 0."""
    return jnp.where(y == 0, 0, x / jnp.where(y == 0, 1, y))


def in_top_k(targets: Array, predictions: Array, k: int) -> Array:
    """`tf.math.in_top_k`."""
    scores = jnp.take_along_axis(predictions, targets[:, None], axis=1)
    return jnp.sum(predictions > scores, axis=1) < k


def l2_normalize(
    x: Array, axis: Axes = None, epsilon: float = 1e-12, name: str | None = None, dim: Axes = None
) -> Array:
    """`tf.math.l2_normalize`."""
    axis = dim if axis is None else axis
    return x * jax.lax.rsqrt(jnp.maximum(jnp.sum(x**2, axis, keepdims=True), epsilon))


def squared_difference(x: Array, y: Array) -> Array:
    """`tf.math.squared_difference`."""
    return (x - y) ** 2


class TopK(NamedTuple):
    """The largest values, and their places."""

    values: Array
    indices: Array


def top_k(input: Array, k: int = 1, sorted: bool = True, index_type: DTypeLike = np.int32) -> TopK:
    """`tf.math.top_k`."""
    values, indices = jax.lax.top_k(input, k)
    return TopK(values, indices.astype(index_type))


def cumsum(x: Array, axis: int = 0, exclusive: bool = False, reverse: bool = False) -> Array:
    """`tf.cumsum`."""
    return _accumulated(jnp.cumsum, 0, x, axis, exclusive, reverse)


def cumprod(x: Array, axis: int = 0, exclusive: bool = False, reverse: bool = False) -> Array:
    """`tf.math.cumprod`."""
    return _accumulated(jnp.cumprod, 1, x, axis, exclusive, reverse)


def _accumulated(
    combine: Callable[..., Array], start: int, x: Array, axis: int, exclusive: bool, reverse: bool
) -> Array:
    x = jnp.moveaxis(x, axis, 0)[:: -1 if reverse else 1]
    if exclusive:
        x = jnp.concatenate([jnp.full_like(x[:1], start), x[:-1]])
    sums = combine(x, 0, dtype=x.dtype)
    return jnp.moveaxis(sums[:: -1 if reverse else 1], 0, axis)


def _of_segments(reduce: Callable[..., Array], empty: int | None) -> Callable[..., Array]:
    """Returns a reduction of segments; those without rows are `empty`, or extreme numbers."""
    if reduce is jax.ops.segment_sum:  # which is 0 there
        return reduce

    def reduced(data: Array, segment_ids: Array, num_segments: int | None = None) -> Array:
        result = reduce(data, segment_ids, num_segments)
        rows = jax.ops.segment_sum(jnp.ones_like(segment_ids), segment_ids, num_segments)
        has_rows = jnp.expand_dims(rows > 0, range(1, result.ndim))
        # JAX has infinities there.
        other = jnp.nan_to_num(result) if empty is None else jnp.asarray(empty, result.dtype)
        return jnp.where(has_rows, result, other)

    return reduced


_SEGMENTS = named(jax.ops, "segment_max segment_min segment_sum")

#: Operations with a name both in `tf` and in `tf.math`, besides functions defined here.
EVERYWHERE: dict[str, Operation] = {
    **taking(
        named(
            jnp,
            "abs cos cosh exp floor logical_not negative round sign sin sinh sqrt square tan tanh",
        )
        | {"acos": jnp.arccos, "asin": jnp.arcsin, "atan": jnp.arctan, "sigmoid": jax.nn.sigmoid},
        "x",
    ),
    **taking(
        named(
            jnp,
            "add equal greater greater_equal less less_equal logical_and logical_or maximum minimum"
            " multiply not_equal subtract",
        )
        | {"divide": jnp.true_divide, "pow": jnp.power, "truediv": jnp.true_divide},
        "x",
        "y",
    ),
    **taking(
        {
            "reduce_all": jnp.all,
            "reduce_any": jnp.any,
            "reduce_logsumexp": jax.nn.logsumexp,
            "reduce_max": jnp.max,
            "reduce_min": jnp.min,
            "reduce_prod": jnp.prod,
            "reduce_sum": jnp.sum,
        },
        "input_tensor",
        axis=None,
        keepdims=False,
    ),
    "atan2": Operation(jnp.arctan2, "y", "x"),
}

#: Operations of `tf.math` only.
MATH: dict[str, Operation] = {
    **taking(
        named(jnp, "ceil expm1 log log1p reciprocal rint")
        | named(jax.scipy.special, "digamma erfc")
        | named(lax, "erf rsqrt")
        | {
            "acosh": jnp.arccosh,
            "asinh": jnp.arcsinh,
            "atanh": jnp.arctanh,
            "is_finite": jnp.isfinite,
            "is_inf": jnp.isinf,
            "is_nan": jnp.isnan,
            "lgamma": jax.scipy.special.gammaln,
            "log_sigmoid": jax.nn.log_sigmoid,
        },
        "x",
    ),
    **taking(
        named(jnp, "logical_xor mod")
        | named(jax.scipy.special, "xlog1py xlogy")
        | {"floordiv": jnp.floor_divide, "floormod": jnp.mod},
        "x",
        "y",
    ),
    **taking(named(jnp, "angle conj imag real"), "input"),
    "reduce_std": Operation(jnp.std, "input_tensor", axis=None, keepdims=False),
    "reduce_variance": Operation(jnp.var, "input_tensor", axis=None, keepdims=False),
    **taking(named(jax.nn, "log_softmax softmax"), "logits", axis=-1),
    "softplus": Operation(jax.nn.softplus, "features"),
    "softsign": Operation(jax.nn.soft_sign, "features"),
    **taking({n: _of_segments(f, 0) for n, f in _SEGMENTS.items()}, "data", "segment_ids"),
    **taking(
        {f"unsorted_{n}": _of_segments(f, None) for n, f in _SEGMENTS.items()},
        "data",
        "segment_ids",
        num_segments=REQUIRED,
    ),
}
