"""Operations on arrays that have another meaning or other arguments in JAX.

See `Operation` for how arguments are converted.
"""

import contextlib
import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from distributary.tensorflow._operations import Axes, Shape, TensorLike, array
from distributary.tensorflow.autograph import Range, is_traced
from distributary.tracing import current_scope
from distributary.values import ShardedVariable, Variable, embedding_lookup


def constant(
    value: TensorLike, dtype: DTypeLike | None = None, shape: Shape | None = None
) -> Array:
    """`tf.constant`: a single number fills `shape`; text stays on the host."""
    made = array(value, dtype)
    if shape is None:
        return made
    return jnp.full(shape, made.reshape(())) if made.size == 1 else made.reshape(shape)


def convert_to_tensor(
    value: TensorLike, dtype: DTypeLike | None = None, dtype_hint: DTypeLike | None = None
) -> Array:
    """`tf.convert_to_tensor`: text stays on the host."""
    return array(value, dtype)


def one_hot(
    indices: Array,
    depth: int,
    on_value: ArrayLike | None = None,
    off_value: ArrayLike | None = None,
    axis: int | None = None,
    dtype: DTypeLike | None = None,
) -> Array:
    """`tf.one_hot`."""
    wanted = next((jnp.asarray(v).dtype for v in (on_value, off_value) if v is not None), None)
    hot = jax.nn.one_hot(indices, depth, axis=-1 if axis is None else axis, dtype=bool)
    on, off = (1 if on_value is None else on_value), (0 if off_value is None else off_value)
    return jnp.where(hot, on, off).astype(dtype or wanted or np.float32)


def where(condition: Array, x: ArrayLike | None = None, y: ArrayLike | None = None) -> Array:
    """`tf.where`: without `x` and `y` the places, outside of steps."""
    if x is None or y is None:
        return jnp.argwhere(condition).astype(jax.dtypes.canonicalize_dtype(np.int64))
    return jnp.where(condition, x, y)


def transpose(a: Array, perm: Sequence[int] | None = None, conjugate: bool = False) -> Array:
    """`tf.transpose`."""
    moved = jnp.transpose(a, perm)
    return moved.conj() if conjugate else moved


def eye(
    num_rows: int,
    num_columns: int | None = None,
    batch_shape: Shape | None = None,
    dtype: DTypeLike = np.float32,
) -> Array:
    """`tf.eye`."""
    one = jnp.eye(int(num_rows), num_columns, dtype=dtype)
    return one if batch_shape is None else jnp.broadcast_to(one, (*batch_shape, *one.shape))


def cast(x: Array, dtype: DTypeLike) -> Array:
    """`tf.cast`."""
    return x.astype(dtype)


def range_(
    start: ArrayLike,
    limit: ArrayLike | None = None,
    delta: ArrayLike = 1,
    dtype: DTypeLike | None = None,
) -> Array | Range:
    """`tf.range`; with a traced end, only a loop can take its numbers."""
    scope = current_scope()
    ends = (0, start) if limit is None else (start, limit)
    if scope is not None and scope.converts and any(map(is_traced, (*ends, delta))):
        return Range(*ends, delta)
    return jnp.arange(*((0, start) if limit is None else (start, limit)), delta, dtype)


def shape(input: ArrayLike, out_type: np.typing.DTypeLike = np.int32) -> np.ndarray:
    """`tf.shape`: a NumPy array, since it is known while a step is traced."""
    return np.array(np.shape(input), out_type)


def size(input: ArrayLike, out_type: np.typing.DTypeLike = np.int32) -> Any:
    """`tf.size`: a NumPy number, since it is known while a step is traced."""
    return np.dtype(out_type).type(np.size(input))


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


def add_n(inputs: list[Array]) -> Array:
    """`tf.add_n`."""
    return functools.reduce(operator.add, inputs)


def concat(values: Any, axis: int) -> Array:
    """`tf.concat`."""
    # Sizes of arrays, put together while a step is traced, stay numbers that Python can read.
    is_known = not any(map(is_traced, jax.tree.leaves(values)))
    with jax.ensure_compile_time_eval() if is_known else contextlib.nullcontext():
        return jnp.concatenate([array(value) for value in values], axis)


def unstack(value: Array, num: int | None = None, axis: int = 0) -> list[Array]:
    """`tf.unstack`."""
    return list(jnp.unstack(value, axis=axis))


def split(
    value: Array, num_or_size_splits: int | Sequence[int], axis: int = 0, num: int | None = None
) -> list[Array]:
    """`tf.split`: into a number of parts, or into parts of the given sizes."""
    sizes = np.asarray(num_or_size_splits)
    return jnp.split(value, int(sizes) if sizes.ndim == 0 else np.cumsum(sizes)[:-1], axis)


def matmul(
    a: Array,
    b: Array,
    transpose_a: bool = False,
    transpose_b: bool = False,
    adjoint_a: bool = False,
    adjoint_b: bool = False,
    a_is_sparse: bool = False,
    b_is_sparse: bool = False,
    output_type: DTypeLike | None = None,
    grad_a: bool = False,
    grad_b: bool = False,
) -> Array:
    """`tf.matmul`."""
    first = a.mT.conj() if adjoint_a else a.mT if transpose_a else a
    second = b.mT.conj() if adjoint_b else b.mT if transpose_b else b
    return jnp.matmul(first, second, preferred_element_type=output_type)


