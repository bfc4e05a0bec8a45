"""Updates the state of a replica program in parts, each on the device that holds it.

An optimizer computes the same on all replicas, from gradients that they have summed. Here the sums
are scattered instead, every device updates its part, and only the new weights are gathered. With a
momentum `m` of 4 elements in parts on two devices, the body

    { lambda ; w:f32[4] m:f32[4] x:f32[1,4]. let
        e:f32[4] = squeeze x
        a:f32[4] = mul e w
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
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from distributary.devices import REPLICA_AXIS, padded, shard_dim, shard_spec, whole_shards
from distributary.programs._logical_devices import eval_on_replica
from distributary.programs._stages import Stages, cut
from distributary.tracing import (
    computed_from,
    is_sum_of_replicas,
    jaxpr_of,
    leading_to,
    opened,
    shape_of,
    variables_of,
)


def sharded_map(
    body: Callable[..., Sequence[Array]],
    mesh: Mesh,
    in_specs: Sequence[P],
    out_specs: Sequence[P],
    in_parts: Sequence[P],
    out_parts: Sequence[P],
) -> Callable[..., list[Array]]:
    """Maps a body over the mesh like `jax.shard_map`; every device holds only a part of the state.

    Args:
        body: Program of one replica, from arrays to arrays, in which the state is whole.
        mesh: Mesh with the axis `"replica"`.
        in_specs: The part of every argument that a replica receives, `P()` or `P(..., "replica")`.
        out_specs: The same for the results.
        in_parts: Sharding of the arguments outside, if it differs from the part that a replica
            receives, else `P()`.
        out_parts: The same for the results.

    Returns:
        A function of global arrays, for use in `jax.jit`.
    """

    def run(*args: Array) -> list[Array]:
        num_replicas = mesh.shape[REPLICA_AXIS]
        local = [_aval_of_one(x, s, num_replicas) for x, s in zip(args, in_specs, strict=True)]
        closed = jax.make_jaxpr(body, axis_env=[(REPLICA_AXIS, num_replicas)])(*local)
        whole = [P()] * len(closed.consts)
        return _run_stages(
            opened(closed),
            mesh,
            [*closed.consts, *args],
            [*whole, *in_specs],
            out_specs,
            [*whole, *in_parts],
            out_parts,
        )

    return run


def _aval_of_one(value: Array, spec: P, num_replicas: int) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype that one replica receives of a global array."""
    aval = jax.typeof(value)
    shape = list(aval.shape)
    dim = shard_dim(spec)
    if dim is not None:
        shape[dim] //= num_replicas
    return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def _run_stages(
    jaxpr: Jaxpr,
    mesh: Mesh,
    args: Sequence[Array],
    in_specs: Sequence[P],
    out_specs: Sequence[P],
    in_parts: Sequence[P],
    out_parts: Sequence[P],
) -> list[Array]:
    num_replicas = mesh.shape[REPLICA_AXIS]
    stages = cut(jaxpr, [shard_dim(spec) is not None for spec in in_specs], num_replicas)
    num_results = len(stages.replica_outputs)
    cut_values = stages.replica.jaxpr.outvars[num_results:]
    scattered = _scattered(stages, [out_parts[i] for i in stages.update_outputs], num_replicas)
    dims = [shard_dim(spec) for spec in scattered]
    sums = {v for v, dim in zip(cut_values, dims, strict=True) if dim is not None}
    consts = stages.replica.consts
    replica = opened(ClosedJaxpr(_without_sums(stages.replica.jaxpr, sums), consts))

    def of_replica(*own: Array) -> list[Array]:
        outs = eval_on_replica(replica, lax.axis_index(REPLICA_AXIS), [*consts, *own])
        taken = [
            value if dim is None else _scatter(value, dim, num_replicas)
            for value, dim in zip(outs[num_results:], dims, strict=True)
        ]
        return [*outs[:num_results], *taken]

    outs = jax.shard_map(
        of_replica,
        mesh=mesh,
        in_specs=tuple([in_specs[i] for i in stages.replica_inputs]),
        out_specs=[*(out_specs[i] for i in stages.replica_outputs), *scattered],
        check_vma=False,
        axis_names={REPLICA_AXIS},
    )(*(args[i] for i in stages.replica_inputs))
    taken = [
        whole_shards(value, shape_of(v), NamedSharding(mesh, spec))
        for value, v, spec in zip(outs[num_results:], cut_values, scattered, strict=True)
    ]
    updated = jax.core.eval_jaxpr(
        stages.update.jaxpr,
        stages.update.consts,
        *(args[i] for i in stages.update_inputs),
        *taken,
    )

    def placed(value: Array, spec: P) -> Array:
        return lax.with_sharding_constraint(value, NamedSharding(mesh, spec))

    results: dict[int, Array] = {}
    for i, value in zip(stages.replica_outputs, outs, strict=False):
        results[i] = value if shard_dim(out_parts[i]) is None else placed(value, out_parts[i])
    update = stages.update.jaxpr
    is_in_parts = [
        *(shard_dim(in_parts[i]) is not None for i in stages.update_inputs),
        *(dim is not None for dim in dims),
    ]
    divided = computed_from(update.eqns, itertools.compress(update.invars, is_in_parts))
    for i, value, output in zip(stages.update_outputs, updated, update.outvars, strict=True):
        if not divided.isdisjoint(variables_of([output])):
            # Constrained before they are placed, so that XLA gathers new weights and not the state
            # they are computed from.
            value = placed(value, shard_spec(jnp.shape(value), num_replicas))
        results[i] = placed(value, out_parts[i])
    return [results[i] for i in range(len(out_specs))]


def _scattered(stages: Stages, out_parts: Sequence[P], num_replicas: int) -> list[P]:
    """Returns how every value of the cut is scattered; `P()` if every replica has the whole.

    Scattered are sums over all replicas that state in parts is computed from, unless something else
    in the first stage uses them.
    """
    jaxpr = stages.replica.jaxpr
    num_results = len(stages.replica_outputs)
    sums = {v for eqn in jaxpr.eqns if is_sum_of_replicas(eqn) for v in eqn.outvars}
    sums -= {v for eqn in jaxpr.eqns for v in variables_of(eqn.invars)}
    sums -= set(variables_of(jaxpr.outvars[:num_results]))
    update = stages.update.jaxpr
    in_parts = [shard_dim(spec) is not None for spec in out_parts]
    _, needed = leading_to(update.eqns, itertools.compress(update.outvars, in_parts))
    given = update.invars[len(stages.update_inputs) :]
    taken = zip(jaxpr.outvars[num_results:], given, strict=True)
    return [
        shard_spec(shape_of(v), num_replicas) if own in needed and v in sums else P()
        for v, own in taken
    ]


def _without_sums(jaxpr: Jaxpr, sums: set[Var]) -> Jaxpr:
    """Returns the first stage with the operands of `sums` in their place."""
    operands = {
        v: operand
        for eqn in jaxpr.eqns
        for v, operand in zip(eqn.outvars, eqn.invars, strict=False)
        if v in sums
    }
    eqns = [eqn for eqn in jaxpr.eqns if sums.isdisjoint(eqn.outvars)]
    outs = [v if isinstance(v, Literal) else operands.get(v, v) for v in jaxpr.outvars]
    return jaxpr_of(jaxpr.invars, outs, eqns, jaxpr.constvars)


def _scatter(value: Array, dim: int, num_replicas: int) -> Array:
    """Returns this replica's part of the sum of `value` over the replicas."""
    return lax.psum_scatter(
        padded(value, dim, num_replicas), REPLICA_AXIS, scatter_dimension=dim, tiled=True
    )
