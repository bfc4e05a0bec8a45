"""A `while` loop through which tapes compute gradients.

    y = x
    while y < 10:      # the number of turns is known only when the step runs
        y = y * w

The gradient needs the values before every turn, from the last to the first. The loop keeps some of
them: those before every turn, then, when the memory for them is full, before every second one,
every fourth one and so on. The values in between are computed again from the ones before.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from distributary.devices import Nest

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
