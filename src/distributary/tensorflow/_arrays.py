"""Operations of `tf` itself, `tf.math` and `tf.linalg`; see `Operation` for their arguments."""

import contextlib
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from distributary.data import TensorSpec
from distributary.devices import Nest, inside_jax_trace
from distributary.errors import InvalidValueError
from distributary.tensorflow._operations import (
    REQUIRED,
    Axes,
    Gradient,
    Operation,
    Shape,
    TensorLike,
    array,
    converted,
    host_array,
    is_text,
    named,
    taking,
    with_values,
    without_effect,
)
from distributary.tensorflow.autograph import Range, is_traced
from distributary.tracing import current_scope
from distributary.variables import ShardedVariable, Variable, embedding_lookup


def constant(value: Any, dtype: DTypeLike | None = None, shape: Shape | None = None) -> Array:
    """`tf.constant`: a single number fills `shape`; text stays on the host."""
    is_whole = dtype is None or np.dtype(dtype).kind in "iu"
    is_whole &= all(isinstance(x, (int, np.integer)) for x in jax.tree.leaves(value))
    with jax.ensure_compile_time_eval() if is_whole else contextlib.nullcontext():
        result = converted("tf.constant", value, dtype)  # whole numbers may be sizes
    if shape is None:
        return result
    return jnp.full(shape, result.reshape(())) if result.size == 1 else result.reshape(shape)


def convert_to_tensor(
    value: Any, dtype: DTypeLike | None = None, dtype_hint: DTypeLike | None = None
) -> Array:
    """`tf.convert_to_tensor`: text stays on the host."""
    return converted("tf.convert_to_tensor", value, dtype)


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


def cast(x: Gradient, dtype: DTypeLike) -> Any:
    """`tf.cast`."""
    return with_values(x, lambda values: values.astype(dtype))


def identity(input: Gradient) -> Any:
    """`tf.identity`."""
    return input


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
    return jnp.arange(*ends, delta, dtype)


def shape(input: ArrayLike, out_type: np.typing.DTypeLike = np.int32) -> np.ndarray:
    """`tf.shape`: a NumPy array, since it is known while a step is traced."""
    sizes = np.shape(input)  # those that Keras leaves open while it builds a model are no numbers
    is_known = all(isinstance(n, int) for n in sizes)
    return host_array(sizes, out_type) if is_known else np.array(sizes, object)


def size(input: ArrayLike, out_type: np.typing.DTypeLike = np.int32) -> np.ndarray:
    """`tf.size`: a NumPy array, since it is known while a step is traced."""
    return host_array(np.size(input), out_type)


def rank(input: ArrayLike) -> np.ndarray:
    """`tf.rank`: a NumPy array, since it is known while a step is traced."""
    return host_array(np.ndim(input), np.int32)


def concat(values: Any, axis: int) -> Any:
    """`tf.concat`."""
    if any(map(is_text, values)):
        return host_array(np.concatenate([array(value) for value in values], axis))
    # Sizes of arrays, put together while a step is traced, stay numbers that Python can read.
    is_known = not any(map(is_traced, jax.tree.leaves(values)))
    with jax.ensure_compile_time_eval() if is_known else contextlib.nullcontext():
        joined = jnp.concatenate([array(value) for value in values], axis)
    return host_array(joined) if is_known and inside_jax_trace() else joined


def unstack(value: Array, num: int | None = None, axis: int = 0) -> list[Array]:
    """`tf.unstack`."""
    if num not in (None, value.shape[axis]):
        raise InvalidValueError(f"tf.unstack: {value.shape=}, expected {num} along {axis=}.")
    return list(jnp.unstack(value, axis=axis))


def split(
    value: Array, num_or_size_splits: int | Sequence[int], axis: int = 0, num: int | None = None
) -> list[Array]:
    """`tf.split`: into a number of parts, or into parts of the given sizes; -1 is the rest."""
    sizes, size = np.array(num_or_size_splits), value.shape[axis]
    if sizes.ndim == 0:
        return jnp.split(value, int(sizes), axis)
    sizes[sizes == -1] = size - sizes[sizes != -1].sum()
    if sizes.sum() != size or (sizes < 0).any():
        raise InvalidValueError(
            f"tf.split: the sizes {num_or_size_splits} do not add up to {size}, the size of the"
            f" array along {axis=}."
        )
    return jnp.split(value, np.cumsum(sizes)[:-1], axis)


