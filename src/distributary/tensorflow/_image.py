"""Operations of `tf.image`; see `Operation` for how arguments are converted."""

import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from distributary.errors import InvalidTypeError, InvalidValueError
from distributary.keras_bridge import import_keras
from distributary.tensorflow._io import bytes_of
from distributary.tensorflow._operations import Shape, host_array, package, require_host
from distributary.tensorflow._random import Scale, key_of, key_of_number, seeded


def convert_image_dtype(image: Array, dtype: DTypeLike, saturate: bool = False) -> Array:
    """`tf.image.convert_image_dtype`: numbers from 0 to 1, or of the whole range of integers."""
    if image.dtype == dtype:
        return image
    has_floats, wants_floats = (jnp.issubdtype(d, jnp.inexact) for d in (image.dtype, dtype))
    if wants_floats:
        result = image.astype(dtype)
        return result if has_floats else result / jnp.iinfo(image.dtype).max
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
    """`tf.image.resize`: `jax.image.resize`; in float32, unless the method is "nearest"."""
    height, width = (int(length) for length in size)
    if preserve_aspect_ratio:
        scale = min(height / images.shape[-3], width / images.shape[-2])
        height, width = (round(scale * length) for length in images.shape[-3:-1])
    shape = (*images.shape[:-3], height, width, images.shape[-1])
    pixels = images if method == "nearest" else images.astype(jnp.float32)
    return jax.image.resize(pixels, shape, method, antialias=antialias)


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


def crop_to_bounding_box(
    image: Array, offset_height: int, offset_width: int, target_height: int, target_width: int
) -> Array:
    """`tf.image.crop_to_bounding_box`: a part of this size from this corner."""
    box = (offset_height, offset_width, int(target_height), int(target_width))
    _require_fit("crop_to_bounding_box", box, image.shape[-3:-1])
    starts = [*[0] * (image.ndim - 3), offset_height, offset_width, 0]
    sizes = (*image.shape[:-3], *box[2:], image.shape[-1])
    return jax.lax.dynamic_slice(image, starts, sizes)


def pad_to_bounding_box(
    image: Array, offset_height: int, offset_width: int, target_height: int, target_width: int
) -> Array:
    """`tf.image.pad_to_bounding_box`: zeros around the image."""
    height, width = image.shape[-3:-1]
    box = (int(offset_height), int(offset_width), height, width)
    _require_fit("pad_to_bounding_box", box, (int(target_height), int(target_width)))
    rows = (box[0], int(target_height) - box[0] - height)
    columns = (box[1], int(target_width) - box[1] - width)
    return jnp.pad(image, [*[(0, 0)] * (image.ndim - 3), rows, columns, (0, 0)])


def _require_fit(name: str, box: Sequence[Any], outer: Sequence[int]) -> None:
    """Raises an error if a box is not inside of a size; offsets may be computed in a step."""
    for start, size, room in zip(box[:2], box[2:], outer, strict=True):
        is_known = not isinstance(start, jax.core.Tracer)
        if size > room or (is_known and not 0 <= start <= room - size):
            raise InvalidValueError(
                f"tf.image.{name}: the box of {box[2]} x {box[3]} pixels from row {box[0]}, column"
                f" {box[1]} is not inside of {outer[0]} x {outer[1]} pixels."
            )


def central_crop(image: Array, central_fraction: float) -> Array:
    """`tf.image.central_crop`: this share of the height and of the width."""
    if not 0 < central_fraction <= 1:
        raise InvalidValueError(
            f"tf.image.central_crop: central_fraction is {central_fraction}, expected above 0, up"
            " to 1."
        )
    height, width = image.shape[-3:-1]
    top, left = (int((size - size * central_fraction) / 2) for size in (height, width))
    return crop_to_bounding_box(image, top, left, height - 2 * top, width - 2 * left)


def rot90(image: Array, k: int = 1) -> Array:
    """`tf.image.rot90`: `k` quarter turns counterclockwise."""
    return jnp.rot90(image, int(k), (-3, -2))


def extract_patches(
    images: Array, sizes: Sequence[int], strides: Sequence[int], rates: Sequence[int], padding: str
) -> Array:
    """`tf.image.extract_patches`: `keras.ops.image.extract_patches`."""
    size, step, rate = (tuple(numbers[1:3]) for numbers in (sizes, strides, rates))
    patches = import_keras().ops.image.extract_patches
    return patches(images, size, step, rate, padding.lower(), "channels_last")


