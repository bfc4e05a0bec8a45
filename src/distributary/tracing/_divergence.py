"""Which values of a replica program can differ between replicas.

A forward analysis of the program of one replica: a value varies if it depends on per-replica
input, on the replica id or on a host callback, and does not pass through a collective that gives
every replica the same result. Where the analysis cannot know, it says that a value varies.
"""

from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex_core

from distributary.errors import ContextError
from distributary.tracing._connectivity import is_jit
from distributary.tracing._markers import Equation, open_jaxpr, sub_jaxprs, walk

# Collectives whose result is the same on every replica, and the ones whose result is not.
_UNIFYING = frozenset({"psum", "pmax", "pmin", "all_gather", "psum_invariant", "pbroadcast"})
_SCATTERING = frozenset(
    {"reduce_scatter", "psum_scatter", "all_to_all", "ppermute", "ragged_all_to_all", "pgather"}
)
COLLECTIVES = _UNIFYING | _SCATTERING
_VARYING_SOURCES = frozenset({"axis_index", "io_callback", "pure_callback", "infeed"})


def varying_outputs(jaxpr: Any, varying_inputs: Sequence[bool]) -> list[bool]:
    """For every output of `jaxpr`, whether it can differ between replicas.

    Args:
        jaxpr: Program of one replica, without markers.
        varying_inputs: The same for every constant and then every input of the jaxpr.

    Raises:
        ContextError: if a collective runs in a branch or loop that not all replicas take alike;
            such a program would wait forever.
    """
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), varying_inputs, strict=True))

    def lookup(atom: Any) -> bool:
        return not isinstance(atom, jex_core.Literal) and env.get(atom, False)

    for eqn in jaxpr.eqns:
        outs = _equation(eqn, [lookup(atom) for atom in eqn.invars])
        env.update(zip(eqn.outvars, outs, strict=True))
    return [lookup(atom) for atom in jaxpr.outvars]


def _equation(eqn: Equation, operands: list[bool]) -> list[bool]:
    name = eqn.primitive.name
    num_outs = len(eqn.outvars)
    if name in _UNIFYING:
        whole_group = eqn.params.get("axis_index_groups") is None
        return [not whole_group and any(operands)] * num_outs
    if name in _SCATTERING or name in _VARYING_SOURCES:
        return [True] * num_outs
    if is_jit(eqn) or name in ("closed_call", "core_call", "checkpoint", "remat", "remat2"):
        return _call(eqn.params["jaxpr"], operands)
    if name in ("custom_jvp_call", "custom_vjp_call"):
        return _call(eqn.params["call_jaxpr"], operands)
    if name == "scan":
        return _scan(eqn, operands)
    if name == "while":
        return _while(eqn, operands)
    if name == "cond":
        return _cond(eqn, operands)
    nested = any(
        inner.primitive.name in _VARYING_SOURCES | _SCATTERING
        for sub in sub_jaxprs(eqn)
        for inner in walk(sub.eqns)
    )
    return [nested or any(operands)] * num_outs


def _call(jaxpr: Any, operands: list[bool]) -> list[bool]:
    opened, consts = open_jaxpr(jaxpr)
    return varying_outputs(opened, [False] * len(consts) + operands)


def _scan(eqn: Equation, operands: list[bool]) -> list[bool]:
    num_consts, num_carry = eqn.params["num_consts"], eqn.params["num_carry"]
    consts = operands[:num_consts]
    carry = operands[num_consts : num_consts + num_carry]
    xs = operands[num_consts + num_carry :]
    while True:
        outs = _call(eqn.params["jaxpr"], [*consts, *carry, *xs])
        after = [a or b for a, b in zip(carry, outs[:num_carry], strict=True)]
        if after == carry:
            return [*carry, *outs[num_carry:]]
        carry = after


def _while(eqn: Equation, operands: list[bool]) -> list[bool]:
    num_condition, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    condition_consts = operands[:num_condition]
    body_consts = operands[num_condition : num_condition + num_body]
    carry = operands[num_condition + num_body :]
    while True:
        outs = _call(eqn.params["body_jaxpr"], [*body_consts, *carry])
        after = [a or b for a, b in zip(carry, outs, strict=True)]
        if after == carry:
            break
        carry = after
    if any(_call(eqn.params["cond_jaxpr"], [*condition_consts, *carry])):
        # Replicas may run the loop a different number of times.
        _refuse_collectives(eqn, "the condition of jax.lax.while_loop")
        return [True] * len(carry)
    return carry


def _cond(eqn: Equation, operands: list[bool]) -> list[bool]:
    predicate, rest = operands[0], operands[1:]
    if predicate:
        _refuse_collectives(eqn, "the predicate of jax.lax.cond or switch")
        return [True] * len(eqn.outvars)
    branches = [_call(branch, rest) for branch in eqn.params["branches"]]
    return [any(outs) for outs in zip(*branches, strict=True)]


def _refuse_collectives(eqn: Equation, what: str) -> None:
    for sub in sub_jaxprs(eqn):
        for inner in walk(sub.eqns):
            if inner.primitive.name in COLLECTIVES:
                raise ContextError(
                    f"A collective ({inner.primitive.name}, from all_reduce, all_gather,"
                    " merge_call or an assignment with an aggregation) runs inside control flow"
                    f" where {what} can differ between replicas: the replicas that skip it would"
                    " leave the others waiting forever. Make the decision the same on every"
                    " replica (all_reduce it first), or move the collective out of the control"
                    " flow and select its input with jnp.where."
                )
