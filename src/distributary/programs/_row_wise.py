"""Finds operations that compute every row of their result from the same row of their operands.

With a table `t` and its gradient `g`, the update is row by row, and the sum is not:

    a:f32[4,2] = mul 0.1 g                     row_operands: [g]
    b:f32[4,2] = sub t a                       row_operands: [t, a]
    c:f32[] = reduce_sum[axes=(0, 1)] g        row_operands: None
"""

import math
from collections.abc import Hashable, Sequence
from typing import Any, Literal as OneOf, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Literal, Var

from distributary.jaxprs import Atom, Equation, aval_of, shape_of, variables_of

# Measured, see docs/design/tracing.md.
_MAX_SHARE_OF_ROWS = 1 / 4
_MIN_ELEMENTS = 1 << 15

DimSize: TypeAlias = Any  # an int, or a symbolic dim of `jax.export`

ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp
    convert_element_type copy cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge
    gt imag integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter
    not optimization_barrier or pow psum push real reduce_precision rem round rsqrt select_n sign
    sin sinh sqrt square start_of_sum stop_gradient sub tan tanh xor
    """.split()  # noqa: SIM905
)
REDUCTIONS = frozenset(
    """
    argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor
    """.split()  # noqa: SIM905
)
# The parameter that names the dims along which an operation works; the others stay as they are.
_DIMS: dict[str, str | None] = {
    **dict.fromkeys(ELEMENTWISE, None),
    **dict.fromkeys(REDUCTIONS, "axes"),
    **dict.fromkeys(("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", "split"), "axis"),
    "concatenate": "dimension",
    "squeeze": "dimensions",
}
# Operations whose result is zero where their first operand is.
_ZERO_OF_ZERO = frozenset(
    """
    abs asin asinh atan atanh broadcast_in_dim cbrt ceil convert_element_type div erf expm1
    floor imag log1p neg psum real reduce_max reduce_min reduce_precision reduce_sum reshape round
    sign sin sinh slice split sqrt square squeeze tan tanh transpose
    """.split()  # noqa: SIM905
)


def row_operands(eqn: Equation) -> list[Var] | None:
    """Returns the operands whose row i makes row i of the results; the others belong to every row.

    Returns:
        The variables, each with as many rows as every result; None if the equation does not work
        row by row.
    """
    arrays = [v for v in variables_of(eqn.invars) if shape_of(v)]
    shape = shape_of(eqn.outvars[0]) if eqn.outvars else ()
    if not shape:
        return None
    if eqn.primitive.name == "broadcast_in_dim":
        makes_rows = not arrays or 0 not in eqn.params["broadcast_dimensions"]
        if makes_rows:
            return [] if len(eqn.invars) == 1 else None
    have_rows = bool(arrays) and all(shape_of(v)[0] == shape[0] for v in arrays)
    return arrays if have_rows and _keeps_rows(eqn, len(arrays)) else None


def _keeps_rows(eqn: Equation, num_arrays: int) -> bool:
    """Returns whether row i of the results is made from row i of operands with as many rows."""
    name, params = eqn.primitive.name, eqn.params
    match name:
        case "broadcast_in_dim":
            return bool(params["broadcast_dimensions"][0] == 0)
        case "reshape":
            return params["dimensions"] is None and len(eqn.invars) == num_arrays
        case "transpose":
            return bool(params["permutation"][0] == 0)
        case "slice":
            return params["strides"] is None or params["strides"][0] == 1
        case "concatenate" if len(eqn.invars) != num_arrays:
            return False
    if name not in _DIMS:
        return False
    param = _DIMS[name]
    dims = () if param is None else params[param]
    return 0 not in (dims if isinstance(dims, tuple) else (dims,))


def with_rows(eqn: Equation, num_rows: DimSize) -> dict[str, Any]:
    """Returns the parameters of an equation that works row by row, for another number of rows.

    Args:
        eqn: The equation.
        num_rows: Number of rows, which may be symbolic.
    """
    params = dict(eqn.params)
    name = {"broadcast_in_dim": "shape", "reshape": "new_sizes", "slice": "limit_indices"}.get(
        eqn.primitive.name
    )
    if name is not None:
        params[name] = (num_rows, *params[name][1:])
    return params


def adds_rows(eqn: Equation) -> bool:
    """Returns whether an equation is a scatter that adds whole rows."""
    if eqn.primitive.name != "scatter-add":
        return False
    operand, ids, rows = map(aval_of, eqn.invars)
    dims = eqn.params["dimension_numbers"]
    return (
        dims.scatter_dims_to_operand_dims == dims.inserted_window_dims == (0,)
        and not dims.operand_batching_dims
        and tuple(rows.shape[d] for d in dims.update_window_dims) == operand.shape[1:]
        and rows.ndim == len(dims.update_window_dims) + ids.ndim - 1
    )


def takes_rows(eqn: Equation) -> bool:
    """Returns whether an equation takes whole rows of its first operand, each by its number."""
    if eqn.primitive.name != "gather":
        return False
    dims, shape = eqn.params["dimension_numbers"], shape_of(eqn.invars[0])
    return (
        dims.start_index_map == dims.collapsed_slice_dims == (0,)
        and not dims.operand_batching_dims
        and tuple(eqn.params["slice_sizes"]) == (1, *shape[1:])
    )


def are_few_rows(num_ids: int, shape: Sequence[int]) -> bool:
    """Returns whether it is less work to handle rows of a table by themselves.

    Args:
        num_ids: Number of the rows.
        shape: Shape of the table.
    """
    return (
        0 < num_ids <= shape[0] * _MAX_SHARE_OF_ROWS
        and math.prod(shape) >= _MIN_ELEMENTS
        and shape[0] + num_ids <= np.iinfo(np.int32).max
    )


def bind_rows(eqn: Equation, operands: Sequence[Array], num_rows: DimSize) -> list[Array]:
    """Returns the results of a row-by-row equation for operands with `num_rows` rows."""
    outs = eqn.primitive.bind(*operands, **with_rows(eqn, num_rows))
    return list(outs) if eqn.primitive.multiple_results else [outs]


def number_of(atom: Atom) -> float:
    """Returns the real number that a literal is; NaN for anything else."""
    return real_number(atom.val) if isinstance(atom, Literal) else math.nan


def real_number(constant: object) -> float:
    """Returns the real number that a constant is; NaN for an array of several and other dtypes."""
    value = np.asarray(constant)
    is_real = jnp.issubdtype(value.dtype, jnp.number) and not np.iscomplexobj(value)
    return float(value) if is_real and not value.ndim else math.nan


def known_result(
    eqn: Equation,
    operands: Sequence[Hashable],
    values: Sequence[float],
    zeros: Sequence[bool],
) -> int | OneOf["zero"] | None:
    """Returns what is known of the only result of an equation without computing it.

    Args:
        eqn: The equation.
        operands: A key for every operand, which is equal for equal ones.
        values: The number that all elements of each operand are, or NaN.
        zeros: For every operand, whether it is zero.

    Returns:
        `"zero"`, or the place of the operand that the result is equal to but for its shape, or
        None. Data is taken to be finite: zero times anything is zero.
    """
    if _is_zero(eqn, operands, values, zeros):
        return "zero"
    match eqn.primitive.name:
        case "add" | "add_any" | "sub" if zeros[1]:
            return 0
        case "add" | "add_any" if zeros[0]:
            return 1
        case "max" | "min" if operands[0] == operands[1]:
            return 0
        case "mul" | "div" if values[1] == 1:
            return 0
        case "mul" if values[0] == 1:
            return 1
        case "select_n" if len(set(operands[1:])) == 1:
            return 1
        case "convert_element_type" if aval_of(eqn.invars[0]).dtype == aval_of(*eqn.outvars).dtype:
            return 0
        case "copy" | "push" | "stop_gradient" | "optimization_barrier":
            return 0
    return None


def _is_zero(
    eqn: Equation, operands: Sequence[Hashable], values: Sequence[float], zeros: Sequence[bool]
) -> bool:
    """Returns whether the only result of an equation is known to be zero; see `known_result`."""
    others = [value for value, is_zero in zip(values, zeros, strict=True) if not is_zero]
    match eqn.primitive.name:
        case name if name in _ZERO_OF_ZERO:
            return zeros[0]
        case "sub":
            return operands[0] == operands[1]
        case "mul":
            return any(zeros)
        case "integer_pow":
            return zeros[0] and eqn.params["y"] > 0
        case "pow":
            return zeros[0] and values[1] > 0
        case "max":
            return any(zeros) and all(value <= 0 for value in others)
        case "min":
            return any(zeros) and all(value >= 0 for value in others)
        case "clamp":
            return zeros[1] and values[0] <= 0 <= values[2]
        case "concatenate":
            return all(zeros)
    return False