def psnr(a: Array, b: Array, max_val: Array) -> Array:
    """`tf.image.psnr`: the ratio of signal to noise of each image, in decibels."""
    largest = convert_image_dtype(max_val.astype(a.dtype), jnp.float32)
    first, second = (convert_image_dtype(one, jnp.float32) for one in (a, b))
    error = jnp.mean((first - second) ** 2, (-3, -2, -1))
    return 20 * jnp.log10(largest) - 10 * jnp.log10(error)


def rgb_to_grayscale(images: Array) -> Array:
    """`tf.image.rgb_to_grayscale`."""
    gray = convert_image_dtype(images, jnp.float32) @ jnp.array([0.2989, 0.587, 0.114])
    return convert_image_dtype(gray[..., None], images.dtype)


def grayscale_to_rgb(images: Array) -> Array:
    """`tf.image.grayscale_to_rgb`."""
    return jnp.repeat(images, 3, -1)


def adjust_brightness(image: Array, delta: Scale) -> Array:
    """`tf.image.adjust_brightness`."""
    return _adjusted(image, lambda pixels: pixels + delta)


def adjust_contrast(images: Array, contrast_factor: Scale) -> Array:
    """`tf.image.adjust_contrast`."""

    def spread(pixels: Array) -> Array:
        mean = jnp.mean(pixels, (-3, -2), keepdims=True)
        return (pixels - mean) * contrast_factor + mean

    return _adjusted(images, spread)


def adjust_hue(image: Array, delta: Scale) -> Array:
    """`tf.image.adjust_hue`."""
    return _adjusted(image, lambda rgb: _of_hue(*_hue_and_range(rgb), delta))


def adjust_saturation(image: Array, saturation_factor: Scale) -> Array:
    """`tf.image.adjust_saturation`."""

    def change(rgb: Array) -> Array:
        hue, least, most = _hue_and_range(rgb)
        share = jnp.where(most > 0, 1 - least / jnp.where(most > 0, most, 1), 0)
        least = most * (1 - jnp.clip(share * saturation_factor, 0, 1))
        return _of_hue(hue, least, most)

    return _adjusted(image, change)


def _adjusted(image: Array, change: Callable[[Array], Array]) -> Array:
    """Changes an image as floats, and returns it in its own dtype."""
    keeps = image.dtype in (jnp.float16, jnp.float32)
    floats = image if keeps else convert_image_dtype(image, jnp.float32)
    return convert_image_dtype(change(floats).astype(floats.dtype), image.dtype, True)


def _hue_and_range(rgb: Array) -> tuple[Array, Array, Array]:
    """Returns the hue, from 0 to 6, the smallest and the largest number of every pixel."""
    red, green, blue = jnp.moveaxis(rgb, -1, 0)
    least, most = jnp.min(rgb, -1), jnp.max(rgb, -1)
    chroma = jnp.where(most > least, most - least, 1)
    hue = jnp.where(
        most == red,
        (green - blue) / chroma % 6,
        jnp.where(most == green, (blue - red) / chroma + 2, (red - green) / chroma + 4),
    )
    return jnp.where(most > least, hue, 0), least, most


def _of_hue(hue: Array, least: Array, most: Array, delta: Scale = 0.0) -> Array:
    hue = (hue + 6 * delta) % 6
    weights = jnp.stack([abs(hue - 3) - 1, 2 - abs(hue - 2), 2 - abs(hue - 4)], -1)
    low, high = least[..., None], most[..., None]
    return low + (high - low) * jnp.clip(weights, 0, 1)


def _random_brightness(key: Array, image: Array, max_delta: float) -> Array:
    return adjust_brightness(image, _uniform(key, (), -max_delta, max_delta))


def _random_contrast(key: Array, image: Array, lower: float, upper: float) -> Array:
    return adjust_contrast(image, _between(key, lower, upper))


def _random_hue(key: Array, image: Array, max_delta: float) -> Array:
    return adjust_hue(image, _uniform(key, (), -max_delta, max_delta))


def _random_saturation(key: Array, image: Array, lower: float, upper: float) -> Array:
    return adjust_saturation(image, _between(key, lower, upper))


def _between(key: Array, lower: float, upper: float) -> Array:
    if not 0 <= lower < upper:
        raise InvalidValueError(f"tf.image: lower is {lower}, expected from 0 up to upper {upper}.")
    return _uniform(key, (), lower, upper)


