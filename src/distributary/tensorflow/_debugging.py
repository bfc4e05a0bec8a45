"""Functions of `tf.debugging` that are not operations; those are in `_checks`."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from distributary.errors import InvalidValueError, shown


def assert_proper_iterable(values: object) -> None:
    """`tf.debugging.assert_proper_iterable`: not an array, and not text."""
    is_one = isinstance(values, (str, bytes, np.ndarray, jax.Array)) or not hasattr(
        values, "__iter__"
    )
    if is_one:
        raise TypeError(
            f"tf.debugging.assert_proper_iterable: got {shown(values)}, expected a list or a tuple."
        )


def assert_same_float_dtype(
    tensors: Sequence[Any] | None = None, dtype: DTypeLike | None = None
) -> np.dtype[Any]:
    """`tf.debugging.assert_same_float_dtype`: returns the dtype; float32 without arrays."""
    found = {jnp.asarray(tensor).dtype for tensor in tensors or () if tensor is not None}
    wanted = found | ({np.dtype(dtype)} if dtype is not None else set())
    if len(wanted) > 1 or any(not jnp.issubdtype(one, jnp.floating) for one in wanted):
        raise InvalidValueError(
            f"tf.debugging.assert_same_float_dtype: dtypes are {sorted(map(str, wanted))}, expected"
            " one of floating point."
        )
    return wanted.pop() if wanted else np.dtype(np.float32)


def assert_shapes(
    shapes: Sequence[tuple[Array, Sequence[Any]]],
    data: object = None,
    summarize: int | None = None,
    message: str | None = None,
    name: str | None = None,
) -> None:
    """`tf.debugging.assert_shapes`: pairs of arrays and shapes; equal names are equal sizes."""
    pairs = shapes.items() if isinstance(shapes, dict) else shapes
    sizes: dict[str, int] = {}
    for x, names in pairs:
        own = np.shape(x)
        fits = len(own) == len(names)
        for size, name in zip(own, names, strict=False):
            if isinstance(name, str) and not name.isdigit():
                fits &= sizes.setdefault(name, size) == size
            else:
                fits &= name is None or int(name) == size
        if not fits:
            raise InvalidValueError(
                message
                or f"tf.debugging.assert_shapes: an array has shape {own}, expected"
                f" {tuple(names)} where {sizes}."
            )


def disable_check_numerics() -> None:
    """`tf.debugging.disable_check_numerics`: switches `jax_debug_nans` off."""
    jax.config.update("jax_debug_nans", False)


def enable_check_numerics(stack_height_limit: int = 30, path_length_limit: int = 50) -> None:
    """`tf.debugging.enable_check_numerics`: switches `jax_debug_nans` on."""
    jax.config.update("jax_debug_nans", True)


def is_numeric_tensor(tensor: object) -> bool:
    """`tf.debugging.is_numeric_tensor`."""
    return isinstance(tensor, jax.Array) and tensor.dtype != bool


def set_log_device_placement(enabled: bool) -> None:
    """`tf.debugging.set_log_device_placement`: has no effect."""


def get_log_device_placement() -> bool:
    """`tf.debugging.get_log_device_placement`: False."""
    return False