def gather(
    params: Any,
    indices: Array,
    validate_indices: None = None,
    axis: int | None = None,
    batch_dims: int = 0,
) -> Any:
    """`tf.gather`: reads only these rows of a variable; their gradient is `IndexedSlices`."""
    batch_dims += indices.ndim if batch_dims < 0 else 0
    dim = batch_dims if axis is None else axis
    if (dim if dim >= 0 else dim + len(params.shape)) < batch_dims:
        raise InvalidValueError(
            f"tf.gather: {axis=} is one of the {batch_dims=}, expected another."
        )
    if isinstance(params, ShardedVariable):
        return embedding_lookup(params, indices)
    if isinstance(params, Variable) and dim == 0:
        return params.sparse_read(indices)

    def take(values: Array, ids: Array) -> Array:
        return jnp.take(values, ids, axis=dim - batch_dims if dim >= 0 else dim)

    for _ in range(batch_dims):
        take = jax.vmap(take)
    if is_text(params):
        return host_array(np.take(params, np.asarray(indices), dim))
    return take(array(params), indices)


@without_effect("name bad_indices_policy")
def gather_nd(params: Array, indices: Array, batch_dims: int = 0) -> Array:
    """`tf.gather_nd`."""

    def take(params: Array, indices: Array) -> Array:
        return params.at[tuple(jnp.moveaxis(indices, -1, 0))].get(mode="fill")

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


def boolean_mask(tensor: Array, mask: Any, axis: int | None = None) -> Array:
    """`tf.boolean_mask`: not inside a compiled step, as the shape depends on the mask."""
    picked, first = np.asarray(mask, bool), axis or 0
    dims = tensor.shape[first:][: picked.ndim]
    if picked.shape != dims or not dims:
        raise InvalidValueError(
            f"tf.boolean_mask: the mask has shape {picked.shape}, but the array has {dims} there."
        )
    return tensor[(slice(None),) * (first % tensor.ndim) + (picked,)]


def clip_by_value(t: Gradient, clip_value_min: ArrayLike, clip_value_max: ArrayLike) -> Any:
    """`tf.clip_by_value`: the gradient passes also where `t` is one of the limits."""

    def clip(values: Array) -> Array:
        limited = jnp.maximum(jnp.minimum(values, clip_value_max), clip_value_min)
        is_inside = (clip_value_min <= values) & (values <= clip_value_max)
        return jnp.where(is_inside, values, limited)

    return with_values(t, clip)


def clip_by_norm(t: Gradient, clip_norm: ArrayLike, axes: Axes = None) -> Any:
    """`tf.clip_by_norm`: as in TensorFlow, rows of a gradient that are given twice count twice."""

    def clip(values: Array) -> Array:
        squares = jnp.sum(values**2, axes, keepdims=True)
        norm = jnp.where(squares > 0, jnp.sqrt(jnp.where(squares > 0, squares, 1)), squares)
        return values * clip_norm / jnp.maximum(norm, clip_norm)

    return with_values(t, clip)


def clip_by_global_norm(
    t_list: list[Gradient | None], clip_norm: ArrayLike, use_norm: ArrayLike | None = None
) -> tuple[list[Gradient | None], Array]:
    """`tf.clip_by_global_norm`: the arrays and their norm; None stays None."""
    norm = global_norm(t_list) if use_norm is None else array(use_norm)
    scale = clip_norm / jnp.maximum(norm, clip_norm)
    scaled = lambda t: with_values(t, lambda values: values * scale)
    return [None if t is None else scaled(t) for t in t_list], norm


