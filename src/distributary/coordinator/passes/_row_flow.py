"""Finds the values of a program that are rows of one table, and the uses that need the whole table.

With the state `t`, and `ids` and `g` from data:

    a:f32[1000,2] = mul t 2.0                  row by row: of the same table as `t`
    b:f32[3,2] = gather a ids                  a lookup
    c:f32[1000,2] = broadcast_in_dim 0.0       the same in all rows
    d:f32[1000,2] = scatter-add c ids g        rows added to zeros
    e:f32[1000,4] = dot_general a w            refused: "dot_general needs all of it"

Without the last equation a worker needs only the 3 rows that `ids` name.
"""

from collections.abc import Collection
from typing import Any, final

import jax.extend.core as jex_core

from distributary.rows import row_operands, rows_between
from distributary.tracing import Equation, variables_of

__all__ = ["RowFlow"]

_DATA = "it is combined with data"


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
        lookups: Equations that gather rows by numbers that depend on no state.
        refused_lookups: Equations that gather rows by numbers that depend on state.
        scatters: Variables that are zeros with rows added at such numbers, with the equation.
        sums: Variables whose rows an equation adds up.
    """

    def __init__(self, jaxpr: Any, states: Collection[Any], is_worker: bool) -> None:
        self.same: set[Any] = set()
        self.lookups: list[Equation] = []
        self.refused_lookups: list[Equation] = []
        self.scatters: dict[Any, Equation] = {}
        self.sums: list[Any] = []
        # By variable, its parent and a number: row r of the variable is row r + number there.
        self._parents: dict[Any, tuple[Any, int]] = {}
        self._variables: set[Any] = set()
        self._refused: list[tuple[Any, str]] = []
        self._reasons: dict[Any, str] | None = None
        self._states = set(states)
        self._is_worker = is_worker
        self._of_states = set(states)
        self._zeros: set[Any] = set()
        for v in (*jaxpr.constvars, *jaxpr.invars):
            if v not in states:
                self.refuse(v, _DATA)
        for eqn in jaxpr.eqns:
            if not self._of_states.isdisjoint(variables_of(eqn.invars)):
                self._of_states.update(eqn.outvars)
            self._add(eqn)

    def find(self, v: Any) -> tuple[Any, int]:
        """Returns the variable that stands for a variable's table, and its first row there."""
        start = 0
        while v in self._parents:
            v, distance = self._parents[v]
            start += distance
        return v, start

    def members(self, root: Any) -> list[Any]:
        """Returns the variables of a table."""
        return [v for v in {root, *self._variables} if self.find(v)[0] is root]

    def refuse(self, v: Any, reason: str) -> None:
        """Notes that the whole of a variable is needed, and why."""
        if v not in self.same:
            self._refused.append((v, reason))
            self._reasons = None

    def reason(self, root: Any) -> str | None:
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
            if name == "broadcast_in_dim" and _is_zero(operand):
                self._zeros.add(eqn.outvars[0])
        elif operands is not None:
            for v in (*operands, *eqn.outvars[1:]):
                self._join(v, eqn.outvars[0], 0)
        elif name == "gather" and self._is_worker and _takes_rows(eqn):
            self.refuse(eqn.outvars[0], _DATA)
            if self._has_pure_rows(eqn):
                self.lookups.append(eqn)
            else:
                self.refused_lookups.append(eqn)
                self.refuse(operand, "the ids depend on a variable")
        elif (
            name == "scatter-add"
            and self._is_worker
            and _adds_rows(eqn, self._zeros)
            and self._has_pure_rows(eqn)
        ):
            self.scatters[eqn.outvars[0]] = eqn
        elif name == "concatenate" and self._is_worker and self._states.issuperset(eqn.invars):
            start = 0
            for v in eqn.invars:
                self._join(v, eqn.outvars[0], start)
                start += v.aval.shape[0]
        elif self._is_worker and (rows := rows_between(eqn)) is not None:
            self._join(eqn.outvars[0], operand, rows[0])
        elif name == "reduce_sum" and not isinstance(operand, jex_core.Literal):
            self.sums.append(operand)
            self.refuse(eqn.outvars[0], _DATA)
        else:
            for v in variables_of((*eqn.invars, *eqn.outvars)):
                self.refuse(v, f"{name} needs all of it")

    def _has_pure_rows(self, eqn: Equation) -> bool:
        numbers = eqn.invars[1]
        return not isinstance(numbers, jex_core.Literal) and numbers not in self._of_states

    def _join(self, v: Any, other: Any, start: int) -> None:
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


def _takes_rows(eqn: Equation) -> bool:
    """Returns whether a gather takes whole rows, each by its number."""
    operand, dims = eqn.invars[0], eqn.params["dimension_numbers"]
    num_leading = eqn.invars[1].aval.ndim - 1
    return (
        not isinstance(operand, jex_core.Literal)
        and dims.start_index_map == dims.collapsed_slice_dims == (0,)
        and not dims.operand_batching_dims
        and eqn.params["slice_sizes"] == (1, *operand.aval.shape[1:])
        and eqn.invars[1].aval.shape[-1:] == (1,)
        and num_leading >= 0
    )


def _adds_rows(eqn: Equation, zeros: Collection[Any]) -> bool:
    """Returns whether a scatter adds whole rows to zeros."""
    operand, dims = eqn.invars[0], eqn.params["dimension_numbers"]
    ndim = eqn.invars[2].aval.ndim
    return (
        operand in zeros
        and dims.scatter_dims_to_operand_dims == dims.inserted_window_dims == (0,)
        and not dims.operand_batching_dims
        and tuple(eqn.invars[2].aval.shape[d] for d in dims.update_window_dims)
        == operand.aval.shape[1:]
        and ndim == len(dims.update_window_dims) + eqn.invars[1].aval.ndim - 1
    )


def _is_zero(atom: Any) -> bool:
    return isinstance(atom, jex_core.Literal) and atom.val == 0
