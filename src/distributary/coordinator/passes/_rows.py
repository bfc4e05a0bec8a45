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
`places` say where the row of each of `ids` is among them:

    { lambda ; rows:f32[3,2] places:i32[3,1]. let
        a:f32[3,2] = gather rows places
        b:f32[] = reduce_sum a
        c:f32[3,2] = broadcast_in_dim 1.0
        d:f32[3,2] = broadcast_in_dim 0.0
        e:f32[3,2] = scatter-add d places c
        f:f32[3,2] = push e
      in (b, f) }

A server's update is examined in the same way: does it treat every row by itself, and does it leave
a row alone if its gradient is zero? `t - 0.1 * gradient` does both, so it runs on the pushed rows.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax.lax import GatherScatterMode

from distributary.coordinator.passes._row_flow import RowFlow
from distributary.coordinator.passes._servers import ServerPart, ServerSplit
from distributary.rows import bind_rows, numbers_of_other_rows, row_operands
from distributary.topology import REPLICA_AXIS
from distributary.tracing import Array, Equation, Numbering, evaluate, jaxpr_of, variables_of

__all__ = [
    "Lookup",
    "RowBuffer",
    "RowSpace",
    "RowSplit",
    "RowUpdate",
    "SparseUpdate",
    "UpdatedRows",
    "rows_of",
    "rows_of_update",
]

SparseUpdate = Literal["exact", "lazy"]


@final
@dataclass(frozen=True, slots=True)
class Lookup:
    """Numbers of rows in one part of a space.

    Attributes:
        start: The row of the space that is row 0 of the part.
        size: Number of rows of the part.
        is_clipped: Whether a number out of range means the nearest row; else it means none.
        is_again: Whether its numbers are those of the lookup before it, which is clipped.
    """

    start: int
    size: int
    is_clipped: bool
    is_again: bool


@final
@dataclass(frozen=True, slots=True)
class RowSpace:
    """Rows that several tables have in common; a step works on some of them, given by number.

    Attributes:
        lookups: The numbers of the rows that a step takes. Leaving out lookups with `is_again`,
            they are, over all spaces, in the order of the outputs of `RowSplit.ids`.
        capacity: Largest number of rows that a step works on.
    """

    lookups: list[Lookup]
    capacity: int


@final
@dataclass(frozen=True, slots=True)
class RowBuffer:
    """Rows of a table as an input of the worker; the table may lie on several servers.

    Attributes:
        space: Number of the space.
        parts: Positions of the table's states among the inputs of the whole, each with its first
            row.
    """

    space: int
    parts: list[tuple[int, int]]


