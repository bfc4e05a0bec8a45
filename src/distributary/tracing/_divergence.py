"""Which values of a replica program can differ between replicas.

A forward analysis of the program of one replica: a value varies if it depends on per-replica
input, on the replica id or on a host callback, and does not pass through collectives that give
every replica the same result. Where the analysis cannot know, it says that a value varies.
"""

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias, final

import jax.extend.core as jex_core

from distributary.errors import ContextError
from distributary.topology import REPLICA_AXIS
from distributary.tracing._connectivity import call_of
from distributary.tracing._markers import Equation, open_jaxpr, sub_jaxprs, walk

# Collectives whose result is the same on every replica, and the ones whose result is not.
_UNIFYING = frozenset(
    {"psum", "pmax", "pmin", "all_gather", "psum_invariant", "pbroadcast", "push"}
)
_SCATTERING = frozenset(
    {"reduce_scatter", "psum_scatter", "all_to_all", "ppermute", "ragged_all_to_all", "pgather"}
)
COLLECTIVES = _UNIFYING | _SCATTERING
_OF_DEVICES = frozenset({"axis_index", "start_of_sum"})
_VARYING_SOURCES = _OF_DEVICES | {"io_callback", "pure_callback", "infeed"}

# Which replicas hold the same value: one number per replica, equal for replicas that agree.
Agreement: TypeAlias = tuple[int, ...]


def is_of_devices(eqn: Equation) -> bool:
    """Whether replicas meet in an equation, or are told apart by it."""
    return any(inner.primitive.name in COLLECTIVES | _OF_DEVICES for inner in walk([eqn]))


def is_sum_of_replicas(eqn: Equation) -> bool:
    """Whether an equation sums over all replicas."""
    return (
        eqn.primitive.name == "psum"
        and eqn.params["axes"] == (REPLICA_AXIS,)
        and eqn.params["axis_index_groups"] is None
    )


def varying_outputs(jaxpr: Any, varying_inputs: Sequence[bool], num_replicas: int) -> list[bool]:
    """For every output of `jaxpr`, whether it can differ between replicas.

    Args:
        jaxpr: Program of one replica, without markers.
        varying_inputs: The same for every constant and then every input of the jaxpr.
        num_replicas: Number of replicas.

    Raises:
        ContextError: if a collective runs in a branch or loop that not all replicas take alike;
            such a program would wait forever.
    """
    varying = varying_variables(jaxpr, varying_inputs, num_replicas)
    return [not isinstance(v, jex_core.Literal) and v in varying for v in jaxpr.outvars]


def varying_variables(
    jaxpr: Any, varying_inputs: Sequence[bool], num_replicas: int
) -> frozenset[Any]:
    """The variables of `jaxpr`, not of nested ones, that `varying_outputs` would call varying."""
    analysis = _Analysis(num_replicas)
    inputs = [analysis.distinct if varying else analysis.same for varying in varying_inputs]
    env = analysis.variables(jaxpr, inputs)
    return frozenset(v for v, agreement in env.items() if agreement != analysis.same)


