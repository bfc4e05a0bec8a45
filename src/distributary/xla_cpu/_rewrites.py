"""Operations that XLA:CPU is slow at, faster ways to write them, and the pass that does.

Results are the same but for rounding.

- The gradient of a kernel `[features, units]` that was applied to `[batch, length, features]`: a
  product that contracts batch and length, whose result is transposed. XLA makes one product of the
  two, with both operands transposed, for which XLA:CPU has no fast kernel. It has one for rows
  times columns as they lie. To use it, the rule transposes only one of the operands, the smaller
  one. Barriers keep XLA from undoing that:

      b:f32[5,2] = dot_general[dimension_numbers=(([0, 1], [0, 1]), ([], []))] g a
      c:f32[2,5] = transpose[permutation=(1, 0)] b

  becomes, as `a` is smaller than `g`,

      d:f32[2,4,3] = transpose[permutation=(2, 0, 1)] a
      e:f32[2,4,3] = optimization_barrier d
      f:f32[2,5] = dot_general[dimension_numbers=(([1, 2], [0, 1]), ([], []))] e g
      b:f32[5,2] = transpose[permutation=(1, 0)] f
      c:f32[2,5] = transpose[permutation=(1, 0)] b

  and XLA removes the last two. If the first operand is the smaller one, a barrier after the product
  is enough.
- The gradient of a kernel of a convolution over at least two dimensions: a convolution whose window
  is nearly as large as the image. XLA:CPU is fast at two dimensions with padding and at small ones,
  and slow at the others. The rule writes these as products of patches, of some images at a time.
- Depthwise convolutions and their gradients, see `_depthwise`.
- A convolution without padding, as of most layers. XLA:CPU takes up to ten times as long for it as
  for the same one with padding: the rule adds a row of zeros to the images, and drops the row of
  results that it makes.
- The gradient of max pooling: XLA finds the indices of the largest elements with arrays of indices
  of the size of the input, one for each dimension, and adds with a scatter. The rule compares
  slices instead.
- Fourier transforms: XLA:CPU computes them only in row-major order, and fails (RET_CHECK in
  fft_thunk.cc, jaxlib 0.10 to 0.12) if a transposed array comes from rows divided over devices. The
  rule asks for that order. It goes when XLA asks for it itself.
"""

import functools
import math
import os
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from distributary.devices import Nest
from distributary.jaxprs import (
    Equation,
    Rule,
    Version,
    aval_of,
    rewritten,
    with_pass,
)
from distributary.xla_cpu._depthwise import (
    depthwise_convolution,
    is_float32,
    largest_divisor,
    padded,
    slice_of_windows,
)

_MAX_PATCHES_BYTES = 2**20
"""Bytes of patches for a kernel's gradient at a time: more do not stay in the cache of a core."""

_MAX_KERNEL = 49
"""Positions in a kernel; with more, XLA's own convolution is as fast."""

_MIN_FILTERS = 8
"""Number of filters; with fewer, products of patches are slow."""

_MIN_CHANNELS = 32
_MIN_PRODUCTS = 5 * 10**6
_MIN_ROWS = 8
"""The least sizes of a convolution without padding that is rewritten; below, XLA is as fast."""

_MAX_WINDOW = 32
"""Elements in a window of max pooling; each costs a slice and an addition."""

_MAX_PADDED_OVERLAP = 4
"""Windows that share an element of a padded input; with more, XLA's own way is faster."""


def _working_version(eqn: Equation, only_transposed: bool) -> Version | None:
    """Returns a function that does what XLA:CPU may fail to do; None for other equations."""
    if eqn.primitive is not lax.fft_p:
        return None
    return lambda x: _row_major(lax.fft_p.bind(_row_major(x), **eqn.params))


def _row_major(array: Array) -> Array:
    return with_layout_constraint(array, Layout(tuple(range(array.ndim))))


def is_explicit(sharding: NamedSharding | None) -> bool:
    """Returns whether the user has chosen a sharding for a result."""
    return sharding is not None and AxisType.Explicit in sharding.mesh.axis_types


def _kernel_gradient_of_rows(eqn: Equation) -> Version | None:
    params = eqn.params
    (of_first, of_second), (batch, _) = params["dimension_numbers"]
    if len(of_first) < 2 or batch or is_explicit(params["out_sharding"]):
        return None
    first, second = map(aval_of, eqn.invars)
    if second.size > first.size:
        return lambda x, y: lax.optimization_barrier(lax.dot_general_p.bind(x, y, **params))
    rest = [k for k in range(second.ndim) if k not in of_second]
    precision = params["precision"]

    def product(x: Array, y: Array) -> Array:
        rows = lax.optimization_barrier(lax.transpose(y, (*rest, *of_second)))
        gradient = lax.dot_general(
            rows,
            x,
            ((tuple(range(len(rest), y.ndim)), of_first), ((), ())),
            precision=precision[::-1] if isinstance(precision, tuple) else precision,
            preferred_element_type=params["preferred_element_type"],
        )
        return lax.transpose(gradient, (*range(len(rest), gradient.ndim), *range(len(rest))))

    return product


