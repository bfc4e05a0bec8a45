"""`tf.debugging` and its like: checks of shapes, and of values where they are known.

Inside a step, values are known when the program runs. The call of the step then raises the error.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from distributary.errors import InvalidValueError, shown
from distributary.tensorflow._host import require


def _comparison(name: str, compare: Callable[[Any, Any], Any]) -> Callable[..., None]:
    def assertion(
        x: ArrayLike, y: ArrayLike, message: str | None = None, summarize: int | None = None
    ) -> None:
        text = f"tf.debugging.{name}: does not hold for {shown(x)} and {shown(y)}."
        require(compare(x, y), message, text)

    assertion.__name__ = name
    assertion.__doc__ = f"`tf.debugging.{name}`: for all elements."
    return assertion


assert_equal = _comparison("assert_equal", jnp.equal)


assert_greater = _comparison("assert_greater", jnp.greater)


assert_greater_equal = _comparison("assert_greater_equal", jnp.greater_equal)


assert_less = _comparison("assert_less", jnp.less)


assert_less_equal = _comparison("assert_less_equal", jnp.less_equal)


_assert_not_equal = _comparison("assert_none_equal", jnp.not_equal)


def assert_none_equal(
    x: ArrayLike, y: ArrayLike, summarize: int | None = None, message: str | None = None
) -> None:
    """`tf.debugging.assert_none_equal`: for all elements."""
    _assert_not_equal(x, y, message)


def assert_near(
    x: ArrayLike,
    y: ArrayLike,
    rtol: float | None = None,
    atol: float | None = None,
    message: str | None = None,
    summarize: int | None = None,
) -> None:
    """`tf.debugging.assert_near`: with tolerances of 10 units in the last place by default."""
    unit = 10 * float(jnp.finfo(jnp.result_type(float, x)).eps)
    near = jnp.isclose(x, y, unit if rtol is None else rtol, unit if atol is None else atol)
    require(near, message, f"tf.debugging.assert_near: {shown(x)} is not near {shown(y)}.")


def assert_positive(x: ArrayLike, message: str | None = None, summarize: int | None = None) -> None:
    """`tf.debugging.assert_positive`."""
    assert_greater(x, 0, message)


def assert_negative(x: ArrayLike, message: str | None = None, summarize: int | None = None) -> None:
    """`tf.debugging.assert_negative`."""
    assert_less(x, 0, message)


def assert_non_negative(
    x: ArrayLike, message: str | None = None, summarize: int | None = None
) -> None:
    """`tf.debugging.assert_non_negative`."""
    assert_greater_equal(x, 0, message)


def assert_non_positive(
    x: ArrayLike, message: str | None = None, summarize: int | None = None
) -> None:
    """`tf.debugging.assert_non_positive`."""
    assert_less_equal(x, 0, message)


def assert_all_finite(x: Array, message: str) -> Array:
    """`tf.debugging.assert_all_finite`: returns the array."""
    require(jnp.isfinite(x), message, "tf.debugging.assert_all_finite: a value is not finite.")
    return x


def check_numerics(tensor: Array, message: str) -> Array:
    """`tf.debugging.check_numerics`: returns the array."""
    return assert_all_finite(tensor, message)


def Assert(  # noqa: N802
    condition: ArrayLike, data: Sequence[Any], summarize: int | None = None
) -> None:
    """`tf.Assert`: shows `data` if the condition does not hold."""
    require(condition, None, f"tf.Assert: {list(data)}")


def assert_rank(x: Array, rank: int, message: str | None = None) -> None:
    """`tf.debugging.assert_rank`."""
    _require_rank("assert_rank", x, x.ndim == rank, f"{rank}", message)


def assert_rank_at_least(x: Array, rank: int, message: str | None = None) -> None:
    """`tf.debugging.assert_rank_at_least`."""
    _require_rank("assert_rank_at_least", x, x.ndim >= rank, f"{rank} or more", message)


def assert_rank_in(x: Array, ranks: Sequence[int], message: str | None = None) -> None:
    """`tf.debugging.assert_rank_in`."""
    _require_rank("assert_rank_in", x, x.ndim in ranks, f"one of {list(ranks)}", message)


def assert_scalar(tensor: Array, message: str | None = None) -> Array:
    """`tf.debugging.assert_scalar`: returns the array."""
    _require_rank("assert_scalar", tensor, tensor.ndim == 0, "0", message)
    return tensor


def _require_rank(name: str, x: Array, holds: bool, wanted: str, message: str | None) -> None:
    if not holds:
        text = f"tf.debugging.{name}: an array has shape {x.shape}, expected {wanted} dims."
        raise InvalidValueError(message or text)


def assert_integer(x: Array, message: str | None = None) -> None:
    """`tf.debugging.assert_integer`."""
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(message or f"tf.debugging.assert_integer: {x.dtype} is not an integer.")


def assert_type(tensor: Array, tf_type: DTypeLike, message: str | None = None) -> None:
    """`tf.debugging.assert_type`."""
    if tensor.dtype != jax.dtypes.canonicalize_dtype(tf_type):
        raise TypeError(message or f"tf.debugging.assert_type: {tensor.dtype} is not {tf_type}.")


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
    dtypes = {jnp.asarray(tensor).dtype for tensor in tensors or () if tensor is not None}
    wanted = dtypes | ({np.dtype(dtype)} if dtype is not None else set())
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
        shape = np.shape(x)
        fits = len(shape) == len(names)
        for size, name in zip(shape, names, strict=False):
            if isinstance(name, str) and not name.isdigit():
                fits &= sizes.setdefault(name, size) == size
            else:
                fits &= name is None or int(name) == size
        if not fits:
            raise InvalidValueError(
                message
                or f"tf.debugging.assert_shapes: an array has shape {shape}, expected"
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
