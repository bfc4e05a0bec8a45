"""Operations on arrays that have another meaning or other arguments in JAX."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from distributary.compat.tensorflow._operations import (
    Axes,
    Shape,
    TensorLike,
    array,
    canonical,
    tensor,
)
from distributary.variables import ShardedVariable, Variable, embedding_lookup


def constant(
    value: TensorLike,
    dtype: DTypeLike | None = None,
    shape: Shape | None = None,
    name: str | None = None,
) -> Array:
    """`tf.constant`: numbers, not strings; a single number fills `shape`."""
    made = array(value, dtype)
    if shape is None:
        return made
    return jnp.full(shape, made.reshape(())) if made.size == 1 else made.reshape(shape)


def cast(x: TensorLike, dtype: DTypeLike, name: str | None = None) -> Array:
    """`tf.cast`."""
    return array(x).astype(canonical(dtype))


def fill(dims: Shape, value: TensorLike, name: str | None = None) -> Array:
    """`tf.fill`."""
    return jnp.full(dims, tensor(value))


def range_(
    start: ArrayLike,
    limit: ArrayLike | None = None,
    delta: ArrayLike = 1,
    dtype: DTypeLike | None = None,
    name: str | None = None,
) -> Array:
    """`tf.range`."""
    first, last = (0, start) if limit is None else (start, limit)
    return jnp.arange(first, last, delta, canonical(dtype))


def shape(input: TensorLike, out_type: DTypeLike = np.int32, name: str | None = None) -> np.ndarray:
    """`tf.shape`: a NumPy array, since it is known while a step is traced."""
    return np.array(np.shape(tensor(input)), out_type)


def size(input: TensorLike, out_type: DTypeLike = np.int32, name: str | None = None) -> Any:
    """`tf.size`: a NumPy number, since it is known while a step is traced."""
    return np.dtype(out_type).type(np.size(tensor(input)))


def argmax(input: TensorLike, axis: int | None = None, output_type: DTypeLike = np.int64) -> Array:
    """`tf.argmax`: along dim 0 by default."""
    return jnp.argmax(array(input), axis or 0).astype(canonical(output_type))


def argmin(input: TensorLike, axis: int | None = None, output_type: DTypeLike = np.int64) -> Array:
    """`tf.argmin`: along dim 0 by default."""
    return jnp.argmin(array(input), axis or 0).astype(canonical(output_type))


def reduce_mean(
    input_tensor: TensorLike, axis: Axes = None, keepdims: bool = False, name: str | None = None
) -> Array:
    """`tf.reduce_mean`: keeps the dtype of the input, even for integers."""
    values = array(input_tensor)
    mean = jnp.mean(values, axis, keepdims=keepdims)
    return jnp.trunc(mean).astype(values.dtype) if values.dtype.kind in "iu" else mean


def add_n(inputs: Sequence[TensorLike], name: str | None = None) -> Array:
    """`tf.add_n`."""
    first, *others = [array(value) for value in inputs]
    for value in others:
        first = first + value
    return first


def concat(values: Sequence[TensorLike], axis: int, name: str | None = None) -> Array:
    """`tf.concat`."""
    return jnp.concatenate([array(value) for value in values], axis)


def stack(values: Sequence[TensorLike], axis: int = 0, name: str | None = None) -> Array:
    """`tf.stack`."""
    return jnp.stack([array(value) for value in values], axis)


def unstack(
    value: TensorLike, num: int | None = None, axis: int = 0, name: str | None = None
) -> list[Array]:
    """`tf.unstack`."""
    return list(jnp.unstack(array(value), axis=axis))


def split(
    value: TensorLike,
    num_or_size_splits: int | Sequence[int],
    axis: int = 0,
    num: int | None = None,
    name: str | None = None,
) -> list[Array]:
    """`tf.split`: into a number of parts, or into parts of the given sizes."""
    sizes = np.asarray(num_or_size_splits)
    parts = int(sizes) if sizes.ndim == 0 else np.cumsum(sizes)[:-1]
    return jnp.split(array(value), parts, axis)


def matmul(
    a: TensorLike,
    b: TensorLike,
    transpose_a: bool = False,
    transpose_b: bool = False,
    name: str | None = None,
) -> Array:
    """`tf.matmul`."""
    left, right = array(a), array(b)
    left = left.mT if transpose_a else left
    return left @ (right.mT if transpose_b else right)


def einsum(equation: str, *inputs: TensorLike, name: str | None = None) -> Array:
    """`tf.einsum`."""
    return jnp.einsum(equation, *(array(value) for value in inputs))


def gather(
    params: TensorLike,
    indices: TensorLike,
    validate_indices: None = None,
    axis: int | None = None,
    batch_dims: int = 0,
    name: str | None = None,
) -> Array:
    """`tf.gather`: reads only these rows of a variable; their gradient is `IndexedSlices`."""
    dim = batch_dims if axis is None else axis
    ids = array(indices)
    if isinstance(params, ShardedVariable):
        return embedding_lookup(params, ids)
    if isinstance(params, Variable) and dim == 0:
        return params.sparse_read(ids)

    def take(values: Array, ids: Array) -> Array:
        return jnp.take(values, ids, axis=dim - batch_dims if dim >= 0 else dim)

    for _ in range(batch_dims):
        take = jax.vmap(take)
    return take(array(params), ids)


def gather_nd(params: TensorLike, indices: TensorLike, name: str | None = None) -> Array:
    """`tf.gather_nd`."""
    return array(params)[tuple(jnp.moveaxis(array(indices), -1, 0))]


def pad(
    tensor: TensorLike,
    paddings: Sequence[Sequence[int]],
    mode: str = "CONSTANT",
    constant_values: ArrayLike = 0,
    name: str | None = None,
) -> Array:
    """`tf.pad`."""
    if mode.upper() == "CONSTANT":
        return jnp.pad(array(tensor), paddings, constant_values=constant_values)
    return jnp.pad(array(tensor), paddings, mode.lower())


def norm(
    tensor: TensorLike,
    ord: str | float = "euclidean",
    axis: Axes = None,
    keepdims: bool = False,
    name: str | None = None,
) -> Array:
    """`tf.norm`: over all elements by default."""
    values = array(tensor)
    if axis is None:
        flat = jnp.linalg.norm(values.ravel(), None if ord == "euclidean" else ord)
        return flat.reshape([1] * values.ndim) if keepdims else flat
    dims = tuple(axis) if isinstance(axis, (list, tuple)) else axis
    return jnp.linalg.norm(values, None if ord == "euclidean" else ord, dims, keepdims)


def squared_difference(x: TensorLike, y: TensorLike, name: str | None = None) -> Array:
    """`tf.math.squared_difference`."""
    return (array(x) - array(y)) ** 2


def boolean_mask(
    tensor: TensorLike, mask: ArrayLike, axis: int | None = None, name: str | None = "boolean_mask"
) -> Array:
    """`tf.boolean_mask`: not inside a compiled step, as the shape depends on the mask."""
    return jnp.compress(np.ravel(mask), array(tensor), axis or 0)


def count_nonzero(
    input: TensorLike,
    axis: Axes = None,
    keepdims: bool = False,
    dtype: DTypeLike = np.int64,
    name: str | None = None,
) -> Array:
    """`tf.math.count_nonzero`."""
    counts = jnp.count_nonzero(array(input), axis, keepdims=keepdims)
    return counts.astype(canonical(dtype))


def clip_by_norm(
    t: TensorLike, clip_norm: ArrayLike, axes: Axes = None, name: str | None = None
) -> Array:
    """`tf.clip_by_norm`."""
    values = array(t)
    norm = jnp.sqrt(jnp.sum(values**2, axes, keepdims=True))
    return values * clip_norm / jnp.maximum(norm, clip_norm)


def global_norm(t_list: Sequence[TensorLike], name: str | None = None) -> Array:
    """`tf.linalg.global_norm`; ignores None."""
    return jnp.sqrt(sum(jnp.sum(array(t) ** 2) for t in t_list if t is not None))


def clip_by_global_norm(
    t_list: Sequence[TensorLike],
    clip_norm: ArrayLike,
    use_norm: ArrayLike | None = None,
    name: str | None = None,
) -> tuple[list[Array], Array]:
    """`tf.clip_by_global_norm`: the arrays and their norm; None stays None."""
    norm = global_norm(t_list) if use_norm is None else array(use_norm)
    scale = clip_norm / jnp.maximum(norm, clip_norm)
    return [None if t is None else array(t) * scale for t in t_list], norm


def top_k(
    input: TensorLike,
    k: int = 1,
    sorted: bool = True,
    index_type: DTypeLike = np.int32,
    name: str | None = None,
) -> Any:
    """`tf.math.top_k`: values and indices."""
    values, indices = jax.lax.top_k(array(input), k)
    return values, indices.astype(canonical(index_type))


def in_top_k(
    targets: TensorLike, predictions: TensorLike, k: int, name: str | None = None
) -> Array:
    """`tf.math.in_top_k`."""
    scores = array(predictions)
    own = jnp.take_along_axis(scores, array(targets)[:, None], axis=1)
    return jnp.sum(scores > own, axis=1) < k


def l2_normalize(
    x: TensorLike, axis: Axes = None, epsilon: float = 1e-12, name: str | None = None
) -> Array:
    """`tf.math.l2_normalize`."""
    values = array(x)
    square = jnp.sum(values**2, axis, keepdims=True)
    return values * jax.lax.rsqrt(jnp.maximum(square, epsilon))


def divide_no_nan(x: TensorLike, y: TensorLike, name: str | None = None) -> Array:
    """`tf.math.divide_no_nan`: 0 where `y` is 0."""
    divisor = array(y)
    return jnp.where(divisor == 0, 0, array(x) / jnp.where(divisor == 0, 1, divisor))


def confusion_matrix(
    labels: TensorLike,
    predictions: TensorLike,
    num_classes: int | None = None,
    weights: TensorLike | None = None,
    dtype: DTypeLike = np.int32,
    name: str | None = None,
) -> Array:
    """`tf.math.confusion_matrix`; without `num_classes`, not inside a compiled step."""
    rows, columns = array(labels), array(predictions)
    if num_classes is None:
        num_classes = int(max(rows.max(), columns.max())) + 1
    counts = jnp.zeros((num_classes, num_classes), canonical(dtype))
    return counts.at[rows, columns].add(1 if weights is None else array(weights, dtype))
