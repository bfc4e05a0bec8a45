"""Evaluates `scan`, `while` and `cond` with bodies that a pass evaluates in its own way.

Several programs can go through one loop together, and a nest of further arrays with them. For the
replicas of an uneven batch, which are two such programs,

    b:f32[] = scan[jaxpr={ ... } length=4] a        d:f32[] = scan[jaxpr={ ... } length=4] c

become one loop over the rows of both:

    b:f32[] d:f32[] = scan[jaxpr={ ... } length=4] a c

whose body is what the pass makes of the two bodies.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Var

from distributary.devices import Nest
from distributary.jaxprs._equations import (
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


# A `while` loop through which tapes compute gradients.
#
#     y = x
#     while y < 10:      # the number of turns is known only when the step runs
#         y = y * w
#
# The gradient needs the values before every turn, from the last to the first. The loop keeps some
# of them: those before every turn, then, when the memory for them is full, before every second one,
# every fourth one and so on. The values in between are computed again from the ones before.

# Values of this many turns are kept. A loop with fewer turns computes nothing again.
_NUM_KEPT = 64


def reversible_while_loop(
    is_going_on: Callable[[Nest], Any], turn: Callable[[Nest], Nest], start: Nest
) -> Nest:
    """Returns what `jax.lax.while_loop` returns, for `jax.vjp`.

    With `n` turns, the gradient evaluates at most `n * n / 128` turns again.

    Args:
        is_going_on: Returns whether there is another turn, bool `[]`; called once.
        turn: Returns the values after a turn; called once.
        start: The values before the first turn, a nest of arrays.
    """
    leaves, tree = jax.tree.flatten(start)
    first = [lax.convert_element_type(leaf, leaf.dtype) for leaf in leaves]  # not of a weak type

    def next_leaves(leaves: list[Any]) -> list[Any]:
        after = jax.tree.leaves(turn(jax.tree.unflatten(tree, leaves)))
        return [jnp.asarray(new, old.dtype) for new, old in zip(after, leaves, strict=True)]

    condition = lambda xs: is_going_on(jax.tree.unflatten(tree, xs))
    # All arrays around become arguments: `jax.closure_convert` leaves whole numbers where they are.
    goes_on, read = _closed(condition, first)
    next_, around = _closed(next_leaves, first)
    # Only floats have gradients.
    of_first, of_around = (list(map(_is_float, arrays)) for arrays in (first, around))

    @jax.custom_vjp
    def loop(first: list[Any], around: list[Any], read: list[Any]) -> list[Any]:
        return lax.while_loop(lambda xs: goes_on(xs, read)[0], lambda xs: next_(xs, around), first)

    def forward(first: list[Any], around: list[Any], read: list[Any]) -> Any:
        def keeping(state: Any) -> Any:
            xs, number, distance, kept = state
            is_full = number == _NUM_KEPT * distance
            halved = lambda kept: [jnp.concatenate([rows[::2]] * 2) for rows in kept]
            kept = lax.cond(is_full, halved, list, kept)
            distance = jnp.where(is_full, 2 * distance, distance)
            keep = lambda kept: [
                rows.at[number // distance].set(leaf) for rows, leaf in zip(kept, xs, strict=True)
            ]
            kept = lax.cond(number % distance == 0, keep, list, kept)
            return next_(xs, around), number + 1, distance, kept

        memory = [jnp.zeros((_NUM_KEPT, *leaf.shape), leaf.dtype) for leaf in first]
        begin = first, jnp.int32(0), jnp.int32(1), memory
        xs, number, distance, kept = lax.while_loop(
            lambda state: goes_on(state[0], read)[0], keeping, begin
        )
        return xs, (number, distance, kept, around)

    def backward(residuals: Any, cotangents: list[Any]) -> Any:
        number, distance, kept, around = residuals

        def before(turns: Any) -> list[Any]:
            at = turns // distance
            snapshot = [rows[at] for rows in kept]
            return lax.fori_loop(at * distance, turns, lambda _, xs: next_(xs, around), snapshot)

        def back(state: Any) -> Any:
            turns, of_values, total = state
            after = lambda xs, around: [*compress(next_(xs, around), of_first)]
            of_xs, more = jax.vjp(after, before(turns - 1), around)[1](of_values)
            total = list(map(jnp.add, total, compress(more, of_around)))
            return turns - 1, [*compress(of_xs, of_first)], total

        zeros = list(map(jnp.zeros_like, compress(around, of_around)))
        begin = number, [*compress(cotangents, of_first)], zeros
        _, of_values, total = lax.while_loop(lambda state: state[0] > 0, back, begin)
        return _or_none(of_values, of_first), _or_none(total, of_around), None

    loop.defvjp(forward, backward)
    return jax.tree.unflatten(tree, loop(first, around, read))


def _is_float(array: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(array), jnp.inexact))


def _or_none(gradients: Iterable[Any], is_float: Sequence[bool]) -> list[Any]:
    """Returns the gradients of floats, and None for other arrays."""
    left = iter(gradients)
    return [next(left) if f else None for f in is_float]


def _closed(
    function: Callable[[list[Any]], Any], example: list[Any]
) -> tuple[Callable[[list[Any], list[Any]], list[Any]], list[Any]]:
    """Returns a function of its arguments and of the arrays around it, and these arrays."""
    closed = jax.make_jaxpr(function)(example)
    run = lambda xs, around: jax.core.eval_jaxpr(closed.jaxpr, around, *xs)
    return run, closed.consts
