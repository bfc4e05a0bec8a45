"""Splits steps that look up rows of large variables, so that only these rows travel.

A worker does not need a whole table if it only gathers rows, by numbers that do not depend on
variables. Its gradient is then a scatter into zeros, which is zero in all other rows. Both are
found in the jaxpr of the worker. With a table of 1000 rows, 3 of them named by `ids`,

    { lambda ; t:f32[1000,2] ids:i32[3,1]. let
        a:f32[3,2] = gather t ids
        b:f32[] = reduce_sum a
        c:f32[3,2] = broadcast_in_dim 1.0
        d:f32[1000,2] = broadcast_in_dim 0.0
        e:f32[1000,2] = scatter-add d ids c
        f:f32[1000,2] = push e
      in (b, f) }

becomes a program of as many rows as there are numbers. `rows` are the rows that `ids` name, and
`at` are the positions among them: where the row of each of `ids` is.

    { lambda ; rows:f32[3,2] at:i32[3,1]. let
        a:f32[3,2] = gather rows at
        b:f32[] = reduce_sum a
        c:f32[3,2] = broadcast_in_dim 1.0
        d:f32[3,2] = broadcast_in_dim 0.0
        e:f32[3,2] = scatter-add d at c
        f:f32[3,2] = push e
      in (b, f) }

The numbers come from a program of their own, `{ lambda ; ids:i32[3,1]. let  in (ids,) }`. It runs
first, so that the worker knows which rows to pull.

The stages of `rows_of`:

1. `RowFlow` finds tables, and `_flow_of_worker` refuses those of which something needs all rows;
2. `_Spaces` groups tables that are looked up by the same numbers;
3. `_Spaces.worker_with_rows` evaluates the program once more, with rows in the place of tables;
4. `needed_part` cuts out the program of the numbers.

`rows_of_update` examines a server's update in the same way: does it treat every row by itself, and
does it leave a row alone if its gradient is zero? With the update

    { lambda ; t:f32[1000,2] f:f32[1000,2]. let
        g:f32[1000,2] = mul 0.1 f
        h:f32[1000,2] = sub t g
      in (h,) }

both hold, so the server runs it on the 3 rows that are pushed:

    { lambda ; t:f32[3,2] f:f32[3,2]. let
        g:f32[3,2] = mul 0.1 f
        h:f32[3,2] = sub t g
      in (h,) }

`RowFlow` finds the values of a program that are rows of one table, and the uses that need the whole
table. With the state `t`, and `ids` and `g` from data:

    a:f32[1000,2] = mul t 2.0                  row by row: of the same table as `t`
    b:f32[3,2] = gather a ids                  a lookup
    c:f32[1000,2] = broadcast_in_dim 0.0       the same in all rows
    d:f32[1000,2] = scatter-add c ids g        rows added to zeros
    e:f32[1000,4] = dot_general a w            refused: "dot_general needs all of it"

Without the last equation a worker needs only the 3 rows that `ids` name.
"""

import math
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var
from jax.lax import GatherScatterMode

from distributary.devices import REPLICA_AXIS
from distributary.jaxprs import (
    Array,
    Atom,
    Equation,
    aval_of,
    computed_from,
    evaluate_one,
    jaxpr_of,
    variables_of,
)
from distributary.programs import (
    adds_rows,
    bind_rows,
    known_result,
    number_of,
    row_operands,
    takes_rows,
)
from distributary.servers._split import ServerPart, ServerSplit, Step, needed_part, rows_between
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


SparseUpdate = typing.Literal["exact", "lazy"]
#: The number of a space, and a row there: that of row 0 of a table.
SpaceRow: TypeAlias = tuple[int, int]
# A key for the rows that an equation takes: one that is equal for equal numbers of rows, and the
# first row and the number of rows of their table in the table that it is joined with.
_Rows: TypeAlias = tuple[Any, int, int]
_MIN_BUCKET = 16


@final
@dataclass(frozen=True, slots=True)
class Lookup:
    """Numbers of rows in one part of a space.

    Attributes:
        start: The row of the space that is row 0 of the part.
        size: Number of rows of the part.
        is_clipped: Whether a number out of range means the nearest row; else it means none.
    """

    start: int
    size: int
    is_clipped: bool


@final
@dataclass(frozen=True, slots=True)
class RowSpace:
    """Rows that several tables have in common; a step works on some of them, given by number.

    Attributes:
        lookups: The numbers of the rows that a step takes, over all spaces in the order of the
            outputs of `RowSplit.ids`.
        capacity: Largest number of rows that a step works on.
    """

    lookups: list[Lookup]
    capacity: int


