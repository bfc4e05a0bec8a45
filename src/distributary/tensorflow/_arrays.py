"""More operations on arrays: rows and slices, loops over functions, gradients of one's own.

See `Operation` for how arguments are converted.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from distributary.devices import Nest
from distributary.tensorflow._operations import Shape


def slice_(input_: Array, begin: ArrayLike, size: Shape) -> Array:
    """`tf.slice`: a size of -1 takes all that follow."""
    starts = [begin[i] for i in range(input_.ndim)]  # type: ignore[index]
    sizes = [
        own - int(start) if length == -1 else int(length)
        for own, start, length in zip(input_.shape, starts, size, strict=True)
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


def scatter_nd(
    indices: Array,
    updates: Array,
    shape: Shape,
    bad_indices_policy: str = "",
) -> Array:
    """`tf.scatter_nd`: updates of one place are added."""
    return _at(jnp.zeros([int(size) for size in shape], updates.dtype), indices).add(updates)


def tensor_scatter_nd_update(tensor: Array, indices: Array, updates: Array) -> Array:
    """`tf.tensor_scatter_nd_update`."""
    return _at(tensor, indices).set(updates)


def tensor_scatter_nd_add(
    tensor: Array,
    indices: Array,
    updates: Array,
    bad_indices_policy: str = "",
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


def custom_gradient(f: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """`tf.custom_gradient`: `f` returns its result, and a function of the gradient.

    The result and the gradients are arrays of positional arguments; variables are not read in `f`.
    """
    if f is None:
        return custom_gradient

    @jax.custom_vjp
    def call(*args: Nest) -> Nest:
        return f(*args)[0]

    def forward(*args: Nest) -> tuple[Nest, Nest]:
        return f(*args)[0], args

    def backward(args: Nest, upstream: Nest) -> tuple[Any, ...]:
        parts = upstream if isinstance(upstream, (list, tuple)) else (upstream,)
        gradients = f(*args)[1](*parts)
        return tuple(gradients) if isinstance(gradients, (list, tuple)) else (gradients,)

    call.defvjp(forward, backward)

    def with_gradient(*args: Any) -> Any:
        return call(*[jnp.asarray(arg) for arg in args])

    return with_gradient


def as_image(image: Array, dtype: DTypeLike, saturate: bool = False) -> Array:
    """`tf.image.convert_image_dtype`: numbers from 0 to 1, or of the whole range of integers."""
    if image.dtype == dtype:
        return image
    has_floats, wants_floats = (jnp.issubdtype(d, jnp.inexact) for d in (image.dtype, dtype))
    if wants_floats:
        made = image.astype(dtype)
        return made if has_floats else made / jnp.iinfo(image.dtype).max
    if has_floats:
        largest = jnp.iinfo(dtype).max
        return jnp.clip(image * (largest + 0.5), 0, largest).astype(dtype)
    ratio = (jnp.iinfo(dtype).max + 1) / (jnp.iinfo(image.dtype).max + 1)
    return jnp.floor(image * ratio).astype(dtype)


def flip_left_right(image: Array) -> Array:
    """`tf.image.flip_left_right`."""
    return jnp.flip(image, -2)


def flip_up_down(image: Array) -> Array:
    """`tf.image.flip_up_down`."""
    return jnp.flip(image, -3)


def per_image_standardization(image: Array) -> Array:
    """`tf.image.per_image_standardization`: mean 0 and deviation 1 of each image."""
    pixels = image.astype(jnp.float32)
    axes = (-3, -2, -1)
    deviation = jnp.std(pixels, axes, keepdims=True)
    least = 1 / np.sqrt(np.prod(image.shape[-3:]))
    return (pixels - jnp.mean(pixels, axes, keepdims=True)) / jnp.maximum(deviation, least)


@final
class ResizeMethod:
    """`tf.image.ResizeMethod`: the names of methods of `tf.image.resize`."""

    BILINEAR = "bilinear"
    NEAREST_NEIGHBOR = "nearest"
    BICUBIC = "bicubic"
    LANCZOS3 = "lanczos3"
    LANCZOS5 = "lanczos5"


def resize(
    images: Array,
    size: Sequence[int],
    method: str = "bilinear",
    preserve_aspect_ratio: bool = False,
    antialias: bool = False,
) -> Array:
    """`tf.image.resize`: `jax.image.resize`."""
    height, width = (int(length) for length in size)
    if preserve_aspect_ratio:
        scale = min(height / images.shape[-3], width / images.shape[-2])
        height, width = (round(scale * length) for length in images.shape[-3:-1])
    shape = (*images.shape[:-3], height, width, images.shape[-1])
    return jax.image.resize(images.astype(jnp.float32), shape, method, antialias=antialias)


def resize_with_crop_or_pad(image: Array, target_height: int, target_width: int) -> Array:
    """`tf.image.resize_with_crop_or_pad`: around the middle."""
    for axis, size in ((-3, int(target_height)), (-2, int(target_width))):
        missing = size - image.shape[axis]
        if missing > 0:
            widths = [(0, 0)] * image.ndim
            widths[axis] = (missing // 2, missing - missing // 2)
            image = jnp.pad(image, widths)
        else:
            start = -missing // 2
            image = jax.lax.slice_in_dim(image, start, start + size, axis=image.ndim + axis)
    return image
