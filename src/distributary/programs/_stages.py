"""Cuts the program of one replica where the replicas cease to differ.

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
"""

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import final

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

from distributary.jaxprs import (
    CHECKPOINTS,
    AnyJaxpr,
    Atom,
    Equation,
    call_of,
    computed_from,
    has_replicas,
    jaxpr_of,
    leading_to,
    open_jaxpr,
    opened,
    variables_made,
    variables_of,
)
from distributary.tracing import has_collective, varying_variables


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