@final
@dataclass(frozen=True, slots=True)
class TablePart:
    """A variable that holds a range of the rows of a space.

    Attributes:
        server: Number of its server.
        number: Number of the variable.
        start: Its first row in the space.
        size: Number of its rows.
    """

    server: int
    number: int
    start: int
    size: int


@final
@dataclass(frozen=True, slots=True)
class RowSplit:
    """The work of a worker on rows instead of tables.

    Attributes:
        worker: Closed jaxpr like `ServerSplit.worker`. Its inputs are those of the step at
            `inputs`, the rows `[capacity, *row]` of every one of `buffers`, and for every lookup
            the positions of its numbers among the rows, int32 in the shape of the numbers.
        inputs: Positions among the inputs of the step.
        ids: Closed jaxpr from the inputs of the step at `ids_inputs` to the numbers `[..., 1]` of
            the lookups.
        ids_inputs: Positions among the inputs of the step.
        spaces: The spaces that `buffers` and `pushes` refer to; none if the worker takes no rows.
        buffers: For every table of which the worker takes rows, its space and the variables that
            hold its rows: a table may lie on several servers.
        pushes: The pushed values that are rows; by their number, the space and the first row.
        refusals: For every variable that is looked up but travels as a whole, by its name, the
            reason.
    """

    worker: ClosedJaxpr
    inputs: list[int]
    ids: ClosedJaxpr
    ids_inputs: list[int]
    spaces: list[RowSpace]
    buffers: list[tuple[int, list[TablePart]]]
    pushes: dict[int, SpaceRow]
    refusals: dict[str, str]


@final
@dataclass(frozen=True, slots=True)
class UpdatedRows:
    """Rows of the variables of one server that change together.

    Attributes:
        space: Number of the space.
        start: First row of the variables in the space.
        size: Number of rows of the variables.
        bucket: Number that rows share if they are padded to the same number of rows.
        states: Positions among the states of the server part.
        pushes: Positions among its pushes.
        outputs: Positions among its outputs.
        is_whole: Whether the update changes other rows, too, so that the pushed rows must be put
            into zeros first.
    """

    space: int
    start: int
    size: int
    bucket: int
    states: list[int]
    pushes: list[int]
    outputs: list[int]
    is_whole: bool


def bucket_of(num_rows: int) -> int:
    """Returns the number of rows to pad to, one of few, so that few programs are compiled."""
    return max(_MIN_BUCKET, 1 << max(0, num_rows - 1).bit_length())


def rows_of(step: Step, split: ServerSplit) -> RowSplit:
    """Returns the worker's part of a step, with rows of those tables of which it needs no others.

    Each device of a worker looks up rows by numbers of its own, and has the rows of all.

    Args:
        step: The step.
        split: Its parts.
    """
    jaxpr = split.worker.jaxpr
    position = dict(zip(jaxpr.invars, split.inputs, strict=True))
    tables = [v for v in jaxpr.invars if position[v] in step.shards]
    flow = _flow_of_worker(jaxpr, tables, step.num_results)
    spaces = _Spaces(jaxpr, flow, step.num_devices)
    first_rows = {v: first for v in tables if (first := spaces.first_row(v)) is not None}
    groups = _joined_tables(jaxpr, first_rows)
    plain = [v for v in jaxpr.invars if v not in first_rows]
    worker = split.worker
    if spaces.spaces:
        worker = spaces.worker_with_rows(worker, plain, groups)
    consts = dict(zip(jaxpr.constvars, split.worker.consts, strict=True))
    ids = needed_part(jaxpr.invars, spaces.ids, jaxpr.eqns, consts)
    buffers = []
    for group in groups:
        parts = []
        for v in group:
            server, number, num_rows = step.shards[position[v]]
            parts.append(TablePart(server, number, first_rows[v][1], num_rows))
        buffers.append((first_rows[group[0]][0], sorted(parts, key=lambda part: part.start)))
    pushes = {
        i: first
        for i, v in enumerate(jaxpr.outvars[step.num_results :])
        if isinstance(v, Var) and v not in flow.same and (first := spaces.first_row(v)) is not None
    }
    inputs, ids_inputs = ([position[v] for v in vs] for vs in (plain, ids.jaxpr.invars))
    refusals = {
        step.handles[position[v]].name: why for v, why in spaces.refusals.items() if v in tables
    }
    return RowSplit(worker, inputs, ids, ids_inputs, spaces.spaces, buffers, pushes, refusals)


