"""Gathers the weights of a step where it needs them, and again where its backward pass does.

Every device holds a part of each weight. The step gathers a weight before its first use. What is
gathered would stay until the backward pass has used it, all weights of the model at once. So with
three layers

    { lambda ; w1:f32[8,8] w2:f32[8,8] w3:f32[8,8] x:f32[4,8]. let
        a:f32[8,8] = gather_parts w1
        b:f32[4,8] = dot_general x a
        c:f32[8,8] = gather_parts w2
        d:f32[4,8] = dot_general b c
        ...
        i:f32[4,8] = dot_general h c       (the backward pass)
        j:f32[8,8] = dot_general b h
        k:f32[8,8] = scatter_parts j
        l:f32[4,8] = dot_general i a

becomes

        ...
        m:f32[8,8] n:f32[4,8] = optimization_barrier w2 g
        o:f32[8,8] = gather_parts m
        i:f32[4,8] = dot_general h o
        j:f32[8,8] = dot_general b h
        k:f32[8,8] = scatter_parts j
        p:f32[8,8] q:f32[4,8] = optimization_barrier w1 h
        r:f32[8,8] = gather_parts p
        l:f32[4,8] = dot_general i r

A barrier lets a weight wait for an activation that is there a little earlier than the first use, so
that XLA gathers the weight while it computes what comes before, and no weight much earlier. From
the second layer on, parts of gradients that are complete by then wait with it, so that their sums
do not pile up either. No activation is computed twice.
"""

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Var
from jax.lax import GatherScatterMode
from jax.sharding import NamedSharding, PartitionSpec as P

from distributary.devices import REPLICA_AXIS, Nest
from distributary.jaxprs import (
    CONTROL_FLOW,
    Atom,
    Equation,
    aval_of,
    evaluate_one,
    jaxpr_of,
    opened,
    shape_of,
    value_of,
    variables_of,
    walk,
    with_bodies,
    with_pass,
)
from distributary.programs._row_wise import are_few_rows, takes_rows
from distributary.programs._stages import flattened
from distributary.tracing import gather_p, scatter_p

# These make other forms of the same numbers, which are made again rather than kept.
_FORMS = frozenset(
    {"broadcast_in_dim", "convert_element_type", "copy", "expand_dims", "reshape", "slice"}
    | {"squeeze", "transpose"}
)
# The operations that scatter a sum of replicas.
_OF_SUMS = frozenset({"pad", "reduce_scatter"})
_OF_VECTOR = lax.GatherDimensionNumbers((), collapsed_slice_dims=(0,), start_index_map=(0,))
# So many times the size of the largest weight may be on its way before it is used.
_AHEAD = 2


def with_gathers(
    step: Callable[..., Nest], parts: Mapping[int, tuple[int, int]] | None = None
) -> Callable[..., Nest]:
    """Returns `step` with weights gathered where they are used, at most twice each.

    Args:
        step: From arrays to a nest of arrays; called inside `jax.jit`. If it is the program of a
            replica, it is called inside `jax.shard_map`.
        parts: In the program of a replica, the arguments of which it gets a part, by number: the
            dim that is divided, and its size. `step` itself gets the whole.
    """
    if not parts:
        return with_pass(step, _run)

    def of_replica(*args: Array) -> Nest:
        whole = list(args)
        for i, (dim, size) in parts.items():
            joined = lax.all_gather(args[i], REPLICA_AXIS, axis=dim, tiled=True)
            whole[i] = lax.slice_in_dim(joined, 0, size, axis=dim)
        return step(*whole)

    return with_pass(of_replica, functools.partial(_run, parts=tuple(parts)))


def gathers(jaxpr: Jaxpr) -> bool:
    """Returns whether a program gathers weights."""
    return any(eqn.primitive is gather_p for eqn in walk(jaxpr.eqns))


def _run(closed: ClosedJaxpr, args: Sequence[Array], parts: Sequence[int] = ()) -> list[Array]:
    """Returns the outputs of a program, or of the body of a loop in it; see `with_gathers`."""
    flat = flattened(closed)
    stored = [flat.jaxpr.invars[i] for i in parts]
    program = _with_early_sums(opened(flat)) if parts else opened(flat)
    return _Evaluation(program, stored).outputs([*flat.consts, *args])


