"""The program of one replica, cut where the replicas stop to differ.

What depends only on values that all replicas share, most of all what an optimizer makes of reduced
gradients, need not be computed by each of them. It makes up a second stage, which its caller runs
once, wherever it wants to.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax.extend.core as jex_core

from distributary.tracing._connectivity import call_of
from distributary.tracing._divergence import COLLECTIVES, varying_variables
from distributary.tracing._markers import Equation, jaxpr_of, open_jaxpr, walk

__all__ = ["Stages", "cut", "variables"]


@final
@dataclass(frozen=True, slots=True)
class Stages:
    """A program in two stages.

    Attributes:
        replica: Closed jaxpr that every replica runs. Inputs: those of the whole program at
            `replica_inputs`. Outputs: those of the whole at `replica_outputs`, then the cut.
        update: Closed jaxpr of what is the same on all replicas. Inputs: those of the whole at
            `update_inputs`, then the cut. Outputs: those of the whole at `update_outputs`.
        num_cut: Number of values that the update takes from the replicas, which share them.
    """

    replica: Any
    update: Any
    replica_inputs: list[int]
    update_inputs: list[int]
    replica_outputs: list[int]
    update_outputs: list[int]
    num_cut: int


def cut(jaxpr: Any, varying_inputs: Sequence[bool], num_replicas: int) -> Stages:
    """Cuts the program of one replica in two.

    What is the same on all replicas, and not needed by anything that differs between them, is the
    second stage. Collectives, and what has side effects, stay in the first.

    Args:
        jaxpr: Program of one replica, without markers and constants.
        varying_inputs: For every input, whether replicas may receive different values.
        num_replicas: Number of replicas.
    """
    constants: dict[Any, Any] = {}
    while True:
        invariant = [False] * (len(jaxpr.invars) - len(varying_inputs))
        varying = varying_variables(jaxpr, [*varying_inputs, *invariant], num_replicas)
        if not any(_is_mixed(eqn, varying) for eqn in jaxpr.eqns):
            break
        jaxpr = _inlined(jaxpr, varying, constants)

    first = [
        bool(eqn.effects) or _has_collective(eqn) or not varying.isdisjoint(eqn.outvars)
        for eqn in jaxpr.eqns
    ]
    needed: set[Any] = set()
    for i in reversed(range(len(first))):
        first[i] = first[i] or not needed.isdisjoint(jaxpr.eqns[i].outvars)
        if first[i]:
            needed.update(variables(jaxpr.eqns[i].invars))
    of_replica = [eqn for eqn, is_first in zip(jaxpr.eqns, first, strict=True) if is_first]
    of_update = [eqn for eqn, is_first in zip(jaxpr.eqns, first, strict=True) if not is_first]

    made = {v for eqn in of_replica for v in eqn.outvars}
    outputs = jaxpr.outvars
    from_replica = [
        bool(made.union(varying).intersection(variables([output]))) for output in outputs
    ]
    replica_outputs = [i for i, is_first in enumerate(from_replica) if is_first]
    update_outputs = [i for i, is_first in enumerate(from_replica) if not is_first]
    taken = list(dict.fromkeys(v for eqn in of_update for v in variables(eqn.invars) if v in made))

    def stage(eqns: list[Equation], outvars: list[Any], given: list[Any]) -> tuple[Any, list[int]]:
        used = {v for eqn in eqns for v in variables(eqn.invars)}.union(variables(outvars))
        positions = [i for i, v in enumerate(jaxpr.invars[: len(varying_inputs)]) if v in used]
        consts = {v: value for v, value in constants.items() if v in used}
        invars = [*(jaxpr.invars[i] for i in positions), *given]
        opened = jaxpr_of(invars, outvars, eqns, list(consts))
        return jex_core.ClosedJaxpr(opened, list(consts.values())), positions

    replica, replica_inputs = stage(
        of_replica, [*(outputs[i] for i in replica_outputs), *taken], []
    )
    update, update_inputs = stage(of_update, [outputs[i] for i in update_outputs], taken)
    return Stages(
        replica,
        update,
        replica_inputs,
        update_inputs,
        replica_outputs,
        update_outputs,
        len(taken),
    )


def _is_mixed(eqn: Equation, varying: frozenset[Any]) -> bool:
    """Whether `eqn` calls a function that belongs to both stages."""
    return (
        call_of(eqn) is not None
        and not varying.isdisjoint(variables(eqn.invars))
        and not varying.issuperset(eqn.outvars)
    )


def _inlined(jaxpr: Any, varying: frozenset[Any], constants: dict[Any, Any]) -> Any:
    """`jaxpr` with the functions that belong to both stages written out.

    Their constants go to `constants`, and become inputs.
    """
    known: dict[Any, Any] = {}
    eqns: list[Equation] = []

    def renamed(atom: Any) -> Any:
        return atom if isinstance(atom, jex_core.Literal) else known.get(atom, atom)

    for eqn in jaxpr.eqns:
        operands = [renamed(atom) for atom in eqn.invars]
        if not _is_mixed(eqn, varying):
            eqns.append(eqn.replace(invars=operands))
            continue
        inner, values = open_jaxpr(call_of(eqn))
        own: dict[Any, Any] = {v: jex_core.Var(v.aval) for v in inner.constvars}
        constants.update(zip(own.values(), values, strict=True))
        own.update(zip(inner.invars, operands, strict=True))

        def mapped(atom: Any, own: dict[Any, Any] = own) -> Any:
            return atom if isinstance(atom, jex_core.Literal) else own[atom]

        for called in inner.eqns:
            # The same function may be called twice.
            own.update((v, jex_core.Var(v.aval)) for v in called.outvars)
            eqns.append(
                called.replace(
                    invars=[mapped(atom) for atom in called.invars],
                    outvars=[own[v] for v in called.outvars],
                )
            )
        known.update(zip(eqn.outvars, map(mapped, inner.outvars), strict=True))
    inputs = [*jaxpr.invars, *(v for v in constants if v not in set(jaxpr.invars))]
    return jaxpr_of(inputs, [renamed(v) for v in jaxpr.outvars], eqns)


def _has_collective(eqn: Equation) -> bool:
    return any(inner.primitive.name in COLLECTIVES for inner in walk([eqn]))


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Those of `atoms` that are no literals."""
    return [atom for atom in atoms if not isinstance(atom, jex_core.Literal)]
