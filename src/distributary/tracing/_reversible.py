"""A `while` loop through which tapes compute gradients.

    y = x
    while y < 10:      # the number of turns is known only when the step runs
        y = y * w

The gradient needs the values before every turn, from the last to the first. The loop keeps some of
them: those before every turn, then, when the memory for them is full, before every second one,
every fourth one and so on. The values in between are computed again from the ones before.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
    is_float = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]
    first = [lax.convert_element_type(leaf, leaf.dtype) for leaf in leaves]  # not of a weak type

    def next_leaves(leaves: list[Any]) -> list[Any]:
        after = jax.tree.leaves(turn(jax.tree.unflatten(tree, leaves)))
        return [jnp.asarray(new, old.dtype) for new, old in zip(after, leaves, strict=True)]

    condition = lambda xs: is_going_on(jax.tree.unflatten(tree, xs))
    # All arrays around become arguments: `jax.closure_convert` leaves whole numbers where they are.
    goes_on, read = _closed(condition, first)
    next_, around = _closed(next_leaves, first)
    varied = [jnp.issubdtype(jnp.result_type(array), jnp.inexact) for array in around]
    used = [array for array, f in zip(around, varied, strict=True) if f]
    fixed = [array for array, f in zip(around, varied, strict=True) if not f]

    def all_around(used: list[Any], fixed: list[Any]) -> list[Any]:
        parts = iter(used), iter(fixed)
        return [next(parts[not f]) for f in varied]

    def split(leaves: list[Any]) -> tuple[list[Any], list[Any]]:
        pairs = list(zip(leaves, is_float, strict=True))
        return [leaf for leaf, f in pairs if f], [leaf for leaf, f in pairs if not f]

    def joined(floats: list[Any], others: list[Any]) -> list[Any]:
        parts = iter(floats), iter(others)
        return [next(parts[not f]) for f in is_float]

    @jax.custom_vjp
    def loop(first: list[Any], used: Any, fixed: Any, read: Any) -> list[Any]:
        around = all_around(used, fixed)
        return lax.while_loop(lambda xs: goes_on(xs, read)[0], lambda xs: next_(xs, around), first)

    def forward(first: list[Any], used: Any, fixed: Any, read: Any) -> Any:
        around = all_around(used, fixed)

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
        return xs, (number, distance, kept, used, fixed)

    def backward(residuals: Any, cotangents: list[Any]) -> Any:
        number, distance, kept, used, fixed = residuals
        around = all_around(used, fixed)

        def before(turns: Any) -> list[Any]:
            at = turns // distance
            snapshot = [rows[at] for rows in kept]
            return lax.fori_loop(at * distance, turns, lambda _, xs: next_(xs, around), snapshot)

        def back(state: Any) -> Any:
            turns, of_values, of_used = state
            floats, others = split(before(turns - 1))
            after = lambda floats, used: split(
                next_(joined(floats, others), all_around(used, fixed))
            )[0]
            of_values, more = jax.vjp(after, floats, used)[1](of_values)
            return turns - 1, of_values, jax.tree.map(jnp.add, of_used, more)

        zeros = jax.tree.map(jnp.zeros_like, used)
        begin = number, split(cotangents)[0], zeros
        _, of_values, of_used = lax.while_loop(lambda state: state[0] > 0, back, begin)
        none = [np.zeros(rows.shape[1:], jax.dtypes.float0) for rows in split(kept)[1]]
        return joined(of_values, none), of_used, None, None

    loop.defvjp(forward, backward)
    return jax.tree.unflatten(tree, loop(first, used, fixed, read))


def _closed(
    function: Callable[[list[Any]], Any], example: list[Any]
) -> tuple[Callable[[list[Any], list[Any]], list[Any]], list[Any]]:
    """Returns a function of its arguments and of the arrays around it, and these arrays."""
    closed = jax.make_jaxpr(function)(example)
    run = lambda xs, around: jax.core.eval_jaxpr(closed.jaxpr, around, *xs)
    return run, closed.consts
