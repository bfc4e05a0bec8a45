"""Depthwise convolutions, in which every channel has a kernel of its own, without convolutions.

XLA:CPU computes them, and their gradients, one element at a time. As a sum of slices times the
values of the kernel they are one loop over vectors. With `x` of 4 x 4 pixels and a kernel of 3 x 3,

    c:f32[1,2,2,8] = conv_general_dilated[feature_group_count=8 ...] x:f32[1,4,4,8] k:f32[3,3,1,8]

becomes

    d:f32[1,2,2,8] = slice[start_indices=(0, 0, 0, 0) limit_indices=(1, 2, 2, 8)] x
    e:f32[1,2,2,8] = mul d k[0,0,0]
    f:f32[1,2,2,8] = slice[start_indices=(0, 0, 1, 0) limit_indices=(1, 2, 3, 8)] x
    g:f32[1,2,2,8] = mul f k[0,1,0]
    h:f32[1,2,2,8] = add e g
    ...

The gradient of `x` is a convolution of the same kind. That of the kernel is, for each of its
positions, the sum of a slice of `x` times the errors. XLA:CPU is slow at sums over all dimensions
but the last: here a `scan` adds a few rows in each turn, and the columns are added at the end.
"""

import functools
import math
import operator
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from distributary.jaxprs import Equation, Version, aval_of

_MAX_WINDOW = 49
"""Positions in a kernel; each costs a slice and an addition."""

_MAX_ADDITIONS = 128
"""Additions in a turn of the loop for a kernel's gradient; more take longer to compile."""

_MIN_CHANNELS = 48
_MIN_CHANNELS_OF_LARGE = 128
_MIN_PRODUCTS = 2 * 10**8
"""The least channels and products of a kernel's gradient that is rewritten: XLA:CPU multiplies each
channel of the images with each of the errors. With fewer, its own way is as fast, or steps gain
less than the program takes to compile."""

_LARGE_WINDOW = 25
"""Positions in a kernel; with more, a turn of the loop has too few rows."""


def depthwise_convolution(eqn: Equation) -> Version | None:
    """Returns a faster function of a convolution's operands; None if there is none.

    There is one for float32, with channels last and as many filters as channels.

    Args:
        eqn: A convolution.
    """
    images, other, result = map(aval_of, (*eqn.invars, *eqn.outvars))
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    num_channels = images.shape[-1]
    if num_channels == 1 or not is_float32(eqn):
        return None
    rest = tuple(range(1, images.ndim - 1))
    if params["feature_group_count"] == num_channels == result.shape[-1]:
        channels_last = (0, images.ndim - 1, *rest)
        window = math.prod([other.shape[k] for k in numbers.rhs_spec[2:]])
        if numbers.lhs_spec == numbers.out_spec == channels_last and window <= _MAX_WINDOW:
            return _convolution(eqn)
    elif params["batch_group_count"] == num_channels == other.shape[-1]:
        contracts_images = (images.ndim - 1, 0, *rest)
        window = math.prod([result.shape[k] for k in numbers.out_spec[2:]])
        if (
            numbers.lhs_spec == numbers.rhs_spec == contracts_images
            and images.ndim <= 4
            and set(params["lhs_dilation"]) == {1}
            and num_channels
            >= (_MIN_CHANNELS if window <= _LARGE_WINDOW else _MIN_CHANNELS_OF_LARGE)
            and window <= _MAX_WINDOW
            and other.size * window * num_channels >= _MIN_PRODUCTS
        ):
            return _kernel_gradient(eqn)
    return None


def is_float32(eqn: Equation) -> bool:
    """Returns whether all arrays of an equation are of float32, and none is empty."""
    avals = map(aval_of, (*eqn.invars, *eqn.outvars))
    return all(aval.dtype == np.float32 and aval.size for aval in avals)


def _convolution(eqn: Equation) -> Version:
    params, (result,) = eqn.params, [aval_of(v) for v in eqn.outvars]
    of_kernel = params["dimension_numbers"].rhs_spec

    def convolution(x: Array, kernel: Array) -> Array:
        # Without barriers, XLA would compute `x`, and the result, once for every use.
        x = padded(lax.optimization_barrier(x), eqn)
        kernel = lax.transpose(kernel, (*of_kernel[2:], of_kernel[1], of_kernel[0]))
        window = kernel.shape[:-2]
        shape, strides = (*result.shape[:-1], x.shape[-1]), (1, *params["window_strides"], 1)
        offsets = [(k, np.multiply(k, params["rhs_dilation"])) for k in np.ndindex(*window)]
        terms = [
            slice_of_windows(x, (0, *offset, 0), shape, strides) * kernel[k].reshape(-1)
            for k, offset in offsets
        ]
        return lax.optimization_barrier(functools.reduce(operator.add, terms))

    return convolution


