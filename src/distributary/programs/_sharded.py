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

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import final

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from distributary.devices import REPLICA_AXIS, padded, shard_dim, shard_spec, whole_shards
from distributary.jaxprs import aval_of, computed_from, jaxpr_of, leading_to, shape_of, variables_of
from distributary.programs._patches import Term
from distributary.programs._program import laid_out
from distributary.programs._sparse_gradients import with_terms
from distributary.programs._stages import Stages, flattened
from distributary.tracing import is_sum_of_replicas


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
    operands = {eqn.outvars[0]: eqn.invars[0] for eqn in jaxpr.eqns if is_sum_of_replicas(eqn)}
    used = {v for eqn in jaxpr.eqns for v in variables_of(eqn.invars)}
    used.update(variables_of(jaxpr.outvars[:num_results]))
    update = stages.update.jaxpr
    in_parts = [shard_dim(out_parts[i]) is not None for i in stages.update_outputs]
    _, needed = leading_to(update.eqns, itertools.compress(update.outvars, in_parts))
    results, scattered, specs = list(jaxpr.outvars), set(), []
    cut_vars = update.invars[len(stages.update_inputs) :]
    for i, var in enumerate(cut_vars, num_results):
        v = results[i]
        is_sum = var in needed and not isinstance(v, Literal) and v in operands and v not in used
        specs.append(shard_spec(shape_of(v), num_replicas) if is_sum else P())
        if not isinstance(v, Literal) and shard_dim(specs[-1]) is not None:
            scattered.add(v)
            results[i] = operands[v]
    eqns = [eqn for eqn in jaxpr.eqns if scattered.isdisjoint(eqn.outvars)]
    first = ClosedJaxpr(jaxpr_of(jaxpr.invars, results, eqns, jaxpr.constvars), flat.consts)
    return _with_rows(replace(stages, replica=first), specs, num_replicas)


def _with_rows(stages: Stages, specs: Sequence[P], num_replicas: int) -> tuple[Stages, list[Taken]]:
    """Puts ids and rows in the place of sums of few rows.

    Args:
        stages: The program, with the operands of sums in the cut.
        specs: The sharding of each sum in the cut; `P()` for other values.
        num_replicas: Number of replicas.
    """
    update, num_inputs = stages.update, len(stages.update_inputs)
    num_results, cut_vars = len(stages.replica_outputs), update.jaxpr.invars[num_inputs:]
    wide = [
        i
        for i, (v, spec) in enumerate(zip(cut_vars, specs, strict=True), num_results)
        if shard_dim(spec) is not None and aval_of(v).dtype in (jnp.float32, jnp.float64)
    ]
    replica, num_terms = with_terms(stages.replica, wide, num_replicas)
    counts = [num_terms.get(i, 0) for i in range(num_results, num_results + len(specs))]
    taken: list[Taken] = []
    for spec, count in zip(specs, counts, strict=True):
        of_rows = [Taken(P(REPLICA_AXIS), is_joined=True)] * (2 * count)
        taken += of_rows or [Taken(spec)]
    if not num_terms:
        return stages, taken

    def update_with_sums(*args: Array) -> list[Array]:
        left = iter(args[num_inputs:])
        values = [*args[:num_inputs]]
        for v, count in zip(cut_vars, counts, strict=True):
            if count == 0:
                values.append(next(left))
                continue
            zeros = jnp.zeros(shape_of(v), aval_of(v).dtype)
            tables = [Term(next(left), next(left)).added_to(zeros) for _ in range(count)]
            values.append(functools.reduce(operator.add, tables))
        return jax.core.eval_jaxpr(update.jaxpr, update.consts, *values)

    avals = update.in_avals[:num_inputs]
    for aval, one in zip(replica.out_avals[num_results:], taken, strict=True):
        of_all = (num_replicas * aval.shape[0], *aval.shape[1:]) if one.is_joined else aval.shape
        avals.append(aval.update(shape=of_all))
    closed = jax.make_jaxpr(update_with_sums)(*avals)
    return replace(stages, replica=replica, update=closed), taken


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