def _faster_convolution(eqn: Equation) -> Version | None:
    if is_explicit(eqn.params["out_sharding"]):
        return None
    return (
        _kernel_gradient_of_images(eqn)
        or depthwise_convolution(eqn)
        or _convolution_without_padding(eqn)
    )


def _kernel_gradient_of_images(eqn: Equation) -> Version | None:
    params = eqn.params
    images, errors, result = map(aval_of, (*eqn.invars, *eqn.outvars))
    numbers = params["dimension_numbers"]
    channels_last = (images.ndim - 1, 0, *range(1, images.ndim - 1))
    is_gradient = (
        images.ndim >= 4
        and numbers.lhs_spec == channels_last  # contracts the images of the batch
        and numbers.rhs_spec == channels_last
        and set(params["lhs_dilation"]) == {1}
        and params["feature_group_count"] == params["batch_group_count"] == 1
    )
    window = tuple([result.shape[k] for k in numbers.out_spec[2:]])
    num_images, *size, num_filters = errors.shape
    num_channels = images.shape[-1]
    if not is_gradient or not is_float32(eqn):
        return None
    is_one_product = math.prod(window) == 1
    if not is_one_product and not _is_slow_convolution(eqn):
        return None
    num_columns = math.prod(window) * num_channels
    patches_bytes = 4 * math.prod(size) * num_columns
    most = num_images if is_one_product else _MAX_PATCHES_BYTES // patches_bytes
    at_a_time = largest_divisor(num_images, most)
    shape = (at_a_time, *size, num_channels)
    strides = (1, *params["rhs_dilation"], 1)

    def patches(x: Array) -> Array:
        offsets = [np.multiply(k, params["window_strides"]) for k in np.ndindex(*window)]
        slices = [slice_of_windows(x, (0, *k, 0), shape, strides) for k in offsets]
        return jnp.concatenate(slices, -1).reshape(-1, num_columns)

    def add(total: Array, chunk: tuple[Array, Array]) -> tuple[Array, None]:
        x, y = chunk
        product = lax.dot_general(
            patches(x), y, (((0,), (0,)), ((), ())), precision=params["precision"]
        )
        return total + product, None

    def gradient(x: Array, y: Array) -> Array:
        x = padded(x, eqn)
        chunks = (
            x.reshape(-1, at_a_time, *x.shape[1:]),
            y.reshape(num_images // at_a_time, -1, num_filters),
        )
        total, _ = lax.scan(add, jnp.zeros((num_columns, num_filters), np.float32), chunks)
        kernel = total.reshape(*window, num_channels, num_filters)
        return lax.transpose(kernel, np.argsort((*numbers.out_spec[2:], *numbers.out_spec[:2])))

    return gradient


def _is_slow_convolution(eqn: Equation) -> bool:
    """Returns whether products of patches compute the gradient of a kernel faster than XLA:CPU.

    The limits come from random shapes, see `docs/design/tracing.md`. XLA:CPU has a fast kernel for
    images of two dimensions only.
    """
    images, errors, result = map(aval_of, (*eqn.invars, *eqn.outvars))
    window = math.prod([result.shape[k] for k in eqn.params["dimension_numbers"].out_spec[2:]])
    num_images, *size, num_filters = errors.shape
    num_bytes = 4 * (images.size + errors.size)
    if not window <= min(_MAX_KERNEL, math.prod(size) - 1) or num_filters < _MIN_FILTERS:
        return False
    if images.ndim > 4:
        return True
    if any(max(low, high) > 0 for low, high in eqn.params["padding"]):
        return num_bytes >= 2**23 and num_filters >= 8 * images.shape[-1]
    return num_bytes >= 2**22 and max(num_images, num_filters) >= 32


def _convolution_without_padding(eqn: Equation) -> Version | None:
    images, kernel, result = map(aval_of, (*eqn.invars, *eqn.outvars))
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    window = math.prod([kernel.shape[k] for k in numbers.rhs_spec[2:]])
    if (
        not is_float32(eqn)
        or images.ndim != 4
        or not numbers.lhs_spec == numbers.out_spec == (0, 3, 1, 2)
        or any(map(any, params["padding"]))
        or {*params["lhs_dilation"], *params["rhs_dilation"]} != {1}
        or params["feature_group_count"] != 1
        or params["batch_group_count"] != 1
        or window == 1
        or result.shape[1] < _MIN_ROWS
        or images.shape[-1] < _MIN_CHANNELS
        or result.size * window * images.shape[-1] < _MIN_PRODUCTS
    ):
        return None
    padding = ((0, params["window_strides"][0]), (0, 0))

    def convolution(x: Array, kernel: Array) -> Array:
        output: Array = eqn.primitive.bind(x, kernel, **{**params, "padding": padding})
        return lax.slice_in_dim(output, 0, result.shape[1], axis=1)

    return convolution


def _gradient_of_max_pooling(eqn: Equation) -> Version | None:
    params = eqn.params
    errors, x = map(aval_of, eqn.invars)
    padding, strides = params["padding"], params["window_strides"]
    is_padded = any(map(any, padding))
    size = math.prod(params["window_dimensions"])
    if (
        size > _MAX_WINDOW
        or (is_padded and size > _MAX_PADDED_OVERLAP * math.prod(strides))
        or not jnp.issubdtype(x.dtype, jnp.floating)
        or 0 in (*x.shape, *errors.shape)
    ):
        return None
    offsets = list(np.ndindex(*params["window_dimensions"]))

    def gradient(y: Array, x: Array) -> Array:
        zero = np.zeros((), x.dtype)
        whole = lax.pad(x, np.array(np.nan, x.dtype), [(*p, 0) for p in padding])
        # Selects as XLA does: the first element, until `select_prim` does not hold for it and a
        # later one. It never holds for padding that comes first, and later padding is not selected.
        best = slice_of_windows(whole, offsets[0], y.shape, strides)
        chosen = jnp.zeros(y.shape, np.int8)
        for k, offset in enumerate(offsets[1:], 1):
            new = slice_of_windows(whole, offset, y.shape, strides)
            keep = params["select_prim"].bind(best, new)
            if is_padded:
                keep |= jnp.isnan(new)
            best = jnp.where(keep, best, new)
            chosen = jnp.where(keep, chosen, np.int8(k))
        parts = []
        for k, offset in enumerate(offsets):
            part = jnp.where(chosen == np.int8(k), y, zero)
            ends = [
                length - start - ((n - 1) * stride + 1)
                for length, start, n, stride in zip(
                    whole.shape, offset, y.shape, strides, strict=True
                )
            ]
            config = [(*lows, s - 1) for *lows, s in zip(offset, ends, strides, strict=True)]
            parts.append(lax.pad(part, zero, config))
        total = functools.reduce(lax.add, parts)
        return lax.pad(total, zero, [(-low, -high, 0) for low, high in padding])

    return gradient


# The last pass over programs for CPUs. `DISTRIBUTARY_CPU_REWRITES=0` switches it off.

_ON_ONE_CPU: Mapping[Primitive, Rule] = {
    lax.dot_general_p: lambda eqn, only_transposed: (
        _kernel_gradient_of_rows(eqn) if only_transposed else None
    ),
    lax.conv_general_dilated_p: lambda eqn, _: _faster_convolution(eqn),
    lax.select_and_scatter_add_p: lambda eqn, _: _gradient_of_max_pooling(eqn),
    lax.fft_p: _working_version,
}


def with_cpu_rewrites(
    function: Callable[..., Nest], mesh: Mesh | AbstractMesh | None
) -> Callable[..., Nest]:
    """Returns `function` in a form that XLA:CPU runs fast, if it is for CPUs.

    Args:
        function: From trees of arrays to trees of arrays; about to be compiled.
        mesh: The devices it is compiled for; None for JAX's default device.
    """
    if not is_for_cpus(mesh) or not _are_on():
        return function
    return with_pass(
        function, lambda closed, args: jaxpr_as_fun(rewritten(closed, _on_one_cpu))(*args)
    )


def rewritten_for_cpus(closed: ClosedJaxpr, *, is_divided: bool = False) -> ClosedJaxpr:
    """Returns a closed jaxpr, and the jaxprs inside it, in a form that XLA:CPU runs fast.

    Args:
        closed: The jaxpr.
        is_divided: Whether XLA divides it over several devices. It then gets only what XLA:CPU
            fails without: the fast forms cannot be divided.
    """
    if not _are_on():
        return closed
    return rewritten(closed, _working_version if is_divided else _on_one_cpu)


def _on_one_cpu(eqn: Equation, only_transposed: bool) -> Version | None:
    rule = _ON_ONE_CPU.get(eqn.primitive)
    return None if rule is None else rule(eqn, only_transposed)


def is_for_cpus(mesh: Mesh | AbstractMesh | None) -> bool:
    """Returns whether programs for a mesh, or for JAX's default device, run on CPUs here."""
    if mesh is None:
        return jax.default_backend() == "cpu"
    return isinstance(mesh, Mesh) and bool(mesh.devices.flat[0].platform == "cpu")


def _are_on() -> bool:
    """Returns whether programs that are made now are rewritten."""
    return os.environ.get("DISTRIBUTARY_CPU_REWRITES") != "0"