def _kernel_gradient(eqn: Equation) -> Version:
    params = eqn.params
    errors, result = aval_of(eqn.invars[1]), aval_of(eqn.outvars[0])
    out_spec = params["dimension_numbers"].out_spec
    window = tuple([result.shape[k] for k in out_spec[2:]])
    steps, strides = params["window_strides"], params["rhs_dilation"]
    if errors.ndim == 3:  # as images of one row
        window, steps, strides = (1, *window), (1, *steps), (1, *strides)
        errors = errors.update(shape=(errors.shape[0], 1, *errors.shape[1:]))
    num_images, num_rows, *rest = errors.shape
    most = max(1, _MAX_ADDITIONS // math.prod(window))
    num_blocks = -(-num_rows // most)
    rows = -(-num_rows // num_blocks)
    at_a_time = largest_divisor(num_images, most // rows) if num_blocks == 1 else 1
    num_read = (rows - 1) * strides[0] + (window[0] - 1) * steps[0] + 1

    def gradient(x: Array, y: Array) -> Array:
        x = padded(lax.optimization_barrier(x), eqn)
        x, y = x.reshape(x.shape[0], -1, *x.shape[-2:]), y.reshape(errors.shape)
        missing = num_blocks * rows - num_rows
        y = jnp.pad(y, ((0, 0), (0, missing), (0, 0), (0, 0)))
        x = jnp.pad(x, ((0, 0), (0, missing * strides[0]), (0, 0), (0, 0)))
        y = y.reshape(num_images // at_a_time, at_a_time, num_blocks, rows, *rest)

        def add(total: Array, place: Array) -> tuple[Array, None]:
            chunk, block = place // num_blocks, place % num_blocks
            own_x = lax.dynamic_slice(
                x,
                (chunk * at_a_time, block * rows * strides[0], 0, 0),
                (at_a_time, num_read, *x.shape[2:]),
            )
            own_y = lax.dynamic_slice(y, (chunk, 0, block, 0, 0, 0), (1, at_a_time, 1, rows, *rest))
            own_y = own_y.reshape(at_a_time, rows, *rest)
            sums = []
            for k in np.ndindex(*window):
                start, column = np.multiply(k, steps)
                end = column + (rest[0] - 1) * strides[1] + 1
                terms = [
                    own_x[n, start + h * strides[0], column : end : strides[1]] * own_y[n, h]
                    for n in range(at_a_time)
                    for h in range(rows)
                ]
                sums.append(functools.reduce(operator.add, terms))
            return total + jnp.stack(sums), None

        places = jnp.arange(num_images // at_a_time * num_blocks)
        total, _ = lax.scan(add, jnp.zeros((math.prod(window), *rest), np.float32), places)
        kernel = total.sum(1).reshape(*[result.shape[k] for k in out_spec[2:]], 1, -1)
        return lax.transpose(kernel, np.argsort((*out_spec[2:], *out_spec[:2])))

    return gradient


def largest_divisor(number: int, most: int) -> int:
    """Returns the largest divisor of a number that is at most `most`, or 1."""
    return next(n for n in range(max(1, min(number, most)), 0, -1) if number % n == 0)


def padded(x: Array, eqn: Equation) -> Array:
    """Returns the images of a convolution with its padding and dilation."""
    params = eqn.params
    config = [
        (low, high, dilation - 1)
        for (low, high), dilation in zip(params["padding"], params["lhs_dilation"], strict=True)
    ]
    return lax.pad(x, np.float32(0), [(0, 0, 0), *config, (0, 0, 0)])


def slice_of_windows(
    x: Array, offset: Sequence[int], shape: Sequence[int], strides: Sequence[int]
) -> Array:
    """Returns the element at `offset` of `shape` windows, which begin `strides` apart."""
    ends = [k + (n - 1) * stride + 1 for k, n, stride in zip(offset, shape, strides, strict=True)]
    return lax.slice(x, offset, ends, strides)