def _flow_of_worker(jaxpr: Jaxpr, tables: Collection[Var], num_results: int) -> RowFlow:
    """Returns the tables of a worker's program, without those of which it needs all rows.

    Args:
        jaxpr: The program.
        tables: The inputs that may be tables.
        num_results: Number of outputs that are returned; the others are pushed.
    """
    flow = RowFlow(jaxpr, tables, is_worker=True)
    for v in variables_of(jaxpr.outvars[:num_results]):
        flow.refuse(v, "it is returned")
    # Values that are summed or pushed must be zero in rows that are not looked up.
    pushed = [v for v in variables_of(jaxpr.outvars[num_results:]) if v not in flow.same]
    reasons = [
        *((v, "a sum needs all of it") for v in flow.sums),
        *((v, "all of it is pushed") for v in pushed),
    ]
    zeros = [use.table for use in flow.scatters]
    numbers = numbers_of_other_rows(jaxpr, [v for v, _ in reasons], zeros)
    for (v, reason), number in zip(reasons, numbers, strict=True):
        if number != "zero":
            flow.refuse(v, reason)
    return flow


def _joined_tables(jaxpr: Jaxpr, tables: Iterable[Var]) -> list[list[Var]]:
    """Returns the inputs that are tables, grouped by the tables that are joined."""
    group_of: dict[Var, dict[Var, None]] = {v: {v: None} for v in tables}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "concatenate" and group_of.keys() >= {*variables_of(eqn.invars)}:
            merged: dict[Var, None] = {}
            for v in variables_of(eqn.invars):
                merged.update(group_of[v])
            group_of.update(dict.fromkeys(merged, merged))
    return [list(group) for group in {id(group): group for group in group_of.values()}.values()]


def rows_of_update(
    part: ServerPart, split: RowSplit, sparse_update: SparseUpdate
) -> tuple[list[UpdatedRows], Callable[..., list[Array]]]:
    """Returns the work of a server when some of the pushed values are rows.

    Args:
        part: Its work on whole values.
        split: The work of the worker, which says what is pushed.
        sparse_update: "lazy" leaves rows alone that are not pushed. "exact" does so only if the
            update itself leaves them alone.

    Returns:
        The variables that rows are pushed for; and the update, as a function of flat arrays. The
        states and pushes of these variables have only some of their rows, unless `is_whole`.
    """
    jaxpr = part.update.jaxpr
    states, invars = jaxpr.invars[: len(part.states)], jaxpr.invars[len(part.states) :]
    flow = RowFlow(jaxpr, {*jaxpr.invars}, is_worker=False)
    pairs = zip(invars, part.pushes, strict=True)
    pushed = {v: split.pushes[number] for v, number in pairs if number in split.pushes}
    numbers = numbers_of_other_rows(jaxpr, jaxpr.outvars, pushed)
    groups: dict[tuple[Var, int], list[Var]] = {}
    for v in pushed:
        groups.setdefault(flow.find(v), []).append(v)
    rows: list[UpdatedRows] = []
    inputs_of: dict[Var, Var] = {}  # by table, an input with its rows
    for (root, _), group in groups.items():
        outputs = [i for i, v in enumerate(jaxpr.outvars) if _is_of(flow, v, root)]
        leaves_others = all(numbers[i] is part.olds[i] for i in outputs)
        members = [v for v in jaxpr.invars if _is_of(flow, v, root)]
        is_whole = not (
            (leaves_others or sparse_update == "lazy")
            and all(part.olds[i] in members for i in outputs)
            and {*pushed, *states}.issuperset(members)
            and _needs_same_rows(flow, members, pushed)
        )
        if not is_whole:
            inputs_of[root] = group[0]
        size = aval_of(group[0]).shape[0]
        for space, first in sorted({pushed[v] for v in group}):
            rows.append(
                UpdatedRows(
                    space,
                    first,
                    size,
                    bucket_of(min(size, split.spaces[space].capacity)),
                    [] if is_whole else [i for i, v in enumerate(states) if _is_of(flow, v, root)],
                    [i for i, v in enumerate(invars) if v in group and pushed[v] == (space, first)],
                    [] if is_whole else outputs,
                    is_whole,
                )
            )

    def run(*arrays: Array) -> list[Array]:
        values = dict(zip(jaxpr.invars, arrays, strict=True))
        sizes = {root: values[v].shape[0] for root, v in inputs_of.items()}
        values.update(zip(jaxpr.constvars, part.update.consts, strict=True))
        return _evaluated(jaxpr, flow, values, sizes, {})

    return rows, run


