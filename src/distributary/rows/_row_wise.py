"""Finds operations that compute every row of their result from the same row of their operands.

With a table `t` and its gradient `g`, the update is row by row, and the sum is not:

    a:f32[4,2] = mul 0.1 g                     row_operands: [g]
    b:f32[4,2] = sub t a                       row_operands: [t, a]
    c:f32[] = reduce_sum[axes=(0, 1)] g        row_operands: None

`numbers_of_other_rows` finds that in rows where `g` is zero, `b` is `t`.
"""

import math
from collections.abc import Collection, Sequence
from typing import Any, final

import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np

from distributary.tracing import Array, Equation, Numbering, jaxpr_of

__all__ = [
    "ELEMENTWISE",
    "bind_rows",
    "numbers_of_other_rows",
    "row_operands",
    "rows_between",
    "with_rows",
]

ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp
    convert_element_type copy cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge
    gt imag integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter
    not optimization_barrier or pow psum push real reduce_precision rem round rsqrt select_n sign
    sin sinh sqrt square start_of_sum stop_gradient sub tan tanh xor
    """.split()  # noqa: SIM905
)
_REDUCTIONS = frozenset(
    """
    argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor
    """.split()  # noqa: SIM905
)
# Operations whose result is zero where their first operand is.
_ZERO_OF_ZERO = frozenset(
    """
    abs asin asinh atan atanh broadcast_in_dim cbrt ceil convert_element_type div erf expm1
    floor imag log1p neg psum real reduce_max reduce_min reduce_precision reduce_sum reshape round
    sign sin sinh slice split sqrt square squeeze tan tanh transpose
    """.split()  # noqa: SIM905
)
_SAME_VALUE = ("broadcast_in_dim", "convert_element_type", "copy", "reshape")
_ZERO: Any = "zero"


def row_operands(eqn: Equation) -> list[Any] | None:
    """Returns the operands whose row i makes row i of the results; the others belong to every row.

    Returns:
        The variables, each with as many rows as every result; None if the equation does not work
        row by row.
    """
    name, params = eqn.primitive.name, eqn.params
    arrays = [
        v
        for v in eqn.invars
        if not isinstance(v, jex_core.Literal) and hasattr(v.aval, "shape") and v.aval.shape
    ]
    shape = tuple(getattr(eqn.outvars[0].aval, "shape", ())) if eqn.outvars else ()
    if not shape or (not arrays and name != "broadcast_in_dim"):
        return None
    num_rows = shape[0]
    if name == "broadcast_in_dim":
        if not arrays or 0 not in params["broadcast_dimensions"]:
            return [] if len(eqn.invars) == 1 else None
        first = params["broadcast_dimensions"][0] == 0
        rows_stay = first and arrays[0].aval.shape[0] == num_rows
    elif name in ELEMENTWISE:
        rows_stay = True
    elif name in _REDUCTIONS:
        rows_stay = 0 not in params["axes"]
    elif name.startswith("cum"):
        rows_stay = params.get("axis", 0) != 0
    elif name == "reshape":
        rows_stay = params["dimensions"] is None and len(arrays) == len(eqn.invars)
    elif name == "squeeze":
        rows_stay = 0 not in params["dimensions"]
    elif name == "transpose":
        rows_stay = params["permutation"][0] == 0
    elif name == "concatenate":
        rows_stay = params["dimension"] != 0 and len(arrays) == len(eqn.invars)
    elif name == "split":
        rows_stay = params["axis"] != 0
    elif name == "slice":
        strides = params["strides"]
        rows_stay = strides is None or strides[0] == 1
    else:
        return None
    if rows_stay and all(v.aval.shape[0] == num_rows for v in arrays):
        return arrays
    return None


def rows_between(eqn: Equation) -> tuple[int, int] | None:
    """Returns the start and end of the rows that a slice takes; None for other equations."""
    params = eqn.params
    if (
        eqn.primitive.name != "slice"
        or set(params["strides"] or (1,)) != {1}
        or eqn.outvars[0].aval.shape[1:] != eqn.invars[0].aval.shape[1:]
    ):
        return None
    return params["start_indices"][0], params["limit_indices"][0]


def with_rows(eqn: Equation, num_rows: Any) -> dict[str, Any]:
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


def bind_rows(eqn: Equation, operands: Sequence[Any], num_rows: Any) -> list[Array]:
    """Returns the results of a row-by-row equation for operands with `num_rows` rows."""
    outs = eqn.primitive.bind(*operands, **with_rows(eqn, num_rows))
    return list(outs) if eqn.primitive.multiple_results else [outs]


def numbers_of_other_rows(jaxpr: Any, values: Sequence[Any], zeros: Collection[Any]) -> list[Any]:
    """Returns what values are in the rows where some variables are known to be zero.

    Args:
        jaxpr: A jaxpr.
        values: The variables of the jaxpr to look at.
        zeros: Variables that are zero in these rows.

    Returns:
        For every value `"zero"`, the input that it equals, or a number that is the same for equal
        values. Data is taken to be finite: zero times anything is zero.
    """
    rules = _Rules(zeros)
    numbering = Numbering(rules.number_of)
    zero = rules.zero = numbering.input(_ZERO)
    invars = [*jaxpr.constvars, *jaxpr.invars]
    inputs = [_ZERO if v in zeros else v for v in invars]
    numbers = numbering.outputs(jaxpr_of(invars, values, jaxpr.eqns), inputs)
    of_inputs = {zero: _ZERO, **{numbering.input(v): v for v in inputs}}
    return [of_inputs.get(number, number) for number in numbers]


@final
class _Rules:
    """Simplifications of results, such as `x + 0` to `x`.

    Args:
        zeros: Variables that are zero.

    Attributes:
        zero: The number of zero.
    """

    def __init__(self, zeros: Collection[Any]) -> None:
        self.zero = -1
        self._zeros = zeros
        self._values: dict[Any, float] = {}  # variables whose elements are all one number

    def number_of(self, eqn: Equation, operands: Sequence[int]) -> int | None:
        """Returns the number of the result if it is zero or one of the operands, else None."""
        name, (v,), zero = eqn.primitive.name, eqn.outvars, self.zero
        values = [self._value(atom) for atom in eqn.invars]
        if name in _SAME_VALUE and not math.isnan(values[0]):
            self._values[v] = values[0]
        is_zero = [
            number == zero or value == 0 for number, value in zip(operands, values, strict=True)
        ]
        others = [value for value, is_null in zip(values, is_zero, strict=True) if not is_null]
        match name:
            case _ if v in self._zeros or (name in _ZERO_OF_ZERO and is_zero[0]):
                return zero
            case "add" | "add_any" | "sub" if is_zero[1]:
                return operands[0]
            case "add" | "add_any" if is_zero[0]:
                return operands[1]
            case "sub" | "max" | "min" if operands[0] == operands[1]:
                return zero if name == "sub" else operands[0]
            case "mul" if any(is_zero):
                return zero
            case "mul" | "div" if values[1] == 1:
                return operands[0]
            case "mul" if values[0] == 1:
                return operands[1]
            case "integer_pow" if is_zero[0] and eqn.params["y"] > 0:
                return zero
            case "pow" if is_zero[0] and values[1] > 0:
                return zero
            case "max" if any(is_zero) and all(value <= 0 for value in others):
                return zero
            case "min" if any(is_zero) and all(value >= 0 for value in others):
                return zero
            case "clamp" if is_zero[1] and values[0] <= 0 <= values[2]:
                return zero
            case "select_n" if len(set(operands[1:])) == 1:
                return operands[1]
            case "convert_element_type" if eqn.invars[0].aval.dtype == v.aval.dtype:
                return operands[0]
            case "copy" | "push" | "stop_gradient" | "optimization_barrier":
                return operands[0]
            case "concatenate" if all(is_zero):
                return zero
        return None

    def _value(self, atom: Any) -> float:
        """Returns the real number that all elements of a constant are; NaN if it is not known."""
        if not isinstance(atom, jex_core.Literal):
            return self._values.get(atom, math.nan)
        value = np.asarray(atom.val)
        is_real = jnp.issubdtype(value.dtype, jnp.number) and not np.iscomplexobj(value)
        return float(value) if is_real and not value.ndim else math.nan
