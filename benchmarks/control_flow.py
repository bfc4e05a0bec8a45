"""What do Python's loops and branches cost, next to the same ones written with `jax.lax`?

A recurrent cell of 128 units on 32 rows, for 64 turns, compiled by `distributary.function`. Both
programs get the same arrays and return the same number, the "loss" of the report.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from _peers import Peer, stepping
from jax import Array, lax

import distributary as dist

__all__ = ["peers"]

Function: TypeAlias = Callable[[Any, Array], Array]

_TURNS, _ROWS, _UNITS = 64, 32, 128
_RANDOM = np.random.default_rng(0)
_KERNEL = jnp.asarray(_RANDOM.normal(size=(_UNITS, _UNITS)) / 12, jnp.float32)
_SEQUENCE = jnp.asarray(_RANDOM.normal(size=(_TURNS, _ROWS, _UNITS)), jnp.float32)
_STATE = jnp.ones((_ROWS, _UNITS))


def peers(names: Sequence[str], flow: str) -> list[Peer]:
    """Returns a flow in Python, and by hand."""
    python, by_hand, first = FLOWS[flow]
    made = {
        "distributary": dist.function(python, autograph=True),
        "handwritten": jax.jit(by_hand),
    }
    return [stepping(name, _step(made[name], first), jax.block_until_ready) for name in names]


def _step(function: Callable[..., Array], first: Any) -> Callable[[int], Array]:
    return lambda number: function(first, _STATE)


def _cell(state: Array, x: Any) -> Array:
    return jnp.tanh(state @ _KERNEL + x)


def _rows(xs: Array, state: Array) -> Array:
    for x in xs:
        state = _cell(state, x)
    return jnp.sum(state)


def _rows_by_hand(xs: Array, state: Array) -> Array:
    return jnp.sum(lax.scan(lambda state, x: (_cell(state, x), None), state, xs)[0])


def _range(count: Any, state: Array) -> Array:
    for i in range(count):
        state = _cell(state, i * 0.01)
    return jnp.sum(state)


def _range_by_hand(count: Any, state: Array) -> Array:
    return jnp.sum(lax.fori_loop(0, count, lambda i, state: _cell(state, i * 0.01), state))


def _while(count: Any, state: Array) -> Array:
    i = 0
    while i < count and jnp.sum(state) < 1e9:
        state = _cell(state, 0.1)
        i += 1
    return jnp.sum(state)


def _while_by_hand(count: Any, state: Array) -> Array:
    goes_on = lambda both: (both[0] < count) & (jnp.sum(both[1]) < 1e9)
    return jnp.sum(
        lax.while_loop(goes_on, lambda both: (both[0] + 1, _cell(both[1], 0.1)), (0, state))[1]
    )


def _if(count: Any, state: Array) -> Array:
    for i in range(count):
        if i % 2 == 0:
            state = _cell(state, 0.1)
        else:
            state = state * 0.5 + 1
    return jnp.sum(state)


def _if_by_hand(count: Any, state: Array) -> Array:
    def turn(i: Any, state: Array) -> Array:
        return lax.cond(i % 2 == 0, lambda: _cell(state, 0.1), lambda: state * 0.5 + 1)

    return jnp.sum(lax.fori_loop(0, count, turn, state))


def _append(xs: Array, state: Array) -> Array:
    found = []
    for x in xs:
        state = _cell(state, x)
        found.append(jnp.sum(state))
    return jnp.sum(jnp.stack(found))


def _append_by_hand(xs: Array, state: Array) -> Array:
    def turn(state: Array, x: Array) -> tuple[Array, Array]:
        state = _cell(state, x)
        return state, jnp.sum(state)

    return jnp.sum(lax.scan(turn, state, xs)[1])


def _gradient(function: Function) -> Function:
    def gradient(xs: Array, state: Array) -> Array:
        with dist.GradientTape() as tape:
            tape.watch(state)
            loss = function(xs, state)
        return jnp.sum(tape.gradient(loss, state))

    return gradient


def _gradient_by_hand(function: Function) -> Function:
    return lambda xs, state: jnp.sum(jax.grad(function, 1)(xs, state))


_COUNT = jnp.int32(_TURNS)
FLOWS: dict[str, tuple[Function, Function, Any]] = {
    "for over rows": (_rows, _rows_by_hand, _SEQUENCE),
    "for over a range": (_range, _range_by_hand, _COUNT),
    "while": (_while, _while_by_hand, _COUNT),
    "if in a loop": (_if, _if_by_hand, _COUNT),
    "append in a loop": (_append, _append_by_hand, _SEQUENCE),
    "gradient of for": (_gradient(_rows), _gradient_by_hand(_rows_by_hand), _SEQUENCE),
    "gradient of append": (_gradient(_append), _gradient_by_hand(_append_by_hand), _SEQUENCE),
}