def _needs_same_rows(flow: RowFlow, members: list[Var], pushed: Mapping[Var, SpaceRow]) -> bool:
    """Returns whether the update of some rows of a table's variables needs only these rows."""
    (root, start), *others = map(flow.find, members)
    return (
        flow.reason(root) is None
        and len({pushed[v] for v in members if v in pushed}) == 1
        and all(other == start for _, other in others)
    )


def _is_of(flow: RowFlow, atom: Atom, root: Var) -> bool:
    """Returns whether an atom belongs to a table."""
    return isinstance(atom, Var) and flow.find(atom)[0] is root


@final
class _Spaces:
    """The numbers of rows that a worker looks up, by table.

    Attributes:
        spaces: The spaces; tables that are looked up by the same numbers share one.
        ids: The variable with the numbers, for every lookup of every space.
        refusals: Reasons, by variable, why a table that is looked up has no space.
    """

    def __init__(self, jaxpr: Jaxpr, flow: RowFlow, num_devices: int) -> None:
        self._flow = flow
        self._num_devices = num_devices
        self.spaces: list[RowSpace] = []
        self.ids: list[Atom] = []
        # By table, its space, and the row of the table that is row 0 there.
        self._of_root: dict[Var, SpaceRow] = {}
        # By the lookups in it, a space and the number of its first lookup.
        self._places: dict[Any, tuple[int, int]] = {}
        self._lookup_of: dict[int, int] = {}  # by equation
        uses = [*flow.lookups, *flow.scatters]
        # Numbered by value, because the same numbers may be computed twice.
        inputs = [*jaxpr.constvars, *jaxpr.invars]
        ids = jaxpr_of(inputs, [use.ids for use in uses], jaxpr.eqns)
        numbers = dict(zip(uses, Numbering().outputs(ids, inputs), strict=True))
        tables: dict[Var, dict[_Rows, list[RowUse]]] = {}
        for use, number in numbers.items():
            root, start = flow.find(use.table)
            rows = number, start, aval_of(use.table).shape[0]
            tables.setdefault(root, {}).setdefault(rows, []).append(use)
        for root, lookups in tables.items():
            self._add(root, lookups)
        self.refusals = self._refusals(numbers)

    def _add(self, root: Var, lookups: Mapping[_Rows, list[RowUse]]) -> None:
        """Gives a table a space, unless it is refused or has no more rows than are looked up.

        Args:
            root: The table.
            lookups: The equations that take or add rows of it, by these rows.
        """
        find = self._flow.find
        members = [(find(v)[1], aval_of(v).shape[0]) for v in self._flow.members(root)]
        first = min(start for start, _ in members)
        num_rows = max(start + size for start, size in members) - first
        capacity = sum(self._num_ids(uses[0]) for uses in lookups.values())
        if capacity >= num_rows or self._flow.reason(root) is not None:
            return
        shifted = tuple(
            (number, start - first, size, any(_is_clipped(use.eqn) for use in uses))
            for (number, start, size), uses in lookups.items()
        )
        if shifted not in self._places:
            self._places[shifted] = len(self.spaces), len(self.ids)
            spans = [Lookup(start, size, clips) for _, start, size, clips in shifted]
            self.spaces.append(RowSpace(spans, capacity))
            self.ids += [uses[0].ids for uses in lookups.values()]
        space, lookup = self._places[shifted]
        self._of_root[root] = space, first
        for i, uses in enumerate(lookups.values(), lookup):
            self._lookup_of.update((id(use.eqn), i) for use in uses)

    def first_row(self, v: Var) -> SpaceRow | None:
        """Returns the space of a variable, and its first row there; None without a space."""
        root, start = self._flow.find(v)
        if root not in self._of_root:
            return None
        space, first = self._of_root[root]
        return space, start - first

    def worker_with_rows(
        self, worker: ClosedJaxpr, plain: Sequence[Var], groups: Sequence[Sequence[Var]]
    ) -> ClosedJaxpr:
        """Returns the program of a worker with rows in the place of tables; see `RowSplit.worker`.

        Args:
            worker: The program with tables.
            plain: The inputs that stay.
            groups: The inputs that are tables; those that are joined are together one input.
        """
        jaxpr, find = worker.jaxpr, self._flow.find
        capacities = {r: self.spaces[space].capacity for r, (space, _) in self._of_root.items()}

        def run(*arrays: Array) -> list[Array]:
            left = iter(arrays)
            values = dict(zip(jaxpr.constvars, worker.consts, strict=True))
            values.update((v, next(left)) for v in plain)
            for group in groups:
                values.update(dict.fromkeys(group, next(left)))
            positions = list(left)  # of every lookup
            positions_of = {eqn: positions[i] for eqn, i in self._lookup_of.items()}
            return _evaluated(jaxpr, self._flow, values, capacities, positions_of)

        shapes = [(aval_of(v).shape, aval_of(v).dtype) for v in plain]
        for v, *_ in groups:
            rows_shape = capacities[find(v)[0]], *aval_of(v).shape[1:]
            shapes.append((rows_shape, aval_of(v).dtype))
        shapes += [(aval_of(v).shape, np.dtype(np.int32)) for v in self.ids]
        structs = [jax.ShapeDtypeStruct(*one) for one in shapes]
        axes = [(REPLICA_AXIS, self._num_devices)]
        closed: ClosedJaxpr = jax.make_jaxpr(run, axis_env=axes)(*structs)
        return closed

    def _refusals(self, numbers_of: Mapping[RowUse, Any]) -> dict[Var, str]:
        """Returns the reasons, by variable, why a table that is looked up has no space.

        Args:
            numbers_of: By lookup and scatter, a key that is equal for equal numbers of rows.
        """
        flow = self._flow
        of_gradients = {
            numbers_of[use]: f"of its gradient {why}"
            for use in flow.scatters
            if (why := flow.reason(flow.find(use.table)[0])) is not None
        }
        refusals: dict[Var, str] = {}
        for use in flow.lookups:
            root, _ = flow.find(use.table)
            why = flow.reason(root) or of_gradients.get(numbers_of[use])
            if why is not None and self._num_ids(use) < aval_of(use.table).shape[0]:
                refusals.update((v, why) for v in flow.members(root))
        return refusals

    def _num_ids(self, use: RowUse) -> int:
        return self._num_devices * math.prod(aval_of(use.ids).shape[:-1])


