"""Operations of `tf.image`; see `Operation` for how arguments are converted."""

from collections.abc import Sequence
from typing import final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from distributary.errors import InvalidValueError
from distributary.tensorflow import _draws as draws
from distributary.tensorflow._operations import Shape


def convert_image_dtype(image: Array, dtype: DTypeLike, saturate: bool = False) -> Array:
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


def random_flip_left_right(image: Array, seed: int | None = None) -> Array:
    """`tf.image.random_flip_left_right`: one image, or every image of a batch by itself."""
    draw = _uniform((*image.shape[:-3], 1, 1, 1), seed)
    return jnp.where(draw < 0.5, jnp.flip(image, -2), image)


def random_crop(value: Array, size: Shape, seed: int | None = None) -> Array:
    """`tf.image.random_crop`: a part of this size."""
    free = [own - int(part) for own, part in zip(value.shape, size, strict=True)]
    if min(free) < 0:
        raise InvalidValueError(
            f"tf.image.random_crop: size is {tuple(size)}, but the image has {value.shape}."
        )
    draws = _uniform((value.ndim,), seed)
    starts = [jnp.int32(draws[i] * (room + 1)) for i, room in enumerate(free)]
    return jax.lax.dynamic_slice(value, starts, [int(part) for part in size])


def _uniform(shape: Shape, seed: int | None) -> Array:
    return draws.uniform(draws.next_key(draws.seed_of(seed)), shape)
