"""Cuts the program of one replica where the replicas cease to differ; evaluates several together.

A value that depends only on values that all replicas share need not be computed by each of them.
Most of these are made by an optimizer from reduced gradients. They become a second stage, which the
caller runs once, wherever it likes. For data `x` and a weight `w`, `cut` divides

    { lambda ; x:f32[2] w:f32[2]. let
        c:f32[2] = mul x w
        d:f32[2] = psum[replica] c
        e:f32[2] = mul 0.1 d
        f:f32[2] = sub w e
      in (f,) }

into a stage for every replica and an update:

    { lambda ; x:f32[2] w:f32[2]. let       { lambda ; w:f32[2] d:f32[2]. let
        c:f32[2] = mul x w                      e:f32[2] = mul 0.1 d
        d:f32[2] = psum[replica] c              f:f32[2] = sub w e
      in (d,) }                               in (f,) }

`d` is the cut: the value that the update takes from the replicas.

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

import functools
import itertools
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

from distributary.errors import ReplicaMismatchError, UnsupportedError
from distributary.jaxprs import (
    CHECKPOINTS,
    CONTROL_FLOW,
    AnyJaxpr,
    Atom,
    Equation,
    call_of,
    computed_from,
    evaluate_all,
    evaluate_control_flow,
    has_replicas,
    jaxpr_of,
    leading_to,
    open_jaxpr,
    opened,
    value_of,
    variables_made,
    variables_of,
    walk,
)
from distributary.tracing import has_collective, is_collective, push, varying_variables


@final
@dataclass(frozen=True, slots=True)
class Stages:
    """A program in two stages.

    Attributes:
        replica: Closed jaxpr that every replica runs. Inputs: the inputs of the whole program at
            `replica_inputs`. Outputs: the outputs of the whole at `replica_outputs`, then the cut.
        update: Closed jaxpr of the computations that are the same on all replicas. Inputs: the
            inputs of the whole at `update_inputs`, then the cut. Outputs: those of the whole at
            `update_outputs`.
    """

    replica: ClosedJaxpr
    update: ClosedJaxpr
    replica_inputs: list[int]
    update_inputs: list[int]
    replica_outputs: list[int]
    update_outputs: list[int]

    @property
    def num_cut(self) -> int:
        """Number of values that the update takes from the replicas, which share them."""
        return len(self.update.jaxpr.invars) - len(self.update_inputs)

    def complete(
        self,
        values: Sequence[Array],
        outputs: Sequence[Array],
        rewrite: Callable[..., Callable[..., list[Array]]] = lambda run, jaxprs: run,
    ) -> dict[int, Array]:
        """Runs the update and returns the outputs of the whole program, by number.

        Args:
            values: Inputs of the whole program.
            outputs: Outputs of the replica stage.
            rewrite: Called with a function and the jaxprs that it evaluates; returns what to run.
        """
        num_made = len(self.replica_outputs)
        inputs = [*(values[i] for i in self.update_inputs), *outputs[num_made:]]
        run = functools.partial(jax.core.eval_jaxpr, self.update.jaxpr, self.update.consts)
        rest = rewrite(run, [self.update.jaxpr])(*inputs)
        return {
            **dict(zip(self.replica_outputs, outputs[:num_made], strict=True)),
            # `asarray`, because some constants of JAX are no arrays.
            **dict(zip(self.update_outputs, map(jnp.asarray, rest), strict=True)),
        }


def uncut(jaxpr: Jaxpr) -> Stages:
    """Returns stages with a program without constants as the first, and an empty second one."""
    everything = range(len(jaxpr.outvars))
    return _divided(jaxpr, len(jaxpr.invars), set(), lambda eqn: True, everything, {})


def cut(
    jaxpr: Jaxpr,
    varying_inputs: Sequence[bool],
    num_replicas: int,
    required: Collection[int] = (),
) -> Stages:
    """Cuts the program of one replica in two.

    The second stage computes all values that are the same on all replicas and that no differing
    value needs. Collectives and equations with side effects stay in the first stage.

    Args:
        jaxpr: Program of one replica, without markers and constants.
        varying_inputs: For every input, whether replicas may receive different values.
        num_replicas: Number of replicas.
        required: Numbers of outputs that the first stage computes in any case.
    """
    jaxpr, constants, varying = _with_mixed_written_out(jaxpr, varying_inputs, num_replicas)
    return _divided(jaxpr, len(varying_inputs), varying, has_collective, required, constants)


def is_in_first_stage(
    jaxpr: Jaxpr, varying_inputs: Sequence[bool], num_replicas: int
) -> list[bool]:
    """Returns for every equation whether it belongs to the first stage; see `cut`.

    Args:
        jaxpr: As for `cut`, with the functions that it calls written out.
        varying_inputs: As for `cut`.
        num_replicas: As for `cut`.
    """
    varying = varying_variables(jaxpr, varying_inputs, num_replicas)
    return _is_in_first(jaxpr, varying, has_collective, ())


def _with_mixed_written_out(
    jaxpr: Jaxpr, varying_inputs: Sequence[bool], num_replicas: int
) -> tuple[Jaxpr, dict[Var, Array], frozenset[Var]]:
    """Writes out the called functions that belong to both stages.

    Returns:
        The jaxpr, the values of constants that have become its last inputs, and the variables that
        can differ between replicas.
    """
    constants: dict[Var, Array] = {}
    while True:
        invariant = [False] * (len(jaxpr.invars) - len(varying_inputs))
        varying = varying_variables(jaxpr, [*varying_inputs, *invariant], num_replicas)
        if not any(_is_mixed(varying, eqn) for eqn in jaxpr.eqns):
            return jaxpr, constants, varying
        jaxpr = _written_out(jaxpr, constants, functools.partial(_is_mixed, varying))


def cut_around_mesh(closed: ClosedJaxpr, data_inputs: Sequence[bool]) -> Stages:
    """Cuts a program of global arrays after the last of its parts that run on a mesh.

    The first stage has those parts, values that are computed from data outside of them, and
    everything that either needs. The constants of the program count as its first inputs.

    Args:
        closed: Closed jaxpr without markers.
        data_inputs: For every input, whether the values computed from it belong to the first stage.
    """
    jaxpr = opened(closed)
    data = [*[False] * len(closed.consts), *data_inputs]
    data_vars = [v for v, is_data in zip(jaxpr.invars, data, strict=True) if is_data]
    of_data = computed_from(jaxpr.eqns, data_vars, lambda eqn: not _is_on_mesh(eqn))
    return _divided(jaxpr, len(data), of_data, _is_on_mesh, (), {})


def _divided(
    jaxpr: Jaxpr,
    num_inputs: int,
    varying: Set[Var],
    is_first: Callable[[Equation], bool],
    required: Collection[int],
    constants: dict[Var, Array],
) -> Stages:
    """Divides a program into two stages.

    The first has the equations that compute `varying` variables, those for which `is_first` is
    true, and everything that these need. The second has the rest.

    Args:
        jaxpr: The program; inputs after the first `num_inputs` are `constants`.
        num_inputs: Number of inputs.
        varying: Variables of the first stage.
        is_first: Whether an equation belongs to the first stage.
        required: Numbers of outputs that the first stage computes in any case.
        constants: Values of the constants.
    """
    outputs = jaxpr.outvars
    first = _is_in_first(jaxpr, varying, is_first, required)
    of_replica = [eqn for eqn, early in zip(jaxpr.eqns, first, strict=True) if early]
    of_update = [eqn for eqn, early in zip(jaxpr.eqns, first, strict=True) if not early]

    replica_vars = set(variables_made(of_replica))
    there = replica_vars | varying
    replica_outputs = [
        i
        for i, output in enumerate(outputs)
        if i in required or not there.isdisjoint(variables_of([output]))
    ]
    update_outputs = sorted(set(range(len(outputs))).difference(replica_outputs))
    taken = list(
        dict.fromkeys(v for eqn in of_update for v in variables_of(eqn.invars) if v in replica_vars)
    )

    inputs = {v: i for i, v in enumerate(jaxpr.invars[:num_inputs])}
    of_replicas = [*(outputs[i] for i in replica_outputs), *taken]
    replica = closed_part(inputs, of_replicas, of_replica, constants)
    results = [outputs[i] for i in update_outputs]
    update = closed_part([*inputs, *taken], results, of_update, constants)
    return Stages(
        replica,
        update,
        [inputs[v] for v in replica.jaxpr.invars],
        [inputs[v] for v in update.jaxpr.invars if v in inputs],
        replica_outputs,
        update_outputs,
    )


def closed_part(
    invars: Iterable[Var],
    outvars: Sequence[Atom],
    eqns: Sequence[Equation],
    constants: Mapping[Var, Array],
) -> ClosedJaxpr:
    """Returns a part of a program as a program.

    Args:
        invars: Inputs of the program, and values that others compute. Those that the part needs are
            its inputs.
        outvars: The outputs of the part.
        eqns: Its equations.
        constants: Values of further inputs.
    """
    used = {v for eqn in eqns for v in variables_of(eqn.invars)}.union(variables_of(outvars))
    consts = {v: value for v, value in constants.items() if v in used}
    part = jaxpr_of([v for v in invars if v in used], outvars, eqns, list(consts))
    return ClosedJaxpr(part, list(consts.values()))


def _is_in_first(
    jaxpr: Jaxpr,
    varying: Set[Var],
    is_first: Callable[[Equation], bool],
    required: Collection[int],
) -> list[bool]:
    """Returns for every equation whether it belongs to the first stage; see `_divided`."""
    return leading_to(
        jaxpr.eqns,
        [jaxpr.outvars[i] for i in required],
        lambda eqn: bool(eqn.effects) or is_first(eqn) or not varying.isdisjoint(eqn.outvars),
    )[0]


def _is_mixed(varying: frozenset[Var], eqn: Equation) -> bool:
    """Returns whether `eqn` calls a function that belongs to both stages."""
    return (
        call_of(eqn) is not None
        and not varying.isdisjoint(variables_of(eqn.invars))
        and not varying.issuperset(eqn.outvars)
    )


def without_calls(
    jaxpr: Jaxpr, constants: Mapping[Var, Array], *, with_barriers: bool = False
) -> tuple[Jaxpr, dict[Var, Array]]:
    """Returns a jaxpr with the body of every called function in place of its call.

    Args:
        jaxpr: A jaxpr whose constants, if any, are its last inputs.
        constants: Values of these constants.
        with_barriers: Whether to put a barrier before what a checkpoint computes once more, as JAX
            does; without one, XLA may keep it instead.

    Returns:
        The jaxpr, and the values of its last inputs, of which there may now be more.
    """
    known = dict(constants)
    while any(call_of(eqn) is not None for eqn in jaxpr.eqns):
        jaxpr = _written_out(jaxpr, known, lambda eqn: call_of(eqn) is not None, with_barriers)
    return jaxpr, known


def flattened(program: AnyJaxpr) -> ClosedJaxpr:
    """Returns a jaxpr, closed or not, without calls.

    What a checkpoint computes once more comes after a barrier.
    """
    jaxpr, values = open_jaxpr(program)
    last = jaxpr_of([*jaxpr.invars, *jaxpr.constvars], jaxpr.outvars, jaxpr.eqns)
    constants = dict(zip(jaxpr.constvars, values, strict=True))
    flat, constants = without_calls(last, constants, with_barriers=True)
    closed = jaxpr_of(jaxpr.invars, flat.outvars, flat.eqns, list(constants))
    return ClosedJaxpr(closed, list(constants.values()))


def _written_out(
    jaxpr: Jaxpr,
    constants: dict[Var, Array],
    choose: Callable[[Equation], bool],
    with_barriers: bool = False,
) -> Jaxpr:
    """Returns `jaxpr` with the functions that its chosen equations call in place of the calls.

    Args:
        jaxpr: A jaxpr without constants.
        constants: Receives the constants of the functions, which become inputs.
        choose: Returns whether to write out an equation; true only for calls of functions.
        with_barriers: See `without_calls`.
    """
    known: dict[Var, Atom] = {}
    eqns: list[Equation] = []

    def renamed(atom: Atom) -> Atom:
        return atom if isinstance(atom, Literal) else known.get(atom, atom)

    for eqn in jaxpr.eqns:
        operands = list(map(renamed, eqn.invars))
        call = call_of(eqn) if choose(eqn) else None
        if call is None:
            eqns.append(eqn.replace(invars=operands))
            continue
        if with_barriers and eqn.primitive.name in CHECKPOINTS:
            held = {v: Var(v.aval) for v in _held_back(eqn, operands)}
            barrier = eqn.replace(
                primitive=lax.optimization_barrier_p,
                params={},
                effects=set(),
                invars=list(held),
                outvars=list(held.values()),
            )
            eqns.extend([barrier] if held else [])
            operands = [x if isinstance(x, Literal) else held.get(x, x) for x in operands]
        inner, values = open_jaxpr(call)
        consts = [Var(v.aval) for v in inner.constvars]
        constants.update(zip(consts, values, strict=True))
        # A variable of the function has one meaning in each of its calls, which is noted here until
        # the next call.
        known.update(zip((*inner.constvars, *inner.invars), (*consts, *operands), strict=True))
        for called in inner.eqns:
            outvars = [Var(v.aval) for v in called.outvars]
            eqns.append(called.replace(invars=list(map(renamed, called.invars)), outvars=outvars))
            known.update(zip(called.outvars, outvars, strict=True))
        known.update(zip(eqn.outvars, map(renamed, inner.outvars), strict=True))
    known_inputs = set(jaxpr.invars)
    inputs = [*jaxpr.invars, *(v for v in constants if v not in known_inputs)]
    return jaxpr_of(inputs, [renamed(v) for v in jaxpr.outvars], eqns)


def _held_back(eqn: Equation, operands: Sequence[Atom]) -> list[Var]:
    """Returns the operands of a checkpoint that wait for each other, so that it computes late."""
    if not eqn.params["differentiated"]:
        return []
    wait = eqn.params["prevent_cse"]
    waiting = wait if isinstance(wait, tuple) else [wait] * len(operands)
    return list(dict.fromkeys(variables_of(itertools.compress(operands, waiting))))


def _is_on_mesh(eqn: Equation) -> bool:
    return has_replicas([eqn]) or eqn.primitive.name == "sharding_constraint"


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
