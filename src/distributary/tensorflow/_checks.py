"""`tf.debugging` and its like: checks of shapes, and of values where they are known.

Inside a step, values are known when the program runs. The call of the step then raises the error.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from distributary.errors import InvalidValueError, shown
from distributary.tensorflow.autograph import check_when_run, is_traced


def _require(condition: ArrayLike, message: str | None, text: str) -> None:
    holds, error = jnp.all(jnp.asarray(condition)), InvalidValueError(message or text)
    if is_traced(holds):
        check_when_run(holds, error)
    elif not holds:
        raise error


def _comparison(name: str, compare: Callable[[Any, Any], Any]) -> Callable[..., None]:
    def assertion(
        x: ArrayLike, y: ArrayLike, message: str | None = None, summarize: int | None = None
    ) -> None:
        text = f"tf.debugging.{name}: does not hold for {shown(x)} and {shown(y)}."
        _require(compare(x, y), message, text)

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
    _require(near, message, f"tf.debugging.assert_near: {shown(x)} is not near {shown(y)}.")


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
    _require(jnp.isfinite(x), message, "tf.debugging.assert_all_finite: a value is not finite.")
    return x


def check_numerics(tensor: Array, message: str) -> Array:
    """`tf.debugging.check_numerics`: returns the array."""
    return assert_all_finite(tensor, message)


def Assert(  # noqa: N802
    condition: ArrayLike, data: Sequence[Any], summarize: int | None = None
) -> None:
    """`tf.Assert`: shows `data` if the condition does not hold."""
    _require(condition, None, f"tf.Assert: {list(data)}")


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
