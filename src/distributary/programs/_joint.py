"""Evaluates the programs of all replicas as one program, with the collectives joined by hand.

The replicas of an uneven batch have arrays of different shapes, which no SPMD program can hold.
They are evaluated side by side: each one runs until its next collective, and when all have arrived
there, the collective is computed from all operands. For replicas with 3 and 2 rows

    { lambda ; a:f32[3]. let                { lambda ; a:f32[2]. let
        b:f32[] = reduce_sum a                  b:f32[] = reduce_sum a
        c:f32[] = psum[replica] b               c:f32[] = psum[replica] b
      in (c,) }                               in (c,) }

become the program that every device runs:

    { lambda ; a:f32[3] b:f32[2]. let
        c:f32[] = reduce_sum a
        d:f32[] = reduce_sum b
        e:f32[] = add c d
      in (e, e) }

With a single replica a collective becomes nothing at all, which is how one-device strategies run.
"""

import itertools
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
from jax import Array, lax

from distributary.errors import ReplicaMismatchError, UnsupportedError
from distributary.jaxprs import (
    CONTROL_FLOW,
    AnyJaxpr,
    Equation,
    call_of,
    evaluate_all,
    evaluate_control_flow,
    open_jaxpr,
    value_of,
    walk,
)
from distributary.tracing import has_collective, is_collective, push

# A replica yields an equation that needs the other replicas, with its operands, and is sent the
# results.
Request: TypeAlias = tuple[Equation, list[Array]]
Replica: TypeAlias = Generator[Request, list[Array], list[Array]]


def evaluate_jointly(
    jaxprs: Sequence[AnyJaxpr], args: Sequence[Sequence[Array]]
) -> list[list[Array]]:
    """Evaluates one jaxpr per replica and returns the outputs of each.

    Args:
        jaxprs: The program of each replica, in replica order, without markers.
        args: Values of the inputs, per replica.

    Raises:
        ReplicaMismatchError: if the replicas disagree on a collective or on its shapes.
    """
    replicas = [_replica(jaxpr, inputs) for jaxpr, inputs in zip(jaxprs, args, strict=True)]
    results: list[list[Array] | None] = [None] * len(replicas)
    replies: list[Any] = [None] * len(replicas)
    while True:
        requests: list[Request | None] = []
        for i, replica in enumerate(replicas):
            try:
                requests.append(replica.send(replies[i]))
            except StopIteration as stop:
                results[i] = stop.value
                requests.append(None)
        waiting = [request for request in requests if request is not None]
        if not waiting:
            return [result for result in results if result is not None]
        names = {request[0].primitive.name for request in waiting}
        if len(waiting) < len(replicas) or len(names) > 1:
            at = [
                f"replica {i} "
                + ("ends" if request is None else f"waits in {request[0].primitive.name}")
                for i, request in enumerate(requests)
            ]
            raise ReplicaMismatchError(
                f"The replicas do not run the same collectives: {', '.join(at)}. Do not let Python"
                " branches on the replica id or on the size of an uneven batch decide whether"
                " all_reduce, all_gather or an aggregating assignment runs."
            )
        replies = _join([r[0] for r in waiting], [r[1] for r in waiting])


def _replica(program: AnyJaxpr, args: Sequence[Array]) -> Replica:
    jaxpr, consts = open_jaxpr(program)
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    for is_joined, eqns in itertools.groupby(jaxpr.eqns, _is_joined):
        if not is_joined:
            evaluate_all(list(eqns), env)
            continue
        for eqn in eqns:
            operands = [value_of(env, atom) for atom in eqn.invars]
            call = call_of(eqn)
            if call is not None:
                results = yield from _replica(call, operands)
            else:
                results = yield eqn, operands
            env.update(zip(eqn.outvars, results, strict=True))
    return [value_of(env, atom) for atom in jaxpr.outvars]


def _is_joined(eqn: Equation) -> bool:
    return any(
        is_collective(inner) or inner.primitive.name == "axis_index" for inner in walk([eqn])
    )


