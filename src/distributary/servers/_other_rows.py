"""Slices of rows of a table, and what is known of the rows that a step does not name.

With a table `t` and its gradient `g`,

    a:f32[4,2] = mul 0.1 g
    b:f32[4,2] = sub t a

`numbers_of_other_rows` finds that in rows where `g` is zero, `b` is `t`.
"""

import math
from collections.abc import Collection, Sequence
from typing import Final

from jax.extend.core import Jaxpr, Literal, Var

from distributary.programs import known_result, number_of
from distributary.tracing import Atom, Equation, Numbering, jaxpr_of, shape_of

_SAME_VALUE = ("broadcast_in_dim", "convert_element_type", "copy", "reshape")
_ZERO: Final = "zero"


def rows_between(eqn: Equation) -> tuple[int, int] | None:
    """Returns the start and end of the rows that a slice takes; None for other equations."""
    params = eqn.params
    if (
        eqn.primitive.name != "slice"
        or set(params["strides"] or (1,)) != {1}
        or shape_of(eqn.outvars[0])[1:] != shape_of(eqn.invars[0])[1:]
    ):
        return None
    return params["start_indices"][0], params["limit_indices"][0]


def numbers_of_other_rows(
    jaxpr: Jaxpr, values: Sequence[Atom], zeros: Collection[Var]
) -> list[Var | int | str]:
    """Returns what values are in the rows where some variables are known to be zero.

    Args:
        jaxpr: A jaxpr.
        values: The variables of the jaxpr to look at.
        zeros: Variables that are zero in these rows.

    Returns:
        For every value `"zero"`, the input that it equals, or a number that is the same for equal
        values. Data is taken to be finite: zero times anything is zero.
    """
    numbers_of_constants: dict[Var, float] = {}  # variables whose elements are all one number

    def real_number(atom: Atom) -> float:
        """Returns the number that all elements of an operand are; NaN if it is not known."""
        if isinstance(atom, Literal):
            return number_of(atom)
        return numbers_of_constants.get(atom, math.nan)

    def simplified(eqn: Equation, operands: Sequence[int]) -> int | None:
        """Returns the number of the result if it is zero or one of the operands, else None."""
        (v,) = eqn.outvars
        constants = [real_number(atom) for atom in eqn.invars]
        if eqn.primitive.name in _SAME_VALUE and not math.isnan(constants[0]):
            numbers_of_constants[v] = constants[0]
        are_zero = [
            number == zero or constant == 0
            for number, constant in zip(operands, constants, strict=True)
        ]
        known = _ZERO if v in zeros else known_result(eqn, operands, constants, are_zero)
        return zero if known == "zero" else None if known is None else operands[known]

    numbering = Numbering(simplified)
    zero = numbering.input(_ZERO)
    invars = [*jaxpr.constvars, *jaxpr.invars]
    inputs: list[Var | str] = [_ZERO if v in zeros else v for v in invars]
    numbers = numbering.outputs(jaxpr_of(invars, values, jaxpr.eqns), inputs)
    of_inputs = {zero: _ZERO, **{numbering.input(v): v for v in inputs}}
    return [of_inputs.get(number, number) for number in numbers]