def _with_early_sums(jaxpr: Jaxpr) -> Jaxpr:
    """Returns the program of a replica with sums scattered as soon as the replica has its term."""
    ready: dict[Var, int] = {}
    places = []
    for i, eqn in enumerate(jaxpr.eqns):
        known = [ready.get(v, -1) for v in variables_of(eqn.invars)]
        can_move = not known or eqn.primitive.name in _OF_SUMS
        places.append(max(known, default=-1) if can_move else i)
        ready.update(dict.fromkeys(eqn.outvars, places[-1]))
    order = sorted(range(len(places)), key=places.__getitem__)
    return jaxpr_of(jaxpr.invars, jaxpr.outvars, [jaxpr.eqns[i] for i in order])


@final
@dataclass(eq=False, slots=True)
class _Weight:
    """A weight that a step gathers.

    Attributes:
        stored: The variable of its parts.
        num_bytes: Size of the whole weight.
        forms: The equations that gather it and make other forms of it, in order.
        uses: Positions of the equations that use it, in order.
        again: The position from which it is gathered once more; None if once is enough.
    """

    stored: Var
    num_bytes: int
    forms: list[Equation] = field(default_factory=list)
    uses: list[int] = field(default_factory=list)
    again: int | None = None

    def gathered(self) -> list[Var]:
        """Returns the variables of the whole weight."""
        first = self.forms[0]
        if first.primitive is gather_p:
            return [v for eqn in self.forms if eqn.primitive is gather_p for v in eqn.outvars]
        dim, whole, converted = first.params["all_gather_dimension"], [*first.outvars], []
        for eqn in self.forms[1:]:
            if eqn.invars[0] in whole and _is_start_of(eqn, dim):
                whole += eqn.outvars
            elif eqn.invars[0] in whole and eqn.primitive is lax.convert_element_type_p:
                converted += [v for v in eqn.outvars if aval_of(v).dtype != bool]
        return [*whole, *converted]

    def rows(self, eqn: Equation, stored: Array, ids: Array) -> Array:
        """Returns what an equation takes from the rows of the weight, of which only these move.

        Every device looks up the rows, or parts of them, that it holds.
        """
        first = self.forms[0]
        if first.primitive is not gather_p:
            part = stored.astype(aval_of(eqn.invars[0]).dtype)
            return _rows_for_replicas(eqn, part, ids, first.params["all_gather_dimension"])
        parts: NamedSharding = first.params["parts"]
        whole = NamedSharding(parts.mesh, P())
        held = lax.with_sharding_constraint(stored, parts)
        all_ids = lax.with_sharding_constraint(ids, whole)
        (rows,) = evaluate_one(eqn, [held, all_ids])
        return lax.with_sharding_constraint(rows, whole)


def _is_start_of(eqn: Equation, dim: int) -> bool:
    """Returns whether an equation only leaves out the end of a dim, such as padding."""
    if eqn.primitive.name != "slice" or any(eqn.params["start_indices"]):
        return False
    shape, left = (shape_of(v) for v in (eqn.invars[0], eqn.outvars[0]))
    is_dense = set(eqn.params["strides"] or (1,)) == {1}
    same = [a == b for a, b in zip(shape, left, strict=True)]
    return is_dense and all(same[:dim] + same[dim + 1 :])