def einsum(equation: str, *inputs: Array) -> Array:
    """`tf.einsum`."""
    return jnp.einsum(equation, *inputs)


def gather(
    params: Any,
    indices: Array,
    validate_indices: None = None,
    axis: int | None = None,
    batch_dims: int = 0,
) -> Array:
    """`tf.gather`: reads only these rows of a variable; their gradient is `IndexedSlices`."""
    dim = batch_dims if axis is None else axis
    if isinstance(params, ShardedVariable):
        return embedding_lookup(params, indices)
    if isinstance(params, Variable) and dim == 0:
        return params.sparse_read(indices)

    def take(values: Array, ids: Array) -> Array:
        return jnp.take(values, ids, axis=dim - batch_dims if dim >= 0 else dim)

    for _ in range(batch_dims):
        take = jax.vmap(take)
    return take(array(params), indices)


def gather_nd(
    params: Array,
    indices: Array,
    batch_dims: int = 0,
    name: str | None = None,
    bad_indices_policy: str = "",
) -> Array:
    """`tf.gather_nd`."""

    def take(params: Array, indices: Array) -> Array:
        return params[tuple(jnp.moveaxis(indices, -1, 0))]

    for _ in range(batch_dims):
        take = jax.vmap(take)
    return take(params, indices)


def pad(
    tensor: Array,
    paddings: Sequence[Sequence[int]],
    mode: str = "CONSTANT",
    constant_values: ArrayLike = 0,
) -> Array:
    """`tf.pad`."""
    options = {"constant_values": constant_values} if mode.upper() == "CONSTANT" else {}
    return jnp.pad(tensor, paddings, mode.lower(), **options)


def norm(
    tensor: Array, ord: str | float = "euclidean", axis: Axes = None, keepdims: bool = False
) -> Array:
    """`tf.norm`: over all elements by default."""
    kind = None if ord == "euclidean" else ord
    if axis is not None:
        return jnp.linalg.norm(tensor, kind, axis, keepdims)
    flat = jnp.linalg.norm(tensor.ravel(), kind)
    return flat.reshape([1] * tensor.ndim) if keepdims else flat


def squared_difference(x: Array, y: Array) -> Array:
    """`tf.math.squared_difference`."""
    return (x - y) ** 2


def boolean_mask(tensor: Array, mask: ArrayLike, axis: int | None = None) -> Array:
    """`tf.boolean_mask`: not inside a compiled step, as the shape depends on the mask."""
    return jnp.compress(np.ravel(mask), tensor, axis or 0)


def count_nonzero(
    input: Array, axis: Axes = None, keepdims: bool = False, dtype: DTypeLike = np.int64
) -> Array:
    """`tf.math.count_nonzero`."""
    return jnp.count_nonzero(input, axis, keepdims=keepdims).astype(dtype)


def clip_by_norm(t: Array, clip_norm: ArrayLike, axes: Axes = None) -> Array:
    """`tf.clip_by_norm`."""
    norm = jnp.sqrt(jnp.sum(t**2, axes, keepdims=True))
    return t * clip_norm / jnp.maximum(norm, clip_norm)


def global_norm(t_list: list[Array | None]) -> Array:
    """`tf.linalg.global_norm`; ignores None."""
    return jnp.sqrt(sum(jnp.sum(t**2) for t in t_list if t is not None))


def clip_by_global_norm(
    t_list: list[Array | None], clip_norm: ArrayLike, use_norm: ArrayLike | None = None
) -> tuple[list[Array | None], Array]:
    """`tf.clip_by_global_norm`: the arrays and their norm; None stays None."""
    norm = global_norm(t_list) if use_norm is None else array(use_norm)
    scale = clip_norm / jnp.maximum(norm, clip_norm)
    return [None if t is None else t * scale for t in t_list], norm


def top_k(
    input: Array, k: int = 1, sorted: bool = True, index_type: DTypeLike = np.int32
) -> tuple[Array, Array]:
    """`tf.math.top_k`: values and indices."""
    values, indices = jax.lax.top_k(input, k)
    return values, indices.astype(index_type)


def in_top_k(targets: Array, predictions: Array, k: int) -> Array:
    """`tf.math.in_top_k`."""
    own = jnp.take_along_axis(predictions, targets[:, None], axis=1)
    return jnp.sum(predictions > own, axis=1) < k


def l2_normalize(
    x: Array,
    axis: Axes = None,
    epsilon: float = 1e-12,
    name: str | None = None,
    dim: Axes = None,
) -> Array:
    """`tf.math.l2_normalize`."""
    axis = dim if axis is None else axis
    return x * jax.lax.rsqrt(jnp.maximum(jnp.sum(x**2, axis, keepdims=True), epsilon))


def divide_no_nan(x: Array, y: Array) -> Array:
    """`tf.math.divide_no_nan`: 0 where `y` is 0."""
    return jnp.where(y == 0, 0, x / jnp.where(y == 0, 1, y))


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
