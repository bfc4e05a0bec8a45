"""The operations that combine the values of replicas, and their arithmetic."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from distributary.errors import InvalidTypeError, InvalidValueError, described, shown
from distributary.options import ReduceOp


def as_reduce_op(value: object, what: str) -> ReduceOp:
    """Returns a `ReduceOp`, given itself or its name in any case."""
    if isinstance(value, ReduceOp):
        return value
    if isinstance(value, str):
        if value.upper() in ReduceOp.__members__:
            return ReduceOp[value.upper()]
        raise InvalidValueError(
            f"{what}: reduce_op is {shown(value)}, which is not a valid ReduceOp; expected"
            " ReduceOp.SUM or ReduceOp.MEAN, or their names."
        )
    raise InvalidTypeError(
        f"{what}: reduce_op is {shown(value)}, expected ReduceOp.SUM or ReduceOp.MEAN, or their"
        " names. There are only these two; the operation comes first, then the value."
    )


def check_reducible(value: ArrayLike | None, what: str) -> jax.Array:
    """Returns the value as an array that can be summed.

    Raises:
        InvalidTypeError: for None, strings, objects, random keys and booleans.
    """
    dtype = getattr(value, "dtype", None)
    is_key = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if value is None or isinstance(value, (str, bytes)) or is_key or dtype == np.dtype(object):
        raise InvalidTypeError(f"{what}: got {shown(value)}, expected an array of numbers.")
    try:
        array = jnp.asarray(value)
    except TypeError as error:
        raise InvalidTypeError(
            f"{what}: got {described(value)}; expected an array of numbers."
        ) from error
    if array.dtype == jnp.bool_:
        raise InvalidTypeError(
            f"{what}: got a boolean array of shape {array.shape}, and booleans cannot be added."
            " Convert it, value.astype(jnp.int32), to count the True ones."
        )
    return array


def reduce_arrays(
    op: ReduceOp,
    arrays: Sequence[jax.Array],
    num_replicas: int,
    add: Callable[[list[jax.Array]], list[jax.Array]],
) -> list[jax.Array]:
    """Sums or averages every array over the replicas.

    Args:
        op: The operation.
        arrays: This replica's arrays.
        num_replicas: Number of replicas.
        add: The collective: sums each array over the replicas.

    Returns:
        The results; their dtype is that of the arrays, or float32 for the mean of integers.
    """
    prepared = [_prepare(op, array, num_replicas) for array in arrays]
    sums = iter(add([part for parts, _ in prepared for part in parts]))
    return [done(*itertools.islice(sums, len(parts))) for parts, done in prepared]


# The arrays to sum, and a function from the sums to the result.
_Prepared: TypeAlias = tuple[list[jax.Array], Callable[..., jax.Array]]


def _prepare(op: ReduceOp, array: jax.Array, num_replicas: int) -> _Prepared:
    if jnp.iscomplexobj(array):
        # In parts, because XLA aborts on an all-reduce of complex constants (JAX 0.10.2), and
        # gradients of complex sums are such constants.
        real, done = _prepare(op, array.real, num_replicas)
        imag, _ = _prepare(op, array.imag, num_replicas)
        return [*real, *imag], lambda x, y: lax.complex(done(x), done(y))
    if op is ReduceOp.MEAN:
        return _prepare_mean(array, num_replicas)
    return [array], lambda total: total


def _prepare_mean(array: jax.Array, num_replicas: int) -> _Prepared:
    dtype = array.dtype
    if not jnp.issubdtype(dtype, jnp.inexact):
        # Quotients and remainders are exact, and their sums do not overflow: quotients are rounded
        # towards zero, and the sum of the remainders, too large for 8 bits, is int32.
        count = jnp.asarray(num_replicas, dtype)
        parts = [lax.div(array, count), lax.rem(array, count).astype(jnp.int32)]

        def mean(quotient: jax.Array, remainder: jax.Array) -> jax.Array:
            return quotient.astype(jnp.float32) + remainder.astype(jnp.float32) / num_replicas

        return parts, mean
    if dtype in (jnp.float16, jnp.bfloat16):
        wide, done = _prepare_mean(array.astype(jnp.float32), num_replicas)
        return wide, lambda total: done(total).astype(dtype)
    if num_replicas == 1:
        return [array], lambda total: total
    # Scaled by a power of two, which is exact, so that the sum cannot exceed the largest number.
    scale = 2.0 ** -math.ceil(math.log2(num_replicas))
    rest = num_replicas * scale
    scaled = array * jnp.asarray(scale, dtype)
    return [scaled], lambda total: total if rest == 1.0 else total / jnp.asarray(rest, dtype)