def slice_(input_: Array, begin: Any, size: Shape) -> Array:
    """`tf.slice`: a size of -1 takes all that follow."""
    if not input_.ndim == len(begin) == len(size):
        raise InvalidValueError(
            f"tf.slice: {begin=} and {size=} of an array of shape {input_.shape}, expected a number"
            " for each dim."
        )
    starts = [*begin]  # some of them may be traced
    sizes = [
        length_of_dim - int(start) if length == -1 else int(length)
        for length_of_dim, start, length in zip(input_.shape, starts, size, strict=True)
    ]
    return jax.lax.dynamic_slice(input_, starts, sizes)


def sort(values: Array, axis: int = -1, direction: str = "ASCENDING") -> Array:
    """`tf.sort`."""
    return jnp.sort(values, axis, descending=_descends(direction))


def argsort(
    values: Array, axis: int = -1, direction: str = "ASCENDING", stable: bool = False
) -> Array:
    """`tf.argsort`."""
    return jnp.argsort(values, axis, descending=_descends(direction))


def _descends(direction: str) -> bool:
    return {"ASCENDING": False, "DESCENDING": True}[direction]


class Unique(NamedTuple):
    """The different values of an array, and for each element the number of its value."""

    y: Array
    idx: Array


def unique(x: Array, out_idx: DTypeLike = np.int32) -> Unique:
    """`tf.unique`: outside of steps; values in the order in which they first appear."""
    _, first, places = np.unique(np.asarray(x), return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return Unique(x[np.sort(first)], jnp.asarray(rank[places], out_idx))


def sequence_mask(
    lengths: Array, maxlen: ArrayLike | None = None, dtype: DTypeLike = np.bool_
) -> Array:
    """`tf.sequence_mask`; inside a step, `maxlen` is required."""
    size = int(np.max(lengths if maxlen is None else maxlen))
    return (jnp.arange(size) < lengths[..., None]).astype(dtype)


def scatter_nd(indices: Array, updates: Array, shape: Shape, bad_indices_policy: str = "") -> Array:
    """`tf.scatter_nd`: updates of one place are added."""
    zeros = jnp.zeros([int(size) for size in shape], updates.dtype)
    return _at("tf.scatter_nd", zeros, indices, updates).add(updates)


def _scattered(name: str, method: str) -> Callable[..., Array]:
    def scattered(
        tensor: Array, indices: Array, updates: Array, bad_indices_policy: str = ""
    ) -> Array:
        places = _at(f"tf.tensor_scatter_nd_{name}", tensor, indices, updates)
        return getattr(places, method)(updates)

    scattered.__doc__ = f"`tf.tensor_scatter_nd_{name}`."
    return scattered


tensor_scatter_nd_update = _scattered("update", "set")
tensor_scatter_nd_add = _scattered("add", "add")
tensor_scatter_nd_sub = _scattered("sub", "subtract")


def _at(name: str, tensor: Array, indices: Array, updates: Array) -> Any:
    expected = indices.shape[:-1] + tensor.shape[indices.shape[-1] :]
    if updates.shape not in (expected, ()):
        raise InvalidValueError(
            f"{name}: the updates have shape {updates.shape}, expected {expected} for indices of"
            f" shape {indices.shape} into an array of shape {tensor.shape}."
        )
    return tensor.at[tuple(jnp.moveaxis(indices, -1, 0))]


def meshgrid(*args: ArrayLike, indexing: str = "xy") -> list[Array]:
    """`tf.meshgrid`."""
    return list(jnp.meshgrid(*args, indexing=indexing))


@without_effect(
    "dtype parallel_iterations back_prop swap_memory infer_shape name fn_output_signature"
)
def map_fn(fn: Callable[[Any], Any], elems: Nest) -> Any:
    """`tf.map_fn`: one compiled loop over dim 0."""
    return jax.lax.map(fn, jax.tree.map(jnp.asarray, elems))


@without_effect("fallback_to_while_loop warn")
def vectorized_map(fn: Callable[[Any], Any], elems: Nest) -> Any:
    """`tf.vectorized_map`: over dim 0, all elements at once."""
    return jax.vmap(fn)(jax.tree.map(jnp.asarray, elems))


@without_effect("parallel_iterations back_prop swap_memory infer_shape", before="reverse")
def scan(
    fn: Callable[[Any, Any], Any], elems: Nest, initializer: Nest = None, reverse: bool = False
) -> Any:
    """`tf.scan`: the results after each element."""
    arrays = jax.tree.map(jnp.asarray, elems)
    if initializer is None:
        at = -1 if reverse else 0
        first = jax.tree.map(lambda x: x[at], arrays)
        rest = jax.tree.map(lambda x: x[:-1] if reverse else x[1:], arrays)
        results = scan(fn, rest, first, reverse=reverse)
        parts = (lambda a, b: (b, a[None])) if reverse else (lambda a, b: (a[None], b))
        return jax.tree.map(lambda a, b: jnp.concatenate(parts(a, b)), first, results)

    def step(carry: Nest, element: Nest) -> tuple[Any, Any]:
        result = fn(carry, element)
        return result, result

    start = jax.tree.map(jnp.asarray, initializer)
    return jax.lax.scan(step, start, arrays, reverse=reverse)[1]


@without_effect("parallel_iterations back_prop swap_memory")
def foldl(fn: Callable[[Any, Any], Any], elems: Nest, initializer: Nest = None) -> Any:
    """`tf.foldl`: the result after the last element."""
    return _folded(fn, elems, initializer, False)


@without_effect("parallel_iterations back_prop swap_memory")
def foldr(fn: Callable[[Any, Any], Any], elems: Nest, initializer: Nest = None) -> Any:
    """`tf.foldr`: the result after the first element, from the last one on."""
    return _folded(fn, elems, initializer, True)


def _folded(fn: Callable[[Any, Any], Any], elems: Nest, initializer: Nest, reverse: bool) -> Any:
    arrays = jax.tree.map(jnp.asarray, elems)
    if initializer is None:
        first, rest = (-1, slice(-1)) if reverse else (0, slice(1, None))
        initializer = jax.tree.map(lambda x: x[first], arrays)
        arrays = jax.tree.map(lambda x: x[rest], arrays)
    step = lambda carry, element: (fn(carry, element), None)
    return jax.lax.scan(step, jax.tree.map(jnp.asarray, initializer), arrays, reverse=reverse)[0]


def ensure_shape(x: Array, shape: Sequence[int | None]) -> Array:
    """`tf.ensure_shape`: returns the array; None stands for any size."""
    if not TensorSpec(shape).accepts(x):
        raise InvalidValueError(f"tf.ensure_shape: {x.shape} is not {tuple(shape)}.")
    return x


def fill(dims: Sequence[int], value: Array | float) -> Array:
    """`tf.fill`."""
    return jnp.full(dims, value)


def zeros(shape: Shape, dtype: DTypeLike | None = None) -> Any:
    """`tf.zeros`: empty texts for `tf.string`, on the host."""
    is_string = dtype is not None and np.dtype(dtype).kind == "O"
    return host_array(np.full(shape, "")) if is_string else jnp.zeros(shape, dtype)


def linspace(
    start: ArrayLike, stop: ArrayLike, num: int, name: str | None = None, axis: int = 0
) -> Array:
    """`tf.linspace`."""
    return jnp.linspace(start, stop, num, axis=axis)


def tile(input: ArrayLike, multiples: Sequence[int]) -> Array:
    """`tf.tile`."""
    if len(multiples) != np.ndim(input):
        raise InvalidValueError(
            f"tf.tile: {multiples=} of an array of shape {np.shape(input)}, expected a number for"
            " each dim."
        )
    return jnp.tile(input, multiples)


def _repeat(input: Array, repeats: Any, axis: int | None) -> Array:
    is_known = isinstance(repeats, (int, np.ndarray))
    return jnp.repeat(input, repeats if is_known else jnp.asarray(repeats), axis)


#: Operations with another name or other arguments in JAX.
ARRAYS: dict[str, Operation] = {
    "broadcast_to": Operation(jnp.broadcast_to, "input", shape=REQUIRED),
    "expand_dims": Operation(jnp.expand_dims, "input", axis=REQUIRED),
    "ones": Operation(jnp.ones, shape=REQUIRED, dtype=None),
    "ones_like": Operation(jnp.ones_like, "input", dtype=None),
    "repeat": Operation(_repeat, "input", repeats=REQUIRED, axis=None),
    "reshape": Operation(jnp.reshape, "tensor", shape=REQUIRED),
    "reverse": Operation(jnp.flip, "tensor", axis=REQUIRED),
    "roll": Operation(jnp.roll, "input", shift=REQUIRED, axis=REQUIRED),
    "squeeze": Operation(jnp.squeeze, "input", axis=None),
    "stack": Operation(jnp.stack, "values", axis=0),
    "stop_gradient": Operation(jax.lax.stop_gradient, "input"),
    "tensordot": Operation(jnp.tensordot, "a", "b", axes=REQUIRED),
    "zeros_like": Operation(jnp.zeros_like, "input", dtype=None),
}


# `tf.math`


def add_n(inputs: list[Array]) -> Array:
    """`tf.add_n`."""
    shapes = {one.shape for one in inputs}
    if len(shapes) > 1:
        raise InvalidValueError(f"tf.add_n: arrays of the shapes {shapes}, expected one shape.")
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
    """`tf.math.in_top_k`: False for what is no class, and where the score is not finite."""
    scores = jnp.take_along_axis(predictions, targets[:, None], axis=1, mode="fill")
    can_be = (targets >= 0) & jnp.isfinite(scores[:, 0])
    return can_be & (jnp.sum(predictions > scores, axis=1) < k)


def l2_normalize(
    x: Array, axis: Axes = None, epsilon: float = 1e-12, name: str | None = None, dim: Axes = None
) -> Array:
    """`tf.math.l2_normalize`."""
    axis = dim if axis is None else axis
    return x * jax.lax.rsqrt(jnp.maximum(jnp.sum(x**2, axis, keepdims=True), epsilon))


def softmax(logits: Array, axis: int | None = None) -> Array:
    """`tf.nn.softmax`: along the last dim by default."""
    return jax.nn.softmax(logits, -1 if axis is None else axis)


def log_softmax(logits: Array, axis: int | None = None) -> Array:
    """`tf.nn.log_softmax`: along the last dim by default."""
    return jax.nn.log_softmax(logits, -1 if axis is None else axis)


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


# TensorFlow's gradients where JAX has others: at 0, and where both operands are equal.


def abs_(x: ArrayLike) -> Array:
    """`tf.abs`: with the gradient 0 at 0."""
    return jnp.abs(x) if jnp.iscomplexobj(x) else jnp.where(jnp.equal(x, 0), 0, jnp.abs(x))


def maximum(x: ArrayLike, y: ArrayLike) -> Array:
    """`tf.maximum`: where both are equal, the gradient is that of `x`."""
    return jnp.where(jnp.greater_equal(x, y) | jnp.isnan(x), x, y)


def minimum(x: ArrayLike, y: ArrayLike) -> Array:
    """`tf.minimum`: where both are equal, the gradient is that of `x`."""
    return jnp.where(jnp.less_equal(x, y) | jnp.isnan(x), x, y)


def xlogy(x: ArrayLike, y: ArrayLike) -> Array:
    """`tf.math.xlogy`: with the gradient 0 where `x` is 0."""
    is_zero = jnp.equal(x, 0)
    return jnp.where(is_zero, 0, x * jnp.log(jnp.where(is_zero, 1, y)))


def xlog1py(x: ArrayLike, y: ArrayLike) -> Array:
    """`tf.math.xlog1py`: with the gradient 0 where `x` is 0."""
    is_zero = jnp.equal(x, 0)
    return jnp.where(is_zero, 0, x * jnp.log1p(jnp.where(is_zero, 0, y)))


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
            "cos cosh exp floor logical_not negative round sign sin sinh sqrt square tan tanh",
        )
        | {"acos": jnp.arccos, "asin": jnp.arcsin, "atan": jnp.arctan, "sigmoid": jax.nn.sigmoid},
        "x",
    ),
    **taking(
        named(
            jnp,
            "add equal greater greater_equal less less_equal logical_and logical_or multiply"
            " not_equal subtract",
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
    "abs": Operation(abs_),
    "atan2": Operation(jnp.arctan2, "y", "x"),
    "maximum": Operation(maximum),
    "minimum": Operation(minimum),
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
        named(jnp, "logical_xor mod") | {"floordiv": jnp.floor_divide, "floormod": jnp.mod},
        "x",
        "y",
    ),
    **taking(named(jnp, "angle conj imag real"), "input"),
    "xlog1py": Operation(xlog1py),
    "xlogy": Operation(xlogy),
    "reduce_std": Operation(jnp.std, "input_tensor", axis=None, keepdims=False),
    "reduce_variance": Operation(jnp.var, "input_tensor", axis=None, keepdims=False),
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


# `tf.linalg`


def global_norm(t_list: list[Gradient | None]) -> Array:
    """`tf.linalg.global_norm`: ignores None; of rows that are given twice, both count."""
    squares = [with_values(t, jnp.square) for t in t_list if t is not None]
    return jnp.sqrt(sum(jnp.sum(getattr(one, "values", one)) for one in squares))


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


def norm(
    tensor: Array, ord: str | float = "euclidean", axis: Axes = None, keepdims: bool = False
) -> Array:
    """`tf.norm`: over all elements by default."""
    kind = None if ord == "euclidean" else ord
    if axis is not None:
        return jnp.linalg.norm(tensor, kind, axis, keepdims)
    flat = jnp.linalg.norm(tensor.ravel(), kind)
    return flat.reshape([1] * tensor.ndim) if keepdims else flat


def band_part(input: Array, num_lower: int, num_upper: int) -> Array:
    """`tf.linalg.band_part`: zeros outside of the diagonals; -1 keeps all of one side."""
    rows, columns = (jnp.arange(size) for size in input.shape[-2:])
    above = columns - rows[:, None]
    keeps_lower = (num_lower < 0) | (-above <= num_lower)
    keeps_upper = (num_upper < 0) | (above <= num_upper)
    return jnp.where(keeps_lower & keeps_upper, input, jnp.zeros((), input.dtype))


def svd(
    tensor: Array, full_matrices: bool = False, compute_uv: bool = True
) -> Array | tuple[Array, Array, Array]:
    """`tf.linalg.svd`: singular values, and the vectors as columns."""
    if not compute_uv:
        return jnp.linalg.svd(tensor, compute_uv=False)
    u, s, vh = jnp.linalg.svd(tensor, full_matrices)
    return s, u, vh.mT.conj()


def solve(matrix: Array, rhs: Array, adjoint: bool = False) -> Array:
    """`tf.linalg.solve`."""
    return jnp.linalg.solve(matrix.mT.conj() if adjoint else matrix, rhs)


def inv(input: Array, adjoint: bool = False) -> Array:
    """`tf.linalg.inv`."""
    return jnp.linalg.inv(input.mT.conj() if adjoint else input)


def cholesky(input: Array) -> Array:
    """`tf.linalg.cholesky`: of the lower triangle."""
    return jnp.linalg.cholesky(input, symmetrize_input=False)


def eigh(tensor: Array) -> tuple[Array, Array]:
    """`tf.linalg.eigh`: of the lower triangle."""
    return jnp.linalg.eigh(tensor, symmetrize_input=False)


def diag(diagonal: Array) -> Array:
    """`tf.linalg.diag`: matrices with these diagonals."""
    return diagonal[..., None] * jnp.eye(diagonal.shape[-1], dtype=diagonal.dtype)


def diag_part(input: Array) -> Array:
    """`tf.linalg.diag_part`: the main diagonals."""
    return jnp.diagonal(input, axis1=-2, axis2=-1)


def trace(x: Array) -> Array:
    """`tf.linalg.trace`."""
    return jnp.trace(x, axis1=-2, axis2=-1)


#: Operations with the arguments of JAX.
LINALG = {
    **taking(named(jnp.linalg, "det qr slogdet"), "input"),
    "pinv": Operation(jnp.linalg.pinv, "a"),
}