@final
class _Analysis:
    def __init__(self, num_replicas: int) -> None:
        self.same: Agreement = (0,) * num_replicas
        self.distinct: Agreement = tuple(range(num_replicas))

    def jaxpr(self, jaxpr: Any, inputs: Sequence[Agreement]) -> list[Agreement]:
        env = self.variables(jaxpr, inputs)
        return [self._lookup(env, atom) for atom in jaxpr.outvars]

    def variables(self, jaxpr: Any, inputs: Sequence[Agreement]) -> dict[Any, Agreement]:
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), inputs, strict=True))
        for eqn in jaxpr.eqns:
            outs = self._equation(eqn, [self._lookup(env, atom) for atom in eqn.invars])
            env.update(zip(eqn.outvars, outs, strict=True))
        return env

    def _lookup(self, env: dict[Any, Agreement], atom: Any) -> Agreement:
        return self.same if isinstance(atom, jex_core.Literal) else env[atom]

    def _equation(self, eqn: Equation, operands: list[Agreement]) -> list[Agreement]:
        name = eqn.primitive.name
        num_outs = len(eqn.outvars)
        if name in _UNIFYING:
            groups = eqn.params.get("axis_index_groups")
            return [self._over_groups(self._all(operands), groups)] * num_outs
        if name in _SCATTERING or name in _VARYING_SOURCES:
            return [self.distinct] * num_outs
        call = call_of(eqn)
        if call is not None:
            return self._call(call, operands)
        if name == "scan":
            return self._scan(eqn, operands)
        if name == "while":
            return self._while(eqn, operands)
        if name == "cond":
            return self._cond(eqn, operands)
        nested = any(
            inner.primitive.name in _VARYING_SOURCES | _SCATTERING
            for sub in sub_jaxprs(eqn)
            for inner in walk(sub.eqns)
        )
        return [self.distinct if nested else self._all(operands)] * num_outs

    def _all(self, values: Sequence[Agreement]) -> Agreement:
        """Of something computed from all `values`: replicas agree that agree on each of them."""
        different = {value for value in values if value != self.same}
        if len(different) <= 1:
            return next(iter(different), self.same)
        return _numbered(zip(*different, strict=True))

    def _over_groups(self, value: Agreement, groups: Any) -> Agreement:
        """Of a reduction or gather in each group of replicas."""
        if groups is None:
            return self.same
        combined = {i: tuple(value[j] for j in group) for group in groups for i in group}
        return _numbered(combined[i] for i in range(len(value)))

    def _call(self, jaxpr: Any, operands: list[Agreement]) -> list[Agreement]:
        opened, consts = open_jaxpr(jaxpr)
        return self.jaxpr(opened, [self.same] * len(consts) + operands)

    def _scan(self, eqn: Equation, operands: list[Agreement]) -> list[Agreement]:
        num_consts, num_carry = eqn.params["num_consts"], eqn.params["num_carry"]
        consts = operands[:num_consts]
        carry = operands[num_consts : num_consts + num_carry]
        xs = operands[num_consts + num_carry :]
        while True:
            outs = self._call(eqn.params["jaxpr"], [*consts, *carry, *xs])
            after = self._pairs(carry, outs[:num_carry])
            if after == carry:
                return [*carry, *outs[num_carry:]]
            carry = after

    def _while(self, eqn: Equation, operands: list[Agreement]) -> list[Agreement]:
        num_condition, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        condition_consts = operands[:num_condition]
        body_consts = operands[num_condition : num_condition + num_body]
        carry = operands[num_condition + num_body :]
        while True:
            outs = self._call(eqn.params["body_jaxpr"], [*body_consts, *carry])
            after = self._pairs(carry, outs)
            if after == carry:
                break
            carry = after
        (condition,) = self._call(eqn.params["cond_jaxpr"], [*condition_consts, *carry])
        if condition != self.same:
            # Replicas may run the loop a different number of times.
            _refuse_collectives(eqn, "the condition of jax.lax.while_loop")
            return [self.distinct] * len(carry)
        return carry

    def _cond(self, eqn: Equation, operands: list[Agreement]) -> list[Agreement]:
        predicate, rest = operands[0], operands[1:]
        if predicate != self.same:
            _refuse_collectives(eqn, "the predicate of jax.lax.cond or switch")
            return [self.distinct] * len(eqn.outvars)
        branches = [self._call(branch, rest) for branch in eqn.params["branches"]]
        return [self._all(outs) for outs in zip(*branches, strict=True)]

    def _pairs(self, first: Sequence[Agreement], second: Sequence[Agreement]) -> list[Agreement]:
        return [self._all(pair) for pair in zip(first, second, strict=True)]


def _numbered(values: Iterable[Any]) -> Agreement:
    """Equal numbers for equal values, counted in order of appearance."""
    numbers: dict[Any, int] = {}
    return tuple([numbers.setdefault(value, len(numbers)) for value in values])


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