def _rows_for_replicas(eqn: Equation, part: Array, ids: Array, dim: int) -> Array:
    """Returns the rows that a replica takes from a table, of which each replica has a part.

    Args:
        eqn: The equation that takes them from the whole table.
        part: The part of this replica.
        ids: What the equation gets as ids.
        dim: The dim along which the table is divided.
    """
    params, shape = dict(eqn.params), shape_of(eqn.invars[0])
    params["slice_sizes"] = (1, *part.shape[1:])
    largest = jnp.iinfo(ids.dtype).max
    known = jnp.clip(ids, 0, min(shape[0] - 1, largest)).astype(jnp.int32)
    is_there = (ids >= 0) & (ids <= min(shape[0] - 1, largest))
    is_filled = params["mode"] is GatherScatterMode.FILL_OR_DROP
    # In every other mode, JAX reads the nearest row.
    of_all = lax.all_gather(
        jnp.where(is_there, known, shape[0]) if is_filled else known, REPLICA_AXIS
    )
    if dim == 0:
        params |= {"mode": GatherScatterMode.FILL_OR_DROP, "fill_value": 0}
        of_all = of_all - part.shape[0] * lax.axis_index(REPLICA_AXIS)
    part_rows = jax.vmap(lambda row_ids: eqn.primitive.bind(part, row_ids, **params))(of_all)
    offsets = params["dimension_numbers"].offset_dims
    if dim:
        joined = 1 + offsets[dim - 1]
        (rows,) = lax.all_to_all(part_rows, REPLICA_AXIS, 0, joined, tiled=True)
        return lax.slice_in_dim(rows, 0, shape[dim], axis=joined - 1)
    rows = lax.psum_scatter(part_rows, REPLICA_AXIS)
    if not is_filled:
        return rows
    others = [i for i in range(rows.ndim) if i not in offsets]
    nothing = _filling(eqn, rows.dtype)
    return jnp.where(lax.broadcast_in_dim(is_there[..., 0], rows.shape, others), rows, nothing)


def _filling(eqn: Equation, dtype: np.dtype) -> Array:
    """Returns what an equation takes in place of rows that are not there."""
    params = {**eqn.params, "slice_sizes": (1,), "dimension_numbers": _OF_VECTOR}
    return eqn.primitive.bind(jnp.zeros(1, dtype), jnp.full(1, 2, jnp.int32), **params)


class _Gather(NamedTuple):
    """A gather of a weight before the equation at a position."""

    position: int
    weight: _Weight


class _Wait(NamedTuple):
    """What a gather waits for: an operand of the equation at a position."""

    position: int
    operand: Var


