"""Updates the state of a replica program in parts, each on the device that holds it.

An optimizer computes the same on all replicas, from gradients that they have summed. Here the sums
are scattered instead, every device updates its part, and only the new weights are gathered. With a
momentum `m` of 4 elements in parts on two devices, the step

    { lambda ; w:f32[4] m:f32[4] x:f32[4]. let
        a:f32[4] = mul x w
        g:f32[4] = psum[replica] a
        b:f32[4] = mul 0.9 m
        c:f32[4] = add b g
        d:f32[4] = sub w c
      in (d, c) }

becomes

    { lambda ; w:f32[4] m:f32[4] x:f32[2,4]. let
        g:f32[4] = shard_map[in_specs=(P(), P("replica")) out_specs=(P("replica"),)
          jaxpr={ lambda ; w:f32[4] x:f32[1,4]. let
              e:f32[4] = squeeze x
              a:f32[4] = mul e w
              f:f32[2] = reduce_scatter[axis_name=('replica',)] a
            in (f,) }
        ] w x
        b:f32[4] = mul 0.9 m
        c:f32[4] = add b g
        d:f32[4] = sub w c
        h:f32[4] = sharding_constraint[P("replica")] d
        i:f32[4] = sharding_constraint[P()] h
        j:f32[4] = sharding_constraint[P("replica")] c
      in (i, j) }

The update is the second stage of `cut`. It runs outside of `shard_map`, on global arrays, so that
XLA divides whatever the optimizer does: a norm over all gradients stays a norm over all gradients.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from distributary.devices import REPLICA_AXIS, padded, shard_dim, shard_spec, whole_shards
from distributary.programs._logical_devices import laid_out
from distributary.programs._row_wise import adds_rows, are_few_rows, number_of, with_wide_ids
from distributary.programs._stages import Stages, flattened
from distributary.tracing import (
    Atom,
    Equation,
    aval_of,
    computed_from,
    evaluate_one,
    is_sum_of_replicas,
    jaxpr_of,
    leading_to,
    shape_of,
    variables_of,
)

# Operations that scale an operand, if they have no other that is an array.
_SCALING = frozenset({"convert_element_type", "div", "mul", "neg"})
_SUMS = frozenset({"add", "add_any", "sub"})


@final
@dataclass(frozen=True, slots=True)
class Taken:
    """What the update takes of a value of the replicas.

    Attributes:
        spec: The sharding of the value; `P()` if every replica has the whole.
        is_joined: Whether the value is what all replicas have, one after the other along dim 0, and
            not their sum.
    """

    spec: P
    is_joined: bool = False

    def of_replica(self, value: Array, num_replicas: int) -> Array:
        """Returns what a replica gives: its part of the sum, or a value that is not divided."""
        dim = shard_dim(self.spec)
        if dim is None or self.is_joined:
            return value
        return lax.psum_scatter(
            padded(value, dim, num_replicas), REPLICA_AXIS, scatter_dimension=dim, tiled=True
        )

    def whole(self, value: Array, shape: Sequence[int], mesh: Mesh) -> Array:
        """Returns the value, as a global array, of what the replicas give."""
        if self.is_joined:
            return laid_out(value, mesh, P())
        return whole_shards(value, shape, NamedSharding(mesh, self.spec))


def without_scattered_sums(
    stages: Stages, out_parts: Sequence[P], num_replicas: int
) -> tuple[Stages, list[Taken]]:
    """Leaves out the sums over all replicas that state in parts is computed from.

    A sum stays if something else in the first stage uses it. Of a sum of rows, such as the gradient
    of a table, the update takes the ids and rows of all replicas.

    Args:
        stages: The program of a replica.
        out_parts: For every output of the whole program, its sharding; `P()` if it is whole.
        num_replicas: Number of replicas.

    Returns:
        The stages with the operands of these sums in the cut, and how the update gets each value of
        the cut.
    """
    flat = flattened(stages.replica)
    jaxpr = flat.jaxpr
    num_results = len(stages.replica_outputs)
    made_by = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    operands = {
        v: operand
        for eqn in jaxpr.eqns
        if is_sum_of_replicas(eqn)
        for v, operand in zip(eqn.outvars, eqn.invars, strict=True)
    }
    used = {v for eqn in jaxpr.eqns for v in variables_of(eqn.invars)}
    used.update(variables_of(jaxpr.outvars[:num_results]))
    update = stages.update.jaxpr
    in_parts = [shard_dim(out_parts[i]) is not None for i in stages.update_outputs]
    _, needed = leading_to(update.eqns, itertools.compress(update.outvars, in_parts))
    results, taken = [*jaxpr.outvars[:num_results]], []
    scattered = set()
    # By the place in the cut: the equations that make its operand of rows.
    sums_of_rows: dict[int, list[Equation]] = {}
    cut_vars = update.invars[len(stages.update_inputs) :]
    for i, (v, var) in enumerate(zip(jaxpr.outvars[num_results:], cut_vars, strict=True)):
        is_sum = var in needed and not isinstance(v, Literal) and v in operands and v not in used
        spec = shard_spec(shape_of(v), num_replicas) if is_sum else P()
        if isinstance(v, Literal) or shard_dim(spec) is None:
            results.append(v)
            taken.append(Taken(spec))
            continue
        scattered.add(v)
        row_eqns = _made_of_rows(made_by, operands[v], num_replicas)
        if row_eqns:
            sums_of_rows[i] = row_eqns
            rows = _ids_and_rows(row_eqns)
            results += rows
            taken += [Taken(P(REPLICA_AXIS), is_joined=True)] * len(rows)
        else:
            results.append(operands[v])
            taken.append(Taken(spec))
    eqns = [eqn for eqn in jaxpr.eqns if not eqn.outvars or not scattered.issuperset(eqn.outvars)]
    first = ClosedJaxpr(jaxpr_of(jaxpr.invars, results, eqns, jaxpr.constvars), flat.consts)
    with_rows = _with_sums_of_rows(stages, sums_of_rows, num_replicas)
    return replace(stages, replica=first, update=with_rows, num_cut=len(taken)), taken


def _made_of_rows(
    made_by: Mapping[Var, Equation], operand: Atom, num_replicas: int
) -> list[Equation]:
    """Returns the equations that make a gradient of few rows, each with an id along dim 0.

    Some add rows to zeros, and the others scale and add up what these make, in floats that get no
    narrower. If the gradient is made in another way, there are none.
    """
    eqns: list[Equation] = []
    known: dict[Var, bool] = {}

    def is_made_of_rows(atom: Atom) -> bool:
        if isinstance(atom, Literal) or atom not in made_by:
            return False
        if atom not in known:
            eqn = made_by[atom]
            known[atom] = _is_wide(eqn) and (
                _adds_to_zeros(eqn, made_by)
                if adds_rows(eqn)
                else _is_linear(eqn) and all(map(is_made_of_rows, variables_of(eqn.invars)))
            )
            if known[atom]:
                eqns.append(eqn)
        return known[atom]

    if aval_of(operand).dtype not in (jnp.float32, jnp.float64) or not is_made_of_rows(operand):
        return []
    num_ids = sum(math.prod(shape_of(eqn.invars[1])[:-1]) for eqn in eqns if adds_rows(eqn))
    return eqns if are_few_rows(num_replicas * num_ids, shape_of(operand)) else []


def _is_wide(eqn: Equation) -> bool:
    """Returns whether a result is of floats that are not narrower than the operands."""
    result = aval_of(eqn.outvars[0]).dtype
    widths = [aval_of(v).dtype.itemsize for v in variables_of(eqn.invars) if shape_of(v)]
    is_float = all(jnp.issubdtype(aval_of(v).dtype, jnp.floating) for v in _floats_of(eqn))
    return is_float and (adds_rows(eqn) or result.itemsize >= max(widths, default=0))


def _floats_of(eqn: Equation) -> list[Atom]:
    """Returns the result and the operands without ids."""
    return [*eqn.outvars, *([eqn.invars[2]] if adds_rows(eqn) else eqn.invars)]


def _adds_to_zeros(eqn: Equation, made_by: Mapping[Var, Equation]) -> bool:
    """Returns whether an equation adds rows, each with an id along dim 0, to zeros."""
    base, ids = eqn.invars[0], shape_of(eqn.invars[1])
    zeros = None if isinstance(base, Literal) else made_by.get(base)
    if zeros is None or zeros.primitive.name != "broadcast_in_dim":
        return False
    has_ids = len(ids) > 1 and 0 not in eqn.params["dimension_numbers"].update_window_dims
    return has_ids and number_of(zeros.invars[0]) == 0


def _is_linear(eqn: Equation) -> bool:
    """Returns whether an equation adds arrays, or scales one by a constant."""
    arrays, name = variables_of(eqn.invars), eqn.primitive.name
    if name in _SUMS:
        return len(arrays) == len(eqn.invars)
    return name in _SCALING and len(arrays) == 1 and (name != "div" or eqn.invars[0] is arrays[0])


def _ids_and_rows(eqns: Sequence[Equation]) -> list[Atom]:
    """Returns the ids and rows of equations that `_made_of_rows` has returned."""
    return [atom for eqn in eqns if adds_rows(eqn) for atom in eqn.invars[1:]]


def _with_sums_of_rows(
    stages: Stages, sums: Mapping[int, Sequence[Equation]], num_replicas: int
) -> ClosedJaxpr:
    """Returns the update with ids and rows of all replicas in place of some sums."""
    if not sums:
        return stages.update
    num_inputs = len(stages.update_inputs)

    def update(*args: Array) -> list[Array]:
        left = iter(args[num_inputs:])
        values = [*args[:num_inputs]]
        for i in range(stages.num_cut):
            env: dict[Var, Array] = {}
            # Every sum is made in the dtype in which replicas add up.
            dtype = aval_of(stages.update.jaxpr.invars[num_inputs + i]).dtype
            for eqn in sums.get(i, ()):
                if adds_rows(eqn):
                    ids, rows = next(left), next(left)
                    zeros = jnp.zeros(shape_of(eqn.outvars[0]), dtype)
                    env[eqn.outvars[0]] = _with_rows_added(eqn, zeros, ids, rows.astype(dtype))
                elif eqn.primitive is lax.convert_element_type_p:
                    env[eqn.outvars[0]] = env[variables_of(eqn.invars)[0]]
                else:
                    operands = [
                        jnp.asarray(x.val, dtype) if isinstance(x, Literal) else env[x]
                        for x in eqn.invars
                    ]
                    (env[eqn.outvars[0]],) = evaluate_one(eqn, operands)
            values.append(env[sums[i][-1].outvars[0]] if i in sums else next(left))
        return jax.core.eval_jaxpr(stages.update.jaxpr, stages.update.consts, *values)

    avals: list[Any] = []
    for i, v in enumerate(stages.update.jaxpr.invars):
        eqns = sums.get(i - num_inputs)
        for aval in map(aval_of, [v] if eqns is None else _ids_and_rows(eqns)):
            rows = () if eqns is None else (num_replicas * aval.shape[0],)
            avals.append(jax.ShapeDtypeStruct((*rows, *aval.shape[len(rows) :]), aval.dtype))
    return jax.make_jaxpr(update)(*avals)


def _with_rows_added(eqn: Equation, zeros: Array, ids: Array, rows: Array) -> Array:
    """Returns what an equation makes of the rows of all replicas, which may share ids."""
    params = {**eqn.params, "unique_indices": False, "indices_are_sorted": False}
    return evaluate_one(eqn.replace(params=params), [zeros, with_wide_ids(ids), rows])[0]


def complete_in_parts(
    stages: Stages,
    values: Sequence[Array],
    outputs: Sequence[Array],
    taken: Sequence[Taken],
    in_parts: Sequence[P],
    out_parts: Sequence[P],
    mesh: Mesh,
    rewrite: Callable[[Callable[..., list[Array]], Sequence[Jaxpr]], Callable[..., list[Array]]],
) -> dict[int, Array]:
    """Runs the update, divided over the devices; returns the outputs of the whole program.

    Args:
        stages: What `without_scattered_sums` has returned.
        values: Inputs of the whole program.
        outputs: Outputs of the first stage.
        taken: What `without_scattered_sums` has returned, too.
        in_parts: The same for every input of the whole program; `P()` if it is whole.
        out_parts: The same for its outputs.
        mesh: Mesh with the axis `"replica"`.
        rewrite: Makes a function that evaluates a jaxpr faster.
    """
    num_results = len(stages.replica_outputs)
    cut_values = stages.replica.jaxpr.outvars[num_results:]
    whole = [
        one.whole(value, shape_of(v), mesh)
        for value, v, one in zip(outputs[num_results:], cut_values, taken, strict=True)
    ]
    results = stages.complete(values, [*outputs[:num_results], *whole], rewrite)
    update = stages.update.jaxpr
    specs = [in_parts[i] for i in stages.update_inputs]
    is_in_parts = [shard_dim(spec) is not None for spec in [*specs, *(one.spec for one in taken)]]
    divided = computed_from(update.eqns, itertools.compress(update.invars, is_in_parts))
    for i, output in zip(stages.update_outputs, update.outvars, strict=True):
        if not divided.isdisjoint(variables_of([output])):
            # Constrained before it is placed, so that XLA gathers new weights and not the state
            # they are computed from.
            spec = shard_spec(jnp.shape(results[i]), mesh.shape[REPLICA_AXIS], out_parts[i])
            results[i] = laid_out(results[i], mesh, spec)
        results[i] = laid_out(results[i], mesh, out_parts[i])
    return results