def _is_clipped(eqn: Equation) -> bool:
    """Returns whether a number out of range means the nearest row to an equation, and not none."""
    mode = eqn.params["mode"]
    if eqn.primitive.name == "gather":
        return mode is not GatherScatterMode.FILL_OR_DROP
    return mode is GatherScatterMode.CLIP  # numbers promised to be in bounds are dropped


def _evaluated(
    jaxpr: Jaxpr,
    flow: RowFlow,
    values: dict[Var, Array],
    sizes: Mapping[Var, int],
    positions_of: Mapping[int, Array],
) -> list[Array]:
    """Returns the outputs of a jaxpr, some of whose tables have fewer rows.

    Args:
        jaxpr: The jaxpr.
        flow: Its tables.
        values: Values of its inputs.
        sizes: By table, the number of rows it has.
        positions_of: By equation, the positions among the rows that it takes instead of numbers.
    """
    makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}

    def value(atom: Atom) -> Array:
        return values[atom] if isinstance(atom, Var) else atom.val

    def in_rows(atom: Atom, num_rows: int) -> Array:
        """Returns a value whose rows are all equal with another number of rows."""
        if not isinstance(atom, Var) or atom not in flow.same:
            return value(atom)
        eqn = makers[atom]
        row = bind_rows(eqn, operands(eqn, 1), 1)[eqn.outvars.index(atom)]
        return jnp.broadcast_to(row, (num_rows, *row.shape[1:]))

    def operands(eqn: Equation, num_rows: int) -> list[Array]:
        of_rows = row_operands(eqn) or ()
        return [in_rows(v, num_rows) if v in of_rows else value(v) for v in eqn.invars]

    for eqn in jaxpr.eqns:
        num_rows = sizes.get(flow.find(eqn.outvars[0])[0]) if eqn.outvars else None
        if id(eqn) in positions_of:
            first, ids, *rest = eqn.invars
            # A gather takes rows of a table; a scatter adds rows to zeros, of which there are as
            # many as the table has here.
            table, positions = in_rows(first, num_rows or 0), positions_of[id(eqn)]
            if not _is_clipped(eqn):  # others that look up the same numbers may clip them
                numbers = value(ids).astype(jnp.promote_types(aval_of(ids).dtype, np.int32))
                is_row = (numbers >= 0) & (numbers < aval_of(first).shape[0])
                positions = jnp.where(is_row, positions, table.shape[0])
            outs = [eqn.primitive.bind(table, positions, *map(value, rest), **eqn.params)]
        elif num_rows is None:
            outs = evaluate_one(eqn, list(map(value, eqn.invars)))
        elif row_operands(eqn) is None:  # tables are joined or parted
            outs = [value(eqn.invars[0])]
        else:
            outs = bind_rows(eqn, operands(eqn, num_rows), num_rows)
        values.update(zip(eqn.outvars, outs, strict=True))
    return [value(v) for v in jaxpr.outvars]