@final
class _Evaluation:
    """The evaluation of a program without calls.

    Args:
        jaxpr: The program.
        parts: The inputs that a replica gathers.
    """

    def __init__(self, jaxpr: Jaxpr, parts: Collection[Var]) -> None:
        self._jaxpr = jaxpr
        self._parts = frozenset(parts)
        # By variable: the weight of which it is a form, and the one whose parts it has.
        self._weights: dict[Var, _Weight] = {}
        self._stored: dict[Var, _Weight] = {}
        # Positions of the equations that make a form.
        self._makes_form: set[int] = set()
        # By position: the weight of which an equation takes a few rows.
        self._takes_rows: dict[int, _Weight] = {}
        for i, eqn in enumerate(jaxpr.eqns):
            self._note(i, eqn)
        for weight in variables_of(jaxpr.outvars):
            if weight in self._weights:
                self._weights[weight].uses.append(len(jaxpr.eqns))
        weights = list(self._stored.values())
        _find_gaps(weights)
        self._waits = self._found_waits(weights)

    def _note(self, position: int, eqn: Equation) -> None:
        operands = variables_of(eqn.invars)
        known = self._weights.get(operands[0]) if operands else None
        if known is not None and _takes_few_rows(eqn) and operands[0] in known.gathered():
            self._takes_rows[position] = known
            operands, known = operands[1:], None
        is_gather = eqn.primitive is gather_p or (
            eqn.primitive.name == "all_gather" and not self._parts.isdisjoint(operands)
        )
        if is_gather and known is None and operands:
            stored, aval = operands[0], aval_of(eqn.outvars[0])
            weight = _Weight(stored, int(aval.size) * aval.dtype.itemsize)
            known = self._stored.setdefault(stored, weight)
        elif known is None or not (is_gather or eqn.primitive.name in _FORMS):
            for weight in [self._weights[v] for v in operands if v in self._weights]:
                if weight.uses[-1:] != [position]:
                    weight.uses.append(position)
            return
        if known is not None:
            known.forms.append(eqn)
            self._makes_form.add(position)
            self._weights[eqn.outvars[0]] = known

    def _found_waits(self, weights: Sequence[_Weight]) -> dict[tuple[_Weight, int], _Wait]:
        """Returns what gathers wait for, by the weight and the position."""
        gathers = [
            _Gather(position, weight)
            for weight in weights
            for position in (*weight.uses[:1], weight.again)
            if position is not None
        ]
        gathers.sort(key=lambda gather: gather.position)
        sources = {*self._jaxpr.invars, *self._weights}
        most = _AHEAD * max((weight.num_bytes for weight in weights), default=0)
        waits: dict[tuple[_Weight, int], _Wait] = {}
        for k, (position, weight) in enumerate(gathers):
            left = most - weight.num_bytes
            for earlier in reversed(gathers[:k]):
                left -= earlier.weight.num_bytes
                if left < 0:
                    operand = self._activation(earlier.position, sources)
                    if operand is not None:
                        waits[weight, position] = _Wait(earlier.position, operand)
                    break
        return waits

    def _activation(self, position: int, sources: Collection[Var]) -> Var | None:
        """Returns a float operand of an equation that is neither an input nor a weight."""
        eqns = self._jaxpr.eqns
        atoms = eqns[position].invars if position < len(eqns) else self._jaxpr.outvars
        variables = [v for v in variables_of(atoms) if v not in sources]
        return next((v for v in variables if jnp.issubdtype(aval_of(v).dtype, jnp.floating)), None)

    def outputs(self, args: Sequence[Array]) -> list[Array]:
        """Returns the outputs for some inputs."""
        env: dict[Var, Array] = dict(zip(self._jaxpr.invars, args, strict=True))
        # Parts of gradients that no gather has waited for, with the positions that made them.
        complete: list[tuple[int, Array]] = []

        value = functools.partial(value_of, env)

        def gather(position: int, weight: _Weight) -> None:
            stored = env[weight.stored]
            wait = self._waits.get((weight, position))
            if wait is not None:
                early = [part for i, part in complete if i < wait.position]
                complete[:] = [(i, part) for i, part in complete if i >= wait.position]
                stored, *_ = lax.optimization_barrier((stored, env[wait.operand], *early))
            for eqn in weight.forms:
                is_first = eqn.invars[0] is weight.stored
                operands = [stored] if is_first else list(map(value, eqn.invars))
                env.update(zip(eqn.outvars, evaluate_one(eqn, operands), strict=True))

        def prepare(position: int, atoms: Sequence[Atom]) -> None:
            needed = [self._weights[v] for v in variables_of(atoms) if v in self._weights]
            for weight in dict.fromkeys(needed):
                if position in (weight.uses[0], weight.again):
                    gather(position, weight)

        for i, eqn in enumerate(self._jaxpr.eqns):
            if i in self._makes_form:
                continue
            table = self._takes_rows.get(i)
            if table is None:
                prepare(i, eqn.invars)
                if eqn.primitive.name in CONTROL_FLOW:
                    eqn = with_bodies(eqn, gathers, _run)
                results = evaluate_one(eqn, list(map(value, eqn.invars)))
            else:
                prepare(i, eqn.invars[1:])
                results = [table.rows(eqn, env[table.stored], value(eqn.invars[1]))]
            env.update(zip(eqn.outvars, results, strict=True))
            if eqn.primitive is scatter_p or eqn.primitive.name == "reduce_scatter":
                complete.append((i, results[0]))
        prepare(len(self._jaxpr.eqns), self._jaxpr.outvars)
        return list(map(value, self._jaxpr.outvars))


def _takes_few_rows(eqn: Equation) -> bool:
    """Returns whether an equation takes whole rows of its first operand, few of all."""
    return takes_rows(eqn) and are_few_rows(
        math.prod(shape_of(eqn.invars[1])[:-1]), shape_of(eqn.invars[0])
    )


def _find_gaps(weights: Sequence[_Weight]) -> None:
    """Finds between which of its uses each weight would be kept while most others are used."""
    uses = sorted((i, weight.num_bytes) for weight in weights for i in weight.uses)
    positions = [i for i, _ in uses]
    sums = [0, *itertools.accumulate(num_bytes for _, num_bytes in uses)]

    def used_between(first: int, last: int) -> int:
        start, end = bisect.bisect_right(positions, first), bisect.bisect_left(positions, last)
        return sums[max(start, end)] - sums[start]

    for weight in weights:
        gaps = [(used_between(*pair), pair[1]) for pair in itertools.pairwise(weight.uses)]
        num_bytes, position = max(gaps, key=lambda gap: gap[0], default=(0, 0))
        weight.again = position if num_bytes else None