def _random_flip_left_right(key: Array, image: Array) -> Array:
    return jnp.where(_halves(key, image), jnp.flip(image, -2), image)


def _random_flip_up_down(key: Array, image: Array) -> Array:
    return jnp.where(_halves(key, image), jnp.flip(image, -3), image)


def _uniform(key: Array, shape: Sequence[int], low: float = 0, high: float = 1) -> Array:
    return jax.random.uniform(key, shape, jnp.float32, low, high)


def _halves(key: Array, image: Array) -> Array:
    """Returns whether to change an image, or every image of a batch by itself."""
    return _uniform(key, (*image.shape[:-3], 1, 1, 1)) < 0.5


def _random_crop(key: Array, value: Array, size: Shape) -> Array:
    free = [length - int(part) for length, part in zip(value.shape, size, strict=True)]
    if min(free) < 0:
        raise InvalidValueError(
            f"tf.image.random_crop: size is {tuple(size)}, but the image has {value.shape}."
        )
    shares = _uniform(key, (value.ndim,))
    starts = [jnp.int32(shares[i] * (room + 1)) for i, room in enumerate(free)]
    return jax.lax.dynamic_slice(value, starts, [int(part) for part in size])


def sample_distorted_bounding_box(
    image_size: Sequence[int],
    bounding_boxes: ArrayLike,
    seed: int | None = 0,
    min_object_covered: ArrayLike = 0.1,
    aspect_ratio_range: Sequence[float] | None = (0.75, 1.33),
    area_range: Sequence[float] | None = (0.05, 1.0),
    max_attempts: int | None = 100,
    use_image_if_no_bounding_boxes: bool | None = None,
) -> tuple[np.ndarray, ...]:
    """`tf.image.sample_distorted_bounding_box`: a random crop, of which the host draws the size.

    Returns:
        Where the crop begins, int32 `[3]`; its size, int32 `[3]`; and its box, float32 `[1, 1, 4]`:
        the whole image if no attempt covers enough of a box.
    """
    key = key_of_number(seed or None)
    require_host("tf.image.sample_distorted_bounding_box", key, image_size, bounding_boxes)
    outer, boxes = np.asarray(image_size)[:2], np.asarray(bounding_boxes, np.float32).reshape(-1, 4)
    if not len(boxes):
        if not use_image_if_no_bounding_boxes:
            raise InvalidValueError(
                "tf.image.sample_distorted_bounding_box: there are no bounding_boxes. Pass one, or"
                " use_image_if_no_bounding_boxes=True."
            )
        boxes = np.array([[0, 0, 1, 1]], np.float32)
    begins, ends = np.split(np.int32(boxes * np.tile(outer, 2)), 2, axis=1)  # in pixels
    low, high = aspect_ratio_range or (0.75, 1.33)
    least, most = np.array(area_range or (0.05, 1.0)) * np.prod(outer)
    start: Any
    size: Any
    for ratio, share, *place in np.asarray(_uniform(key, (max_attempts or 100, 4)), float):
        aspect = low + ratio * (high - low)
        highest = min(round(np.sqrt(most / aspect)), outer[0], int((outer[1] + 0.5) / aspect))
        height = min(round(np.sqrt(least / aspect)), highest)
        height += int(share * (highest - height + 1))
        # No failure from rounding alone.
        height += int(height * round(height * aspect) < least)
        height -= int(height * round(height * aspect) > most)
        size = np.array([height, round(height * aspect)])
        start = np.int32(place * np.maximum(outer - size, 0))
        fits = least <= np.prod(size) <= most and (size >= 1).all() and (size <= outer).all()
        inner = np.minimum(ends, start + size) - np.maximum(begins, start)
        areas = np.prod(ends - begins, 1)
        covered = np.prod(np.maximum(inner, 0), 1) >= np.asarray(min_object_covered) * areas
        if fits and (covered & (areas >= 1)).any():
            break
    else:
        start, size = np.zeros(2), outer
    box = np.concatenate([start, start + size]) / np.tile(outer, 2)
    return tuple(
        map(host_array, ([*start, 0], [*size, -1], [[box]]), (np.int32, np.int32, np.float32))
    )


