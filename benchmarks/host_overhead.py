"""How long does a cached `strategy.run` keep the host, over calling the compiled function?

20 variables of shape (8,), an update that costs nothing, one input, no collective. Each call is
timed alone, until it returns; the wait for its result is outside the clock.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import _handwritten
import jax
import jax.numpy as jnp
import numpy as np
from _distributary import mirrored, on_every_replica
from _peers import Peer
from jax.sharding import PartitionSpec

import distributary as dist

__all__ = ["peers"]

Call: TypeAlias = Callable[[int], Any]

NUM_VARIABLES = 20
SHAPE = (8,)


def peers(names: Sequence[str], num_replicas: int) -> list[Peer]:
    """Returns calls of `strategy.run` and of the compiled function, each timed alone."""
    calls = {
        "handwritten": _by_hand,
        "control": _by_hand,
        "distributary": _with_a_strategy,
    }
    return [Peer(name, partial(_alone, calls[name](num_replicas))) for name in names]


def _alone(call: Call, num_calls: int) -> float:
    """Returns the median seconds until a call returns, each with nothing else in flight."""
    durations: list[float] = []
    for _ in range(num_calls):
        _let_the_pool_fall_asleep()
        start = time.perf_counter()
        output = call(0)
        durations.append(time.perf_counter() - start)
        # The result is a tree. Asking ours for its components instead of waiting for it would
        # dispatch a slice for each replica, which then still occupies the devices' threads at the
        # next call.
        jax.block_until_ready(output)
    return statistics.median(durations)


def _let_the_pool_fall_asleep() -> None:
    """Keeps this thread busy until XLA's threads have stopped spinning for more work.

    A call that comes sooner finds them awake and is 40 us cheaper on two cores, for whichever peer
    leaves the shorter gap between its calls.
    """
    end = time.perf_counter() + 0.0005
    while time.perf_counter() < end:
        pass


def _by_hand(num_replicas: int) -> Call:
    def replica_step(state: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        return [value * 0.5 + 1.0 for value in state], x.sum(keepdims=True)

    replicas = _handwritten.Replicas.of_this_process(num_replicas)
    state = replicas.place([jnp.zeros(SHAPE) for _ in range(NUM_VARIABLES)], PartitionSpec())
    rows = PartitionSpec(_handwritten.AXIS)
    x = replicas.place(jnp.ones((num_replicas * SHAPE[0],)), rows)
    step = _handwritten.compile_step(replica_step, replicas.mesh, rows)

    def call(number: int) -> jax.Array:
        nonlocal state
        state, total = step(state, x)
        return total

    return call


def _with_a_strategy(num_replicas: int) -> Call:
    strategy = mirrored(num_replicas)
    with strategy.scope():
        variables = [
            dist.Variable(np.zeros(SHAPE, np.float32), name=f"v{i}") for i in range(NUM_VARIABLES)
        ]
    x = on_every_replica(strategy, np.ones((num_replicas, *SHAPE), np.float32))

    def step(x: jax.Array) -> jax.Array:
        for variable in variables:
            variable.assign(variable.value() * 0.5 + 1.0)
        return x.sum()

    return lambda number: strategy.run(step, args=(x,))
