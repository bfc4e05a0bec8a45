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
from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, Literal
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from distributary.devices import REPLICA_AXIS, padded, shard_dim, shard_spec, whole_shards
from distributary.programs._logical_devices import laid_out
from distributary.programs._stages import Stages
from distributary.tracing import (
    computed_from,
    is_sum_of_replicas,
    jaxpr_of,
    leading_to,
    shape_of,
    variables_of,
)


def without_scattered_sums(
    stages: Stages, out_parts: Sequence[P], num_replicas: int
) -> tuple[Stages, list[P]]:
    """Leaves out the sums over all replicas that state in parts is computed from.

    A sum stays if something else in the first stage uses it.

    Args:
        stages: The program of a replica.
        out_parts: For every output of the whole program, its sharding; `P()` if it is whole.
        num_replicas: Number of replicas.

    Returns:
        The stages with the operands of these sums in the cut, and for each value of the cut the
        sharding that the update gets it in; `P()` if every replica has the whole.
    """
    jaxpr, num_results = stages.replica.jaxpr, len(stages.replica_outputs)
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
    results, specs = [*jaxpr.outvars[:num_results]], []
    scattered = set()
    given = update.invars[len(stages.update_inputs) :]
    for v, own in zip(jaxpr.outvars[num_results:], given, strict=True):
        is_sum = own in needed and not isinstance(v, Literal) and v in operands and v not in used
        specs.append(shard_spec(shape_of(v), num_replicas) if is_sum else P())
        is_scattered = is_sum and shard_dim(specs[-1]) is not None
        results.append(operands[v] if is_scattered and not isinstance(v, Literal) else v)
        scattered.update([v] if is_scattered else [])
    eqns = [eqn for eqn in jaxpr.eqns if not eqn.outvars or not scattered.issuperset(eqn.outvars)]
    first = jaxpr_of(jaxpr.invars, results, eqns, jaxpr.constvars)
    return replace(stages, replica=ClosedJaxpr(first, stages.replica.consts)), specs


def scattered(value: Array, spec: P, num_replicas: int) -> Array:
    """Returns this replica's part of the sum of a value; the value itself if it is not divided."""
    dim = shard_dim(spec)
    if dim is None:
        return value
    return lax.psum_scatter(
        padded(value, dim, num_replicas), REPLICA_AXIS, scatter_dimension=dim, tiled=True
    )


def complete_in_parts(
    stages: Stages,
    values: Sequence[Array],
    made: Sequence[Array],
    specs: Sequence[P],
    in_parts: Sequence[P],
    out_parts: Sequence[P],
    mesh: Mesh,
) -> dict[int, Array]:
    """Runs the update, divided over the devices; returns the outputs of the whole program.

    Args:
        stages: What `without_scattered_sums` has returned.
        values: Inputs of the whole program.
        made: Outputs of the first stage.
        specs: For every value of the cut, its sharding.
        in_parts: The same for every input of the whole program; `P()` if it is whole.
        out_parts: The same for its outputs.
        mesh: Mesh with the axis `"replica"`.
    """
    num_results = len(stages.replica_outputs)
    cut_values = stages.replica.jaxpr.outvars[num_results:]
    taken = [
        whole_shards(value, shape_of(v), NamedSharding(mesh, spec))
        for value, v, spec in zip(made[num_results:], cut_values, specs, strict=True)
    ]
    results = stages.complete(values, [*made[:num_results], *taken])
    update = stages.update.jaxpr
    given = [*(in_parts[i] for i in stages.update_inputs), *specs]
    is_in_parts = [shard_dim(spec) is not None for spec in given]
    divided = computed_from(update.eqns, itertools.compress(update.invars, is_in_parts))
    for i, output in zip(stages.update_outputs, update.outvars, strict=True):
        if not divided.isdisjoint(variables_of([output])):
            # Constrained before it is placed, so that XLA gathers new weights and not the state
            # they are computed from.
            spec = shard_spec(jnp.shape(results[i]), mesh.shape[REPLICA_AXIS], out_parts[i])
            results[i] = laid_out(results[i], mesh, spec)
        results[i] = laid_out(results[i], mesh, out_parts[i])
    return results