@final
@dataclass(frozen=True, slots=True)
class RowSplit:
    """The work of a worker on rows instead of tables.

    Attributes:
        worker: Closed jaxpr like `ServerSplit.worker`. Its inputs are those of the whole at
            `inputs`, the rows `[capacity, *row]` of every one of `buffers`, and for every lookup
            the places of its numbers among the rows, int32 in the shape of the numbers.
        inputs: Positions among the inputs of the whole.
        ids: Closed jaxpr from the inputs of the whole at `ids_inputs` to the numbers `[..., 1]` of
            the lookups.
        ids_inputs: Positions among the inputs of the whole.
        spaces: The spaces that `buffers` and `pushes` refer to.
        buffers: The tables.
        pushes: The pushed values that are rows; by their number, the space and the first row.
    """

    worker: Any
    inputs: list[int]
    ids: Any
    ids_inputs: list[int]
    spaces: list[RowSpace]
    buffers: list[RowBuffer]
    pushes: dict[int, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class UpdatedRows:
    """Rows of the variables of one server that change together.

    Attributes:
        space: Number of the space.
        start: First row of the variables in the space.
        size: Number of rows of the variables.
        states: Positions among the states of the server part.
        pushes: Positions among its pushes.
        outputs: Positions among its outputs.
        is_whole: Whether the update changes other rows, too, so that the pushed rows must be put
            into zeros first.
    """

    space: int
    start: int
    size: int
    states: list[int]
    pushes: list[int]
    outputs: list[int]
    is_whole: bool


@final
@dataclass(frozen=True, slots=True)
class RowUpdate:
    """The work of a server on pushed rows.

    Attributes:
        rows: The variables that rows are pushed for.
        run: The update, as a function of flat arrays. The states and pushes in `rows` have only
            some of their rows, unless `is_whole`.
    """

    rows: list[UpdatedRows]
    run: Callable[..., list[Array]]


def rows_of(
    split: ServerSplit, states: Collection[int], num_devices: int = 1
) -> tuple[RowSplit | None, dict[int, str]]:
    """Finds tables of which a worker needs only rows.

    Args:
        split: The step.
        states: Positions of variables among the inputs of the whole.
        num_devices: Number of devices of a worker. Each of them looks up rows by numbers of its
            own, and has the rows of all.

    Returns:
        The worker's part with rows, or None if there are none; and for every variable that is
        looked up but travels as a whole, by its position, the reason.
    """
    jaxpr = split.worker.jaxpr
    tables = {
        v: position
        for v, position in zip(jaxpr.invars, split.inputs, strict=True)
        if position in states
    }
    flow = RowFlow(jaxpr, tables.keys(), is_worker=True)
    num_results = len(jaxpr.outvars) - split.num_pushes
    for v in variables_of(jaxpr.outvars[:num_results]):
        flow.refuse(v, "it is returned")
    # These must be zero in rows that are not looked up.
    pushed = [v for v in variables_of(jaxpr.outvars[num_results:]) if v not in flow.same]
    whole = [*flow.sums, *pushed]
    numbers = numbers_of_other_rows(jaxpr, whole, flow.scatters)
    for i, (v, number) in enumerate(zip(whole, numbers, strict=True)):
        if number != "zero":
            flow.refuse(v, "a sum needs all of it" if i < len(flow.sums) else "all of it is pushed")
    spaces = _Spaces(jaxpr, flow, num_devices)
    refusals = {tables[v]: why for v, why in spaces.refusals.items() if v in tables}
    if not spaces.spaces:
        return None, refusals

    taken = {v: place for v in tables if (place := spaces.place(v)) is not None}
    buffers = _buffers_of(jaxpr, taken)
    plain = [v for v in jaxpr.invars if v not in taken]
    ids = _closed(jaxpr, split.worker.consts, spaces.ids)
    num_plain, num_buffers = len(plain), len(buffers)

    def run(*arrays: Array) -> list[Array]:
        values = dict(zip(jaxpr.constvars, split.worker.consts, strict=True))
        values.update(zip(plain, arrays, strict=False))
        for group, array in zip(buffers, arrays[num_plain:], strict=False):
            values.update(dict.fromkeys(group, array))
        inverse = spaces.inverse(arrays[num_plain + num_buffers :])
        return _evaluated(jaxpr, flow, values, spaces.capacities(), inverse)

    capacity_of = [spaces.spaces[taken[next(iter(group))][0]].capacity for group in buffers]
    worker = jax.make_jaxpr(run, axis_env=[(REPLICA_AXIS, num_devices)])(
        *(_struct(v.aval.shape, v.aval.dtype) for v in plain),
        *(
            _struct((capacity, *aval.shape[1:]), aval.dtype)
            for capacity, aval in zip(
                capacity_of, [next(iter(group)).aval for group in buffers], strict=True
            )
        ),
        *(_struct(v.aval.shape, jnp.int32) for v in spaces.ids_of_lookups),
    )
    position = dict(zip(jaxpr.invars, split.inputs, strict=True))
    pushes = {
        i: place
        for i, v in enumerate(jaxpr.outvars[num_results:])
        if v in pushed and (place := spaces.place(v)) is not None
    }
    return (
        RowSplit(
            worker,
            [position[v] for v in plain],
            ids,
            [position[v] for v in ids.jaxpr.invars],
            spaces.spaces,
            [
                RowBuffer(
                    taken[next(iter(group))][0],
                    sorted([(position[v], taken[v][1]) for v in group], key=lambda part: part[1]),
                )
                for group in buffers
            ],
            pushes,
        ),
        refusals,
    )


def rows_of_update(
    part: ServerPart,
    state_of_output: Sequence[int | None],
    pushes: Mapping[int, tuple[int, int]],
    sparse_update: SparseUpdate,
) -> RowUpdate:
    """Returns the work of a server when some of the pushed values are rows.

    Args:
        part: Its work on whole values.
        state_of_output: For every output of the part, the number of the state it replaces.
        pushes: The `pushes` of the `RowSplit`.
        sparse_update: "lazy" leaves rows alone that are not pushed. "exact" does so only if the
            update itself leaves them alone.
    """
    jaxpr = part.update.jaxpr
    states, given = jaxpr.invars[: len(part.states)], jaxpr.invars[len(part.states) :]
    flow = RowFlow(jaxpr, {*jaxpr.invars}, is_worker=False)
    tagged = {
        v: pushes[number] for v, number in zip(given, part.pushes, strict=True) if number in pushes
    }
    numbers = numbers_of_other_rows(jaxpr, jaxpr.outvars, tagged)
    groups: dict[Any, list[Any]] = {}
    for v in tagged:
        groups.setdefault(flow.find(v), []).append(v)
    rows = []
    inputs_of: dict[Any, Any] = {}  # by table, an input with its rows
    for (root, start), own in groups.items():
        outputs = [
            i
            for i, v in enumerate(jaxpr.outvars)
            if not isinstance(v, jex_core.Literal) and flow.find(v)[0] is root
        ]
        olds = [state_of_output[i] for i in outputs]
        of_root = [v for v in jaxpr.invars if flow.find(v)[0] is root]
        can_be_rows = (
            flow.reason(root) is None
            and len({tagged[v] for v in own}) == 1
            and all(v in own or v in states for v in of_root)
            and all(flow.find(v)[1] == start for v in of_root)
            and all(k is not None and states[k] in of_root for k in olds)
        )
        is_exact = can_be_rows and all(
            numbers[i] is states[k] for i, k in zip(outputs, olds, strict=True) if k is not None
        )
        is_whole = not (is_exact or (can_be_rows and sparse_update == "lazy"))
        if not is_whole:
            inputs_of[root] = own[0]
        for place in sorted({tagged[v] for v in own}):
            rows.append(
                UpdatedRows(
                    *place,
                    own[0].aval.shape[0],
                    [] if is_whole else [i for i, v in enumerate(states) if v in of_root],
                    [i for i, v in enumerate(given) if v in own and tagged[v] == place],
                    [] if is_whole else outputs,
                    is_whole,
                )
            )

    def run(*arrays: Array) -> list[Array]:
        values = dict(zip(jaxpr.invars, arrays, strict=True))
        sizes = {root: values[v].shape[0] for root, v in inputs_of.items()}
        values.update(zip(jaxpr.constvars, part.update.consts, strict=True))
        return _evaluated(jaxpr, flow, values, sizes, {})

    return RowUpdate(rows, run)


@final
class _Spaces:
    """The numbers of rows that a worker looks up, by table.

    Attributes:
        spaces: The spaces; tables that are looked up by the same numbers share one.
        ids: The variables with the numbers.
        ids_of_lookups: The variable with the numbers, for every lookup of every space.
        refusals: Reasons, by variable, why a table that is looked up has no space.
    """

    def __init__(self, jaxpr: Any, flow: RowFlow, num_devices: int) -> None:
        self._num_devices = num_devices
        self.spaces: list[RowSpace] = []
        self.ids: list[Any] = []
        self.ids_of_lookups: list[Any] = []
        self._flow = flow
        self._of_root: dict[Any, tuple[int, int]] = {}
        self._lookups: dict[Any, int] = {}  # by equation, its number
        uses = [*((eqn.invars[0], eqn) for eqn in flow.lookups), *flow.scatters.items()]
        variables = [eqn.invars[1] for _, eqn in uses]
        inputs = [*jaxpr.constvars, *jaxpr.invars]
        # Numbered by value, because the same numbers may be computed twice.
        numbers = Numbering().outputs(jaxpr_of(inputs, variables, jaxpr.eqns), inputs)
        of_root: dict[Any, dict[Any, list[Equation]]] = {}
        for (v, eqn), number in zip(uses, numbers, strict=True):
            root, start = flow.find(v)
            key = number, start, v.aval.shape[0]
            of_root.setdefault(root, {}).setdefault(key, []).append(eqn)
        found: dict[Any, tuple[int, int]] = {}
        for root, keys in of_root.items():
            members = flow.members(root)
            first = min(flow.find(v)[1] for v in members)
            num_rows = max(flow.find(v)[1] + v.aval.shape[0] for v in members) - first
            capacity = sum(self._num_ids(eqns[0]) for eqns in keys.values())
            if capacity >= num_rows:
                continue
            if flow.reason(root) is not None:
                continue
            shifted = tuple(
                (number, start - first, size, _modes(eqns))
                for (number, start, size), eqns in keys.items()
            )
            if shifted not in found:
                found[shifted] = len(self.spaces), len(self.ids_of_lookups)
                self.spaces.append(
                    RowSpace(
                        [
                            Lookup(start, size, is_clipped, is_again=i > 0)
                            for _, start, size, modes in shifted
                            for i, is_clipped in enumerate(modes)
                        ],
                        capacity,
                    )
                )
                for eqns in keys.values():
                    self.ids.append(eqns[0].invars[1])
                    self.ids_of_lookups += [eqns[0].invars[1]] * len(_modes(eqns))
            space, number = found[shifted]
            self._of_root[root] = space, first
            for eqns in keys.values():
                modes = _modes(eqns)
                self._lookups.update(
                    (id(eqn), number + modes.index(_is_clipped(eqn))) for eqn in eqns
                )
                number += len(modes)
        self.refusals = self._refusals(
            {id(eqn): number for (_, eqn), number in zip(uses, numbers, strict=True)}
        )

    def place(self, v: Any) -> tuple[int, int] | None:
        """Returns the space of a variable and its first row there; None without a space."""
        root, start = self._flow.find(v)
        if root not in self._of_root:
            return None
        space, first = self._of_root[root]
        return space, start - first

    def capacities(self) -> dict[Any, int]:
        """Returns the number of rows that a worker has of every table."""
        return {root: self.spaces[space].capacity for root, (space, _) in self._of_root.items()}

    def inverse(self, arrays: Sequence[Array]) -> dict[int, Array]:
        """Returns by equation the places among the rows that it takes instead of numbers."""
        return {eqn: arrays[i] for eqn, i in self._lookups.items()}

    def _refusals(self, numbers_of: Mapping[int, int]) -> dict[Any, str]:
        """Returns the reasons, by variable, why a table that is looked up has no space.

        Args:
            numbers_of: By equation, a key that is equal for equal numbers of rows.
        """
        flow = self._flow
        of_gradients = {
            numbers_of[id(eqn)]: f"of its gradient {why}"
            for v, eqn in flow.scatters.items()
            if (why := flow.reason(flow.find(v)[0])) is not None
        }
        refusals: dict[Any, str] = {}
        for eqn in (*flow.lookups, *flow.refused_lookups):
            root, _ = flow.find(eqn.invars[0])
            why = flow.reason(root) or of_gradients.get(numbers_of.get(id(eqn), -1))
            if why is not None and self._num_ids(eqn) < eqn.invars[0].aval.shape[0]:
                refusals.update((v, why) for v in flow.members(root))
        return refusals

    def _num_ids(self, eqn: Equation) -> int:
        return self._num_devices * math.prod(eqn.invars[1].aval.shape[:-1])


def _modes(eqns: Sequence[Equation]) -> tuple[bool, ...]:
    """Returns whether equations clip numbers out of range; both answers if they differ."""
    return tuple(sorted({_is_clipped(eqn) for eqn in eqns}, reverse=True))


def _is_clipped(eqn: Equation) -> bool:
    mode = eqn.params["mode"]
    if eqn.primitive.name == "gather":
        return mode is not GatherScatterMode.FILL_OR_DROP
    return mode is GatherScatterMode.CLIP  # numbers promised to be in bounds are dropped


def _buffers_of(jaxpr: Any, taken: Collection[Any]) -> list[list[Any]]:
    """Returns the inputs that are tables, grouped by the tables that are joined."""
    group_of: dict[Any, dict[Any, None]] = {v: {v: None} for v in taken}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "concatenate" and group_of.keys() >= {*variables_of(eqn.invars)}:
            merged: dict[Any, None] = {}
            for v in eqn.invars:
                merged.update(group_of[v])
            group_of.update(dict.fromkeys(merged, merged))
    return [list(group) for group in {id(group): group for group in group_of.values()}.values()]


def _evaluated(
    jaxpr: Any,
    flow: RowFlow,
    values: dict[Any, Array],
    sizes: Mapping[Any, Any],
    inverse: Mapping[int, Array],
) -> list[Array]:
    """Returns the outputs of a jaxpr, some of whose tables have fewer rows.

    Args:
        jaxpr: The jaxpr.
        flow: Its tables.
        values: Values of its inputs.
        sizes: By table, the number of rows it has.
        inverse: By equation, the places among the rows that it takes instead of numbers.
    """
    makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}

    def value(atom: Any) -> Array:
        return atom.val if isinstance(atom, jex_core.Literal) else values[atom]

    def in_rows(atom: Any, num_rows: Any) -> Array:
        if atom not in flow.same:
            return values[atom]
        eqn = makers[atom]
        row = bind_rows(eqn, operands(eqn, 1), 1)[eqn.outvars.index(atom)]
        return jnp.broadcast_to(row, (num_rows, *row.shape[1:]))

    def operands(eqn: Equation, num_rows: Any) -> list[Array]:
        of_rows = set(row_operands(eqn) or ())
        return [
            value(v)
            if isinstance(v, jex_core.Literal) or v not in of_rows
            else in_rows(v, num_rows)
            for v in eqn.invars
        ]

    for eqn in jaxpr.eqns:
        num_rows = sizes.get(flow.find(eqn.outvars[0])[0]) if eqn.outvars else None
        if id(eqn) in inverse:
            first, _, *rest = eqn.invars
            given = [in_rows(first, num_rows), inverse[id(eqn)], *map(value, rest)]
            outs = [eqn.primitive.bind(*given, **eqn.params)]
        elif num_rows is None:
            outs = evaluate([eqn], eqn.outvars, values)
        elif row_operands(eqn) is None:  # tables are joined or parted
            outs = [values[eqn.invars[0]]]
        else:
            outs = bind_rows(eqn, operands(eqn, num_rows), num_rows)
        values.update(zip(eqn.outvars, outs, strict=True))
    return [value(v) for v in jaxpr.outvars]


def _closed(jaxpr: Any, consts: Sequence[Any], outputs: Sequence[Any]) -> Any:
    """Returns the part of a jaxpr that computes `outputs`, with only the inputs it needs."""
    wanted = set(outputs)
    eqns: list[Equation] = []
    for eqn in reversed(jaxpr.eqns):
        if not wanted.isdisjoint(eqn.outvars):
            eqns.append(eqn)
            wanted.update(variables_of(eqn.invars))
    own = dict(zip(jaxpr.constvars, consts, strict=True))
    constvars = [v for v in own if v in wanted]
    invars = [v for v in jaxpr.invars if v in wanted]
    opened = jaxpr_of(invars, outputs, eqns[::-1], constvars)
    return jex_core.ClosedJaxpr(opened, [own[v] for v in constvars])


def _struct(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)