def _seeded(draw: Callable[..., Array], place: int) -> Iterator[Callable[..., Array]]:
    """Yields the operation that draws with a number as its seed, and the stateless one."""
    for key in (key_of_number, key_of):
        yield seeded(draw, key, place, "image")


random_brightness, stateless_random_brightness = _seeded(_random_brightness, 2)
random_contrast, stateless_random_contrast = _seeded(_random_contrast, 3)
random_crop, stateless_random_crop = _seeded(_random_crop, 2)
random_flip_left_right, stateless_random_flip_left_right = _seeded(_random_flip_left_right, 1)
random_flip_up_down, stateless_random_flip_up_down = _seeded(_random_flip_up_down, 1)
random_hue, stateless_random_hue = _seeded(_random_hue, 2)
random_saturation, stateless_random_saturation = _seeded(_random_saturation, 3)


def decode_image(
    contents: object,
    channels: int | None = None,
    dtype: DTypeLike = np.uint8,
    name: str | None = None,
    expand_animations: bool = True,
) -> np.ndarray:
    """`tf.io.decode_image`: `[height, width, channels]`, by Pillow.

    Other decoders of JPEG can differ by a few levels. Images have 8 bits per channel; `channels`
    is 1, 3 or 4, or 0 for what the file has. Of animations you get the first frame.
    """
    modes = {1: "L", 3: "RGB", 4: "RGBA"}
    image = package("tf.image", "PIL.Image", "pillow").open(io.BytesIO(bytes_of(contents)))
    mode = modes.get(channels or len(image.getbands()))
    if (channels and mode is None) or image.mode.startswith("I"):
        raise InvalidValueError(
            f"decode_image: channels is {channels} for an image of mode {image.mode}; expected 0,"
            " 1, 3 or 4 channels of 8 bits."
        )
    pixels = np.asarray(image.convert(mode or "RGB"))
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    wanted = np.dtype(dtype)
    return pixels if wanted == np.uint8 else (pixels / 255).astype(wanted)


def decode_jpeg(contents: object, channels: int = 0, **options: object) -> np.ndarray:
    """`tf.io.decode_jpeg`: like `decode_image`; the other options have no effect."""
    return decode_image(contents, channels)


def decode_bmp(contents: object, channels: int = 0, name: str | None = None) -> np.ndarray:
    """`tf.io.decode_bmp`: like `decode_image`."""
    return decode_image(contents, channels)


def decode_gif(contents: object, name: str | None = None) -> np.ndarray:
    """`tf.io.decode_gif`: the first frame, `[1, height, width, 3]`."""
    return decode_image(contents, 3)[None]


def decode_png(
    contents: object, channels: int = 0, dtype: DTypeLike = np.uint8, name: str | None = None
) -> np.ndarray:
    """`tf.io.decode_png`: like `decode_image`."""
    return decode_image(contents, channels, dtype)


def decode_and_crop_jpeg(
    contents: object, crop_window: Sequence[int], channels: int = 0, **options: object
) -> np.ndarray:
    """`tf.io.decode_and_crop_jpeg`: like `decode_jpeg`, and a part `[y, x, height, width]`."""
    top, left, height, width = (int(number) for number in crop_window)
    return decode_image(contents, channels)[top : top + height, left : left + width]


def is_jpeg(contents: object, name: str | None = None) -> bool:
    """`tf.io.is_jpeg`."""
    return bytes_of(contents).startswith(b"\xff\xd8\xff")


def encode_jpeg(image: ArrayLike, quality: int = 95, **options: object) -> bytes:
    """`tf.io.encode_jpeg`: the bytes of an image of uint8; the other options have no effect."""
    return _encoded(image, "JPEG", quality=quality)


def encode_png(image: ArrayLike, compression: int = -1, name: str | None = None) -> bytes:
    """`tf.io.encode_png`: the bytes of an image of uint8."""
    return _encoded(image, "PNG")


def _encoded(image: ArrayLike, kind: str, **options: Any) -> bytes:
    pixels = np.asarray(image)
    if pixels.dtype != np.uint8:
        raise InvalidTypeError(
            f"An image of dtype {pixels.dtype} cannot be encoded, expected uint8. Use"
            " tf.image.convert_image_dtype(image, tf.uint8)."
        )
    pixels = pixels[..., 0] if pixels.shape[-1] == 1 else pixels
    file = io.BytesIO()
    package("tf.image", "PIL.Image", "pillow").fromarray(pixels).save(file, kind, **options)
    return file.getvalue()
