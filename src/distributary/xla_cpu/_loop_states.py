"""Finds in what form arrays go into and out of the bodies of loops and branches.

A loop that goes through the layers of a model, or through time, adds the gradients of a kernel to
zeros in every turn. With 8 rows in dim 1 of `x` and `g`,

    a:f32[3,5] = broadcast_in_dim 0.0
    b:f32[3,5] = scan[
      jaxpr={ lambda ; c:f32[3,5] d:f32[8,3] e:f32[8,5]. let
          f:f32[3,5] = dot_general[dimension_numbers=(([0], [0]), ([], []))] d e
          g:f32[3,5] = add c f
        in (g,) }
    ] a x g

nothing in the body but the addition reads `c`. So the loop may carry the parts of the sum that the
replicas have, of which there is one all-reduce after the loop. That holds if it also holds for the
output of the body, so it is assumed for everything that is carried, and taken back where it fails.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from jax.extend.core import ClosedJaxpr, Literal

from distributary.jaxprs import (
    CONTROL_FLOW,
    AnyJaxpr,
    Atom,
    Equation,
    parts_of_scan,
    parts_of_while,
    variables_of,
)
from distributary.programs import flattened
from distributary.xla_cpu._batch_dims import Dim, State, dims_of, is_part, shares_of


@final
@dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """What goes into and out of a loop or branch.

    Attributes:
        operands: The states of the operands.
        results: Those of the results.
        bodies: For the identity of each jaxpr the states of its inputs and outputs.
    """

    operands: Sequence[State]
    results: Sequence[State]
    bodies: Mapping[int, tuple[Sequence[State], Sequence[State]]]


@final
class Plans:
    """The plans for one program, whose equations it keeps."""

    def __init__(self) -> None:
        # By identities, of objects that are kept so that they stay unique.
        self._bodies: dict[int, tuple[AnyJaxpr, ClosedJaxpr]] = {}
        self._plans: dict[tuple[int, tuple[State, ...]], tuple[Equation, Plan]] = {}

    def body(self, jaxpr: AnyJaxpr) -> ClosedJaxpr:
        """Returns a jaxpr without calls."""
        if id(jaxpr) not in self._bodies:
            self._bodies[id(jaxpr)] = jaxpr, flattened(jaxpr)
        return self._bodies[id(jaxpr)][1]

    def plan(self, eqn: Equation, states: Sequence[State]) -> Plan:
        """Returns the plan for an equation of `CONTROL_FLOW`, given the states of its operands."""
        key = id(eqn), tuple(states)
        if key not in self._plans:
            rules = {"scan": self._of_scan, "while": self._of_while, "cond": self._of_cond}
            self._plans[key] = eqn, rules[eqn.primitive.name](eqn, list(states))
        return self._plans[key][1]

    def _of_scan(self, eqn: Equation, states: list[State]) -> Plan:
        of_consts, carry, of_xs = parts_of_scan(eqn, states)
        consts, xs = dims_in(of_consts), dims_in(of_xs)
        inner = [dim - 1 if isinstance(dim, int) and dim > 0 else None for dim in xs]
        jaxpr = eqn.params["jaxpr"]
        body = self.body(jaxpr)
        carry = self._carried(body, [*consts], carry, [*inner])
        inputs = [*consts, *carry, *inner]
        ys = _of_loop(self._states(body, inputs)[1][len(carry) :])
        results = [*carry, *[y + 1 if isinstance(y, int) else y for y in ys]]
        return Plan([*consts, *carry, *xs], results, {id(jaxpr): (inputs, [*carry, *ys])})

    def _of_while(self, eqn: Equation, states: list[State]) -> Plan:
        parts = parts_of_while(eqn, states)
        of_condition, of_body, carry = dims_in(parts[0]), dims_in(parts[1]), parts[2]
        condition, jaxpr = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
        test = self.body(condition).jaxpr
        read = {v for one in test.eqns for v in variables_of(one.invars)} | {*test.outvars}
        start = len(of_condition)
        is_read = [v in read for v in test.invars[start : start + len(carry)]]
        carry = self._carried(self.body(jaxpr), [*of_body], carry, [], is_read)
        bodies: dict[int, tuple[Sequence[State], Sequence[State]]] = {
            id(condition): ([*of_condition, *carry], [None]),
            id(jaxpr): ([*of_body, *carry], carry),
        }
        return Plan([*of_condition, *of_body, *carry], carry, bodies)

    def _of_cond(self, eqn: Equation, states: list[State]) -> Plan:
        operands, branches = dims_in(states), eqn.params["branches"]
        outputs = [self._states(self.body(jaxpr), operands[1:])[1] for jaxpr in branches]
        results = [
            next((state for state in column if isinstance(state, int)), None)
            for column in zip(*outputs, strict=True)
        ]
        bodies = {id(jaxpr): (operands[1:], results) for jaxpr in branches}
        return Plan(operands, results, bodies)

    def _carried(
        self,
        body: ClosedJaxpr,
        before: list[State],
        carry: list[State],
        after: list[State],
        is_read: Sequence[bool] = (),
    ) -> list[State]:
        """Returns the states of what a loop carries, which a turn of it does not change.

        Args:
            body: The body.
            before: The states of the inputs before what it carries.
            carry: The states before the loop.
            after: The states of the inputs after what it carries.
            is_read: Whether the condition of the loop reads each; () if there is none.
        """
        reads = is_read or [False] * len(carry)
        new: list[State] = [
            _dim(state) if read else "assumed" if state is None else state
            for state, read in zip(carry, reads, strict=True)
        ]
        states: list[State] = []
        while new != states:
            states = new
            inputs, outputs = self._states(body, [*before, *states, *after])
            new = [
                state
                if isinstance(state, int) or (is_part(used) and output == "partial")
                else _dim(output)
                for state, used, output in zip(
                    states,
                    inputs[len(before) :][: len(states)],
                    outputs[: len(states)],
                    strict=True,
                )
            ]
        return _of_loop(states)

    def _states(
        self, body: ClosedJaxpr, states: Sequence[State]
    ) -> tuple[list[State], list[State]]:
        """Returns the states of the inputs and outputs; None for parts that the body adds up."""
        jaxpr = body.jaxpr
        env: dict[Atom, State] = dict(zip(jaxpr.invars, states, strict=True))
        sources: dict[Atom, list[Atom]] = {}
        for eqn in jaxpr.eqns:
            operands = [state_of(atom, env) for atom in eqn.invars]
            if shares_of(eqn, operands) is not None:
                # What a loop starts from is no sum until one is added to it.
                is_sum = "partial" in operands or "assumed" not in operands
                env[eqn.outvars[0]] = "partial" if is_sum else "assumed"
                sources[eqn.outvars[0]] = [*variables_of(eqn.invars)]
                continue
            needed: Sequence[State] = dims_in(operands)
            results: Sequence[State] = []
            if eqn.primitive.name in CONTROL_FLOW:
                plan = self.plan(eqn, operands)
                needed, results = plan.operands, plan.results
            else:
                results = dims_of(eqn, dims_in(operands))
            read = [v for v, need in zip(eqn.invars, needed, strict=True) if not is_part(need)]
            while read:
                atom = read.pop()
                if is_part(state_of(atom, env)):
                    env[atom] = None
                    read.extend(sources.get(atom, ()))
            env.update(zip(eqn.outvars, results, strict=True))
        outputs = [state_of(atom, env) for atom in jaxpr.outvars]
        return [env[v] for v in jaxpr.invars], outputs


def state_of(atom: Atom, env: Mapping[Atom, State]) -> State:
    """Returns the state of a variable in `env`, or of a literal."""
    return None if isinstance(atom, Literal) else env.get(atom)


def dims_in(states: Sequence[State]) -> list[Dim]:
    """Returns the states without those of parts."""
    return list(map(_dim, states))


def _dim(state: State) -> Dim:
    return state if isinstance(state, int) else None


def _of_loop(states: Sequence[State]) -> list[State]:
    """Returns the states in a loop in which assumptions hold."""
    return ["partial" if is_part(state) else state for state in states]
