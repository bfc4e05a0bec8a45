"""Operations of `tf` itself; see `Operation` for how arguments are converted."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from distributary.data import TensorSpec
from distributary.devices import Nest, inside_jax_trace
from distributary.errors import InvalidValueError
from distributary.tensorflow._host import host_array, is_text
from distributary.tensorflow._linalg import global_norm
from distributary.tensorflow._operations import REQUIRED, Axes, Operation, Shape, array, converted
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
    return list(jnp.unstack(value, axis=axis))


def split(
    value: Array, num_or_size_splits: int | Sequence[int], axis: int = 0, num: int | None = None
) -> list[Array]:
    """`tf.split`: into a number of parts, or into parts of the given sizes."""
    sizes = np.asarray(num_or_size_splits)
    return jnp.split(value, int(sizes) if sizes.ndim == 0 else np.cumsum(sizes)[:-1], axis)


def gather(
    params: Any,
    indices: Array,
    validate_indices: None = None,
    axis: int | None = None,
    batch_dims: int = 0,
) -> Any:
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
    if is_text(params):
        return host_array(np.take(params, np.asarray(indices), dim))
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


def boolean_mask(tensor: Array, mask: Any, axis: int | None = None) -> Array:
    """`tf.boolean_mask`: not inside a compiled step, as the shape depends on the mask."""
    picked, first = np.asarray(mask, bool), axis or 0
    dims = tensor.shape[first:][: picked.ndim]
    if picked.shape != dims or not dims:
        raise InvalidValueError(
            f"tf.boolean_mask: the mask has shape {picked.shape}, but the array has {dims} there."
        )
    return tensor[(slice(None),) * (first % tensor.ndim) + (picked,)]


def clip_by_norm(t: Array, clip_norm: ArrayLike, axes: Axes = None) -> Array:
    """`tf.clip_by_norm`."""
    norm = jnp.sqrt(jnp.sum(t**2, axes, keepdims=True))
    return t * clip_norm / jnp.maximum(norm, clip_norm)


def clip_by_global_norm(
    t_list: list[Array | None], clip_norm: ArrayLike, use_norm: ArrayLike | None = None
) -> tuple[list[Array | None], Array]:
    """`tf.clip_by_global_norm`: the arrays and their norm; None stays None."""
    norm = global_norm(t_list) if use_norm is None else array(use_norm)
    scale = clip_norm / jnp.maximum(norm, clip_norm)
    return [None if t is None else t * scale for t in t_list], norm


def slice_(input_: Array, begin: ArrayLike, size: Shape) -> Array:
    """`tf.slice`: a size of -1 takes all that follow."""
    starts = [begin[i] for i in range(input_.ndim)]  # type: ignore[index]
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
    return _at(jnp.zeros([int(size) for size in shape], updates.dtype), indices).add(updates)


def tensor_scatter_nd_update(tensor: Array, indices: Array, updates: Array) -> Array:
    """`tf.tensor_scatter_nd_update`."""
    return _at(tensor, indices).set(updates)


def tensor_scatter_nd_add(
    tensor: Array, indices: Array, updates: Array, bad_indices_policy: str = ""
) -> Array:
    """`tf.tensor_scatter_nd_add`."""
    return _at(tensor, indices).add(updates)


def tensor_scatter_nd_sub(tensor: Array, indices: Array, updates: Array) -> Array:
    """`tf.tensor_scatter_nd_sub`."""
    return _at(tensor, indices).add(-updates)


def _at(tensor: Array, indices: Array) -> Any:
    return tensor.at[tuple(jnp.moveaxis(indices, -1, 0))]


def meshgrid(*args: ArrayLike, indexing: str = "xy") -> list[Array]:
    """`tf.meshgrid`."""
    return list(jnp.meshgrid(*args, indexing=indexing))


def map_fn(
    fn: Callable[[Any], Any],
    elems: Nest,
    dtype: object = None,
    parallel_iterations: int | None = None,
    back_prop: bool = True,
    swap_memory: bool = False,
    infer_shape: bool = True,
    name: str | None = None,
    fn_output_signature: object = None,
) -> Any:
    """`tf.map_fn`: one compiled loop over dim 0."""
    return jax.lax.map(fn, jax.tree.map(jnp.asarray, elems))


def vectorized_map(
    fn: Callable[[Any], Any], elems: Nest, fallback_to_while_loop: bool = True, warn: bool = True
) -> Any:
    """`tf.vectorized_map`: over dim 0, all elements at once."""
    return jax.vmap(fn)(jax.tree.map(jnp.asarray, elems))


def scan(
    fn: Callable[[Any, Any], Any],
    elems: Nest,
    initializer: Nest = None,
    parallel_iterations: int = 10,
    back_prop: bool = True,
    swap_memory: bool = False,
    infer_shape: bool = True,
    reverse: bool = False,
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


def foldl(
    fn: Callable[[Any, Any], Any],
    elems: Nest,
    initializer: Nest = None,
    parallel_iterations: int = 10,
    back_prop: bool = True,
    swap_memory: bool = False,
) -> Any:
    """`tf.foldl`: the result after the last element."""
    return jax.tree.map(lambda x: x[-1], scan(fn, elems, initializer))


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
    return jnp.tile(input, multiples)


def _repeat(input: Array, repeats: Any, axis: int | None) -> Array:
    is_known = isinstance(repeats, (int, np.ndarray))
    return jnp.repeat(input, repeats if is_known else jnp.asarray(repeats), axis)


#: Operations with another name or other arguments in JAX.
ARRAYS: dict[str, Operation] = {
    "broadcast_to": Operation(jnp.broadcast_to, "input", shape=REQUIRED),
    "clip_by_value": Operation(jnp.clip, "t", "clip_value_min", "clip_value_max"),
    "expand_dims": Operation(jnp.expand_dims, "input", axis=REQUIRED),
    "identity": Operation(jnp.asarray, "input"),
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
