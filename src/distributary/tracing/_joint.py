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

from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Jaxpr, Literal

from distributary.errors import ReplicaMismatchError, UnsupportedError
from distributary.tracing._divergence import has_collective, is_collective
from distributary.tracing._interpreter import evaluate_chunk, last_uses
from distributary.tracing._jaxprs import (
    AnyJaxpr,
    Atom,
    Equation,
    aval_of,
    call_of,
    open_jaxpr,
    parts_of_scan,
    parts_of_while,
    variables_of,
    walk,
)
from distributary.tracing._markers import push

# A replica yields an equation that needs the other replicas, with its operands, and is sent the
# results.
Replica: TypeAlias = Generator[tuple[Equation, list[Array]], list[Array], list[Array]]


def evaluate_jointly(
    jaxprs: Sequence[Jaxpr], consts: Sequence[Sequence[Array]], args: Sequence[Sequence[Array]]
) -> list[list[Array]]:
    """Evaluates one jaxpr per replica and returns the outputs of each.

    Args:
        jaxprs: The program of each replica, in replica order, without markers.
        consts: Values of the constants, per replica.
        args: Values of the inputs, per replica.

    Raises:
        ReplicaMismatchError: if the replicas disagree on a collective or on its shapes.
    """
    replicas = [
        _replica(jaxpr, closed, values)
        for jaxpr, closed, values in zip(jaxprs, consts, args, strict=True)
    ]
    results: list[list[Array] | None] = [None] * len(replicas)
    replies: list[Any] = [None] * len(replicas)
    while True:
        requests: list[tuple[Equation, list[Array]] | None] = []
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
            raise ReplicaMismatchError(
                "The replicas of an uneven batch do not run the same collectives: one waits in"
                f" {', '.join(sorted(names))} and another does not get there. Do not let Python"
                " branches on the batch size decide whether all_reduce, all_gather or an"
                " aggregating assignment runs."
            )
        replies = _join([r[0] for r in waiting], [r[1] for r in waiting])


def _replica(jaxpr: Jaxpr, consts: Sequence[Array], args: Sequence[Array]) -> Replica:
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def value(atom: Atom) -> Array:
        if isinstance(atom, Literal):
            # Literals can be Python numbers, and the rules below need a shape.
            return jnp.asarray(atom.val, aval_of(atom).dtype)
        return env[atom]

    last_use = last_uses(jaxpr.eqns, variables_of(jaxpr.outvars))
    index = 0
    while index < len(jaxpr.eqns):
        eqn = jaxpr.eqns[index]
        end = index
        while end < len(jaxpr.eqns) and not _is_joined(jaxpr.eqns[end]):
            end += 1
        if end > index:
            evaluate_chunk(jaxpr.eqns[index:end], env, last_use, end)
            index = end
            continue
        operands = [value(atom) for atom in eqn.invars]
        call = call_of(eqn)
        if call is not None:
            inner, closed = open_jaxpr(call)
            results = yield from _replica(inner, closed, operands)
        else:
            results = yield eqn, operands
        env.update(zip(eqn.outvars, results, strict=True))
        index += 1
    return [value(atom) for atom in jaxpr.outvars]


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
    if name == "scan":
        return _join_scan(eqns, operands)
    if name == "while":
        return _join_while(eqns, operands)
    if name == "cond":
        return _join_cond(eqns, operands)
    rule = _RULES.get(name)
    if rule is None:
        raise UnsupportedError(
            f"{name!r} over the replica axis is not supported on an uneven batch or on one"
            " replica. Use get_replica_context().all_reduce or all_gather."
        )
    _check_groups(eqns)
    columns = zip(*operands, strict=True)
    results = [rule(eqns[0].params, list(column)) for column in columns]
    return [[column[i] for column in results] for i in range(len(eqns))]


def _check_groups(eqns: list[Equation]) -> None:
    for eqn in eqns:
        if eqn.params.get("axis_index_groups") is not None and len(eqns) > 1:
            raise UnsupportedError(
                f"{eqn.primitive.name!r} with axis_index_groups is not supported on an uneven"
                " batch. Reduce over all replicas."
            )


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


def _bodies(
    eqns: list[Equation], body: Callable[[Equation], AnyJaxpr]
) -> Callable[[Sequence[Sequence[Array]]], list[list[Array]]]:
    """Returns a function that evaluates a jaxpr in each equation, from the inputs of each."""
    jaxprs, consts = zip(*[open_jaxpr(body(eqn)) for eqn in eqns], strict=True)
    return lambda args: evaluate_jointly(jaxprs, consts, args)


def _join_scan(eqns: list[Equation], operands: list[list[Array]]) -> list[list[Array]]:
    params = [eqn.params for eqn in eqns]
    if len({p["length"] for p in params}) > 1:
        raise ReplicaMismatchError(
            "A jax.lax.scan with a collective in its body has lengths"
            f" {[p['length'] for p in params]} on the replicas of an uneven batch; the lengths must"
            " agree. Move the collective out of the scan over examples."
        )
    run = _bodies(eqns, lambda eqn: eqn.params["jaxpr"])
    parts = [parts_of_scan(eqn, values) for eqn, values in zip(eqns, operands, strict=True)]
    consts = [part[0] for part in parts]

    def body(carry: list[list[Array]], xs: list[list[Array]]) -> Any:
        outs = run([[*c, *state, *x] for c, state, x in zip(consts, carry, xs, strict=True)])
        after = [out[: len(state)] for state, out in zip(carry, outs, strict=True)]
        ys = [out[len(state) :] for state, out in zip(carry, outs, strict=True)]
        return after, ys

    carry, ys = lax.scan(
        body,
        [part[1] for part in parts],
        [part[2] for part in parts],
        length=params[0]["length"],
        reverse=params[0]["reverse"],
        unroll=params[0]["unroll"],
    )
    return [[*c, *y] for c, y in zip(carry, ys, strict=True)]


def _join_while(eqns: list[Equation], operands: list[list[Array]]) -> list[list[Array]]:
    run_conditions = _bodies(eqns, lambda eqn: eqn.params["cond_jaxpr"])
    run_bodies = _bodies(eqns, lambda eqn: eqn.params["body_jaxpr"])
    of_conditions, of_bodies, carry = zip(*map(parts_of_while, eqns, operands), strict=True)

    def condition(carry: list[list[Array]]) -> Array:
        # The condition is the same on every replica: the divergence analysis refuses others.
        return run_conditions([[*c, *s] for c, s in zip(of_conditions, carry, strict=True)])[0][0]

    def body(carry: list[list[Array]]) -> list[list[Array]]:
        return run_bodies([[*c, *s] for c, s in zip(of_bodies, carry, strict=True)])

    return lax.while_loop(condition, body, list(carry))


def _join_cond(eqns: list[Equation], operands: list[list[Array]]) -> list[list[Array]]:
    def branch(index: int) -> Callable[..., list[list[Array]]]:
        run = _bodies(eqns, lambda eqn: eqn.params["branches"][index])
        return lambda *args: run(args)

    branches = [branch(i) for i in range(len(eqns[0].params["branches"]))]
    # The predicate is the same on every replica: the divergence analysis refuses others.
    return lax.switch(operands[0][0], branches, *(values[1:] for values in operands))