def _join(eqns: list[Equation], operands: list[list[Array]]) -> list[list[Array]]:
    """Returns the results of one joined equation for every replica."""
    name = eqns[0].primitive.name
    if name == "axis_index":
        return [[jnp.int32(i)] for i in range(len(eqns))]
    if name in ("while", "cond") and len(eqns) > 1 and not has_collective(eqns[0]):
        raise UnsupportedError(
            f"jax.lax.axis_index inside {name!r} is not supported on an uneven batch. Use"
            " get_replica_context().replica_id_in_sync_group."
        )
    lengths = [eqn.params["length"] for eqn in eqns] if name == "scan" else []
    if len(set(lengths)) > 1:
        raise ReplicaMismatchError(
            "A jax.lax.scan with a collective in its body has lengths"
            f" {lengths} on the replicas of an uneven batch; the lengths must"
            " agree. Move the collective out of the scan over examples."
        )
    if name in CONTROL_FLOW:
        # Conditions and predicates are the same on all replicas: the divergence analysis refuses
        # others.
        body = lambda jaxprs, args, _: (evaluate_jointly(jaxprs, args), ())
        return evaluate_control_flow(eqns, operands, (), body)[0]
    rule = _RULES.get(name)
    if rule is None:
        raise UnsupportedError(
            f"{name!r} over the replica axis is not supported on an uneven batch or on one"
            " replica. Use get_replica_context().all_reduce or all_gather."
        )
    if len(eqns) > 1 and any(eqn.params.get("axis_index_groups") is not None for eqn in eqns):
        raise UnsupportedError(
            f"{name!r} with axis_index_groups is not supported on an uneven batch. Reduce over all"
            " replicas."
        )
    return [[result] for result in rule(eqns[0].params, [value for (value,) in operands])]


def _same_shapes(values: list[Array], what: str) -> None:
    for i, value in enumerate(values):
        if value.shape != values[0].shape:
            raise ReplicaMismatchError(
                f"{what}: replica {i} has shape {value.shape}, but replica 0 has"
                f" {values[0].shape}; all replicas must agree. The batch is uneven, so values with"
                " one entry per example differ in length: reduce each replica's value to one shape"
                " first (jnp.sum over the examples), or use all_gather."
            )


def _reduction(
    combine: Callable[[Array, Array], Array], reduce: Callable[..., Array]
) -> Callable[..., list[Array]]:
    def rule(params: Any, values: list[Array]) -> list[Array]:
        # Numbers among the axes come from `jax.vmap`, for an axis of its own.
        dims = tuple([axis for axis in params["axes"] if isinstance(axis, int)])
        values = [reduce(value, dims) for value in values] if dims else values
        _same_shapes(values, "all_reduce")
        # XLA would take out a common factor, 0.5 x + 0.5 y -> 0.5 (x + y), and the sum of a mean
        # could then exceed the largest number. A barrier for each, which keeps their rows apart.
        values = [lax.optimization_barrier(value) for value in values]
        result = values[0]
        for value in values[1:]:
            result = combine(result, value)
        return [result] * len(values)

    return rule


def _gather(params: Any, values: list[Array]) -> list[Array]:
    dim = params["all_gather_dimension"]
    if params["tiled"]:
        return [jnp.concatenate(values, dim)] * len(values)
    _same_shapes(values, "all_gather")
    return [jnp.stack(values, dim)] * len(values)


def _scatter(params: Any, values: list[Array]) -> list[Array]:
    _same_shapes(values, "reduce_scatter")
    total = sum(values[1:], values[0])
    dim = params["scatter_dimension"]
    parts = jnp.split(total, len(values), dim)
    return parts if params["tiled"] else [jnp.squeeze(part, dim) for part in parts]


_RULES: dict[str, Callable[..., list[Array]]] = {
    "psum": _reduction(lax.add, jnp.sum),
    "pmax": _reduction(lax.max, jnp.max),
    "pmin": _reduction(lax.min, jnp.min),
    "all_gather": _gather,
    "reduce_scatter": _scatter,
    "push": lambda params, values: [push(value) for value in values],
}
