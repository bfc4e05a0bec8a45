"""Evaluates `scan`, `while` and `cond` with bodies that a pass evaluates in its own way.

Several programs can go through one loop together, and a nest of further arrays with them. For the
replicas of an uneven batch, which are two such programs,

    b:f32[] = scan[jaxpr={ ... } length=4] a        d:f32[] = scan[jaxpr={ ... } length=4] c

become one loop over the rows of both:

    b:f32[] d:f32[] = scan[jaxpr={ ... } length=4] a c

whose body is what the pass makes of the two bodies.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

from jax import Array, lax
from jax.extend.core import Var

from distributary.tracing._jaxprs import (
    AnyJaxpr,
    Equation,
    call_of,
    open_jaxpr,
    parts_of_scan,
    parts_of_while,
)

_S = TypeVar("_S")
_V = TypeVar("_V")

#: The arrays of every program.
Arrays: TypeAlias = list[list[Array]]
#: From the jaxpr of each program, its inputs and the further arrays to its outputs and new ones.
Evaluate: TypeAlias = Callable[[Sequence[AnyJaxpr], Arrays, _S], tuple[Arrays, _S]]

CONTROL_FLOW = frozenset({"scan", "while", "cond"})


def evaluate_control_flow(
    eqns: Sequence[Equation],
    operands: Arrays,
    further: _S,
    evaluate: Evaluate[_S],
    while_loop: Callable[..., Any] = lax.while_loop,
) -> tuple[Arrays, _S]:
    """Evaluates one equation of `CONTROL_FLOW` of every program, all of them in one.

    Args:
        eqns: The equations. They agree on the length of a `scan`, on the condition of a `while` and
            on the predicate of a `cond`.
        operands: The operands of each.
        further: A nest of arrays that goes through the bodies.
        evaluate: Evaluates the bodies.
        while_loop: Evaluates a `while`, with the arguments of `jax.lax.while_loop`.

    Returns:
        The results of each equation, and the new further arrays.
    """
    match eqns[0].primitive.name:
        case "scan":
            return _scan(eqns, operands, further, evaluate)
        case "while":
            return _while(eqns, operands, further, evaluate, while_loop)
    return _cond(eqns, operands, further, evaluate)


def _scan(
    eqns: Sequence[Equation], operands: Arrays, further: _S, evaluate: Evaluate[_S]
) -> tuple[Arrays, _S]:
    jaxprs = [eqn.params["jaxpr"] for eqn in eqns]
    consts, carries, xs = zip(*map(parts_of_scan, eqns, operands), strict=True)

    def body(carried: tuple[Arrays, _S], xs: Arrays) -> Any:
        carries, further = carried
        inputs = [[*c, *carry, *x] for c, carry, x in zip(consts, carries, xs, strict=True)]
        outs, further = evaluate(jaxprs, inputs, further)
        after = [out[: len(carry)] for carry, out in zip(carries, outs, strict=True)]
        ys = [out[len(carry) :] for carry, out in zip(carries, outs, strict=True)]
        return (after, further), ys

    params = eqns[0].params
    (after, further), ys = lax.scan(
        body,
        (list(carries), further),
        list(xs),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [[*carry, *y] for carry, y in zip(after, ys, strict=True)], further


def _while(
    eqns: Sequence[Equation],
    operands: Arrays,
    further: _S,
    evaluate: Evaluate[_S],
    while_loop: Callable[..., Any],
) -> tuple[Arrays, _S]:
    conditions = [eqn.params["cond_jaxpr"] for eqn in eqns]
    bodies = [eqn.params["body_jaxpr"] for eqn in eqns]
    of_conditions, of_bodies, carries = zip(*map(parts_of_while, eqns, operands), strict=True)

    def is_going_on(carried: tuple[Arrays, _S]) -> Array:
        inputs = [[*c, *carry] for c, carry in zip(of_conditions, carried[0], strict=True)]
        return evaluate(conditions, inputs, carried[1])[0][0][0]

    def body(carried: tuple[Arrays, _S]) -> tuple[Arrays, _S]:
        inputs = [[*c, *carry] for c, carry in zip(of_bodies, carried[0], strict=True)]
        return evaluate(bodies, inputs, carried[1])

    after: tuple[Arrays, _S] = while_loop(is_going_on, body, (list(carries), further))
    return after


def _cond(
    eqns: Sequence[Equation], operands: Arrays, further: _S, evaluate: Evaluate[_S]
) -> tuple[Arrays, _S]:
    def branch(index: int) -> Callable[[Arrays, _S], tuple[Arrays, _S]]:
        jaxprs = [eqn.params["branches"][index] for eqn in eqns]
        return lambda inputs, further: evaluate(jaxprs, inputs, further)

    branches = [branch(i) for i in range(len(eqns[0].params["branches"]))]
    return lax.switch(operands[0][0], branches, [values[1:] for values in operands], further)


def known_through(
    eqn: Equation,
    operands: list[_V],
    evaluate: Callable[[AnyJaxpr, list[_V]], list[_V]],
    join: Callable[[Sequence[_V]], _V],
    decides: Callable[[Equation, _V], None] = lambda eqn, value: None,
) -> list[_V] | None:
    """Returns what an analysis knows of the results of a call, `scan`, `while` or `cond`.

    Each result depends on what its own computation reads, and on what decides over it.

    Args:
        eqn: The equation.
        operands: What is known of its operands.
        evaluate: Analyzes a jaxpr, from what is known of its inputs to its outputs.
        join: Returns what is known of a value that is computed from several others.
        decides: Told what is known of the predicate of a `cond` or condition of a `while`.

    Returns:
        What is known of each result; None for other equations.
    """
    name, params = eqn.primitive.name, eqn.params
    call = call_of(eqn)
    if call is not None:
        return evaluate(call, operands)
    if name == "cond":
        predicate, rest = operands[0], operands[1:]
        decides(eqn, predicate)
        results = zip(*[evaluate(branch, rest) for branch in params["branches"]], strict=True)
        passed = zip(*map(_passed, params["branches"]), strict=True)
        return [
            rest[inputs[0]]
            if inputs[0] is not None and len(set(inputs)) == 1
            else join([predicate, *values])
            for values, inputs in zip(results, passed, strict=True)
        ]
    if name not in CONTROL_FLOW:
        return None
    xs: list[_V] = []
    if name == "scan":
        consts, carry, xs = parts_of_scan(eqn, operands)
        body = params["jaxpr"]
    else:
        of_condition, consts, carry = parts_of_while(eqn, operands)
        body = params["body_jaxpr"]
    stays = [i == len(consts) + k for k, i in enumerate(_passed(body)[: len(carry)])]
    while True:
        outs = evaluate(body, [*consts, *carry, *xs])
        goes_on = []
        if name == "while":
            goes_on = evaluate(params["cond_jaxpr"], [*of_condition, *carry])
            decides(eqn, goes_on[0])
        after = [
            value if is_same else join([value, out, *goes_on])
            for value, out, is_same in zip(carry, outs, stays, strict=False)
        ]
        if after == carry:
            return [*carry, *outs[len(carry) :]]
        carry = after


def _passed(jaxpr: AnyJaxpr) -> list[int | None]:
    """Returns for every output the number of the input that it is, or None."""
    inner, _ = open_jaxpr(jaxpr)
    numbers = {var: i for i, var in enumerate(inner.invars)}
    return [numbers.get(atom) if isinstance(atom, Var) else None for atom in inner.outvars]
