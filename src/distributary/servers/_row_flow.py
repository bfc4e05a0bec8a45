"""Finds the values of a program that are rows of one table, and the uses that need the whole table.

With the state `t`, and `ids` and `g` from data:

    a:f32[1000,2] = mul t 2.0                  row by row: of the same table as `t`
    b:f32[3,2] = gather a ids                  a lookup
    c:f32[1000,2] = broadcast_in_dim 0.0       the same in all rows
    d:f32[1000,2] = scatter-add c ids g        rows added to zeros
    e:f32[1000,4] = dot_general a w            refused: "dot_general needs all of it"

Without the last equation a worker needs only the 3 rows that `ids` name.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, final

from jax.extend.core import Jaxpr, Literal, Var

from distributary.jaxprs import (
    Atom,
    Equation,
    aval_of,
    computed_from,
    jaxpr_of,
    shape_of,
    variables_of,
)
from distributary.programs import adds_rows, known_result, number_of, row_operands, takes_rows
from distributary.tracing import Numbering

# Slices of rows of a table, and what is known of the rows that a step does not name.
#
# With a table `t` and its gradient `g`,
#
#     a:f32[4,2] = mul 0.1 g
#     b:f32[4,2] = sub t a
#
# `numbers_of_other_rows` finds that in rows where `g` is zero, `b` is `t`.

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


# The flow of rows

_DATA = "it is combined with data"


@final
@dataclass(frozen=True, eq=False, slots=True)
class RowUse:
    """An equation that takes rows of a table, or makes a table of zeros with rows added.

    Attributes:
        table: The table.
        ids: The numbers of the rows.
        eqn: The equation, `gather` or `scatter-add`.
    """

    table: Var
    ids: Atom
    eqn: Equation


@final
class RowFlow:
    """The tables of a jaxpr.

    Variables that equations work on row by row belong to one table. If an equation does something
    else with a variable, its table is refused.

    Args:
        jaxpr: The jaxpr, without calls of functions.
        states: The inputs that may be tables.
        is_worker: Whether rows may be looked up and tables joined, which servers do not do.

    Attributes:
        same: Variables whose rows are all equal, whatever their number.
        lookups: Gathers of rows. If their numbers depend on state, their table is refused.
        scatters: Additions of rows to zeros, at numbers that depend on no state.
        sums: Variables whose rows an equation adds up.
    """

    def __init__(self, jaxpr: Jaxpr, states: Collection[Var], is_worker: bool) -> None:
        self.same: set[Var] = set()
        self.lookups: list[RowUse] = []
        self.scatters: list[RowUse] = []
        self.sums: list[Var] = []
        # By variable, its parent and a number: row r of the variable is row r + number there.
        self._parents: dict[Var, tuple[Var, int]] = {}
        self._variables: set[Var] = set()
        self._refused: list[tuple[Var, str]] = []
        self._reasons: dict[Var, str] | None = None
        self._states = set(states)
        self._is_worker = is_worker
        self._of_states = computed_from(jaxpr.eqns, states)
        self._zeros: set[Var] = set()
        for v in (*jaxpr.constvars, *jaxpr.invars):
            if v not in states:
                self.refuse(v, _DATA)
        for eqn in jaxpr.eqns:
            self._add(eqn)

    def find(self, v: Var) -> tuple[Var, int]:
        """Returns the variable that stands for a variable's table, and its first row there."""
        start = 0
        while v in self._parents:
            v, distance = self._parents[v]
            start += distance
        return v, start

    def members(self, root: Var) -> list[Var]:
        """Returns the variables of a table."""
        return [v for v in {root, *self._variables} if self.find(v)[0] is root]

    def refuse(self, v: Var, reason: str) -> None:
        """Notes that the whole of a variable is needed, and why."""
        if v not in self.same:
            self._refused.append((v, reason))
            self._reasons = None

    def reason(self, root: Var) -> str | None:
        """Returns the reason why a table was refused; None if it was not."""
        if self._reasons is None:
            self._reasons = {self.find(v)[0]: why for v, why in reversed(self._refused)}
        return self._reasons.get(root)

    def _add(self, eqn: Equation) -> None:
        name = eqn.primitive.name
        operand = eqn.invars[0] if eqn.invars else None
        operands = row_operands(eqn)
        if operands is not None and self.same.issuperset(operands):
            self.same.update(eqn.outvars)
            if name == "broadcast_in_dim" and isinstance(operand, Literal) and operand.val == 0:
                self._zeros.add(eqn.outvars[0])
        elif operands is not None:
            for v in (*operands, *eqn.outvars[1:]):
                self._join(v, eqn.outvars[0], 0)
        elif not (self._is_worker and isinstance(operand, Var) and self._add_rows(eqn, operand)):
            if name == "reduce_sum" and isinstance(operand, Var):
                self.sums.append(operand)
                self.refuse(eqn.outvars[0], _DATA)
            else:
                for v in variables_of((*eqn.invars, *eqn.outvars)):
                    self.refuse(v, f"{name} needs all of it")

    def _add_rows(self, eqn: Equation, operand: Var) -> bool:
        """Adds an equation of a worker that looks up rows, or joins or parts tables.

        Returns:
            False if it does something else.
        """
        name = eqn.primitive.name
        if takes_rows(eqn) and operand not in self.same:
            self.refuse(eqn.outvars[0], _DATA)
            self.lookups.append(RowUse(operand, eqn.invars[1], eqn))
            if not self._has_pure_ids(eqn):
                self.refuse(operand, "the ids depend on a variable")
        elif adds_rows(eqn) and operand in self._zeros and self._has_pure_ids(eqn):
            self.scatters.append(RowUse(eqn.outvars[0], eqn.invars[1], eqn))
        elif name == "concatenate" and all(
            isinstance(v, Var) and v in self._states for v in eqn.invars
        ):
            start = 0
            for v in variables_of(eqn.invars):
                self._join(v, eqn.outvars[0], start)
                start += aval_of(v).shape[0]
        elif (rows := rows_between(eqn)) is not None:
            self._join(eqn.outvars[0], operand, rows[0])
        else:
            return False
        return True

    def _has_pure_ids(self, eqn: Equation) -> bool:
        ids = eqn.invars[1]
        return isinstance(ids, Var) and ids not in self._of_states

    def _join(self, v: Var, other: Var, start: int) -> None:
        """Notes that row r of `v` is row r + start of `other`."""
        if v in self.same or other in self.same:
            return
        self._variables.update((v, other))
        (root, first), (other_root, other_first) = self.find(v), self.find(other)
        distance = other_first + start - first
        if root is not other_root:
            self._parents[root] = (other_root, distance)
        elif distance:
            self.refuse(v, "it is combined with other rows of its own")
