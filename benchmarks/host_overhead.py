"""How long does a cached `strategy.run` keep the host, over calling the compiled function?

20 variables of shape (8,), an update that costs nothing, one input, no collective. Each call is
timed alone, until it returns; the wait for its result is outside the clock. "back to back" is
the time per call of a block of calls that ends with one wait, as in a training loop.

    python benchmarks/host_overhead.py
"""

import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import _harness
from _harness import Request, Row, number, pair
from _peers import Peer, stepping

Call: TypeAlias = Callable[[int], Any]

BAR_MICROSECONDS = 60.0
NUM_VARIABLES = 20
SHAPE = (8,)


def requests(arguments: Namespace) -> Iterator[Request]:
    """Yields the numbers of replicas."""
    for num_replicas in arguments.replicas:
        yield {"replicas": num_replicas}


def measure(request: Request) -> list[Row]:
    """Measures both peers in turns at one replica count."""
    import jax

    calls = {
        "handwritten": _handwritten(request["replicas"]),
        "distributary": _distributary(request["replicas"]),
    }
    # The results are trees. Asking ours for its components instead of waiting for it would dispatch
    # a slice for each replica, which then still occupies the devices' threads at the next call.
    wait = jax.block_until_ready
    alone = [Peer(name, partial(_alone, call)) for name, call in calls.items()]
    blocks = [stepping(name, call, wait) for name, call in calls.items()]
    for peer in blocks:
        peer.time_block(50)  # compiles; fills the caches
    rows = []
    for what, peers in (("the host's part of a cached `run`", alone), ("back to back", blocks)):
        seconds = _harness.interleave(peers, request["rounds"], request["steps"])
        rounds = {name: [1e6 * value for value in values] for name, values in seconds.items()}
        over = [a - b for a, b in zip(rounds["distributary"], rounds["handwritten"], strict=True)]
        more = [number("overhead", statistics.median(over), "µs", BAR_MICROSECONDS)]
        rows.append(
            _harness.row(
                what,
                request["replicas"],
                "µs",
                rounds,
                [pair("distributary", "handwritten")] * (peers is alone),
                numbers=more * (peers is alone),
            )
        )
    return rows


def _alone(call: Call, num_calls: int) -> float:
    """Returns the median seconds until a call returns, each with nothing else in flight."""
    import jax

    durations: list[float] = []
    for _ in range(num_calls):
        _let_the_pool_fall_asleep()
        start = time.perf_counter()
        output = call(0)
        durations.append(time.perf_counter() - start)
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


def _handwritten(num_replicas: int) -> Call:
    import _handwritten as handwritten
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    def replica_step(state: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        return [value * 0.5 + 1.0 for value in state], x.sum(keepdims=True)

    replicas = handwritten.LocalReplicas(num_replicas)
    state = replicas.place([jnp.zeros(SHAPE) for _ in range(NUM_VARIABLES)], PartitionSpec())
    rows = PartitionSpec(handwritten.AXIS)
    x = replicas.place(jnp.ones((num_replicas * SHAPE[0],)), rows)
    step = handwritten.compile_step(replica_step, replicas.mesh, rows)

    def call(number: int) -> jax.Array:
        nonlocal state
        state, total = step(state, x)
        return total

    return call


def _distributary(num_replicas: int) -> Call:
    import jax
    import numpy as np
    from _distributary import mirrored, on_every_replica

    import distributary as dist

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


if __name__ == "__main__":
    _harness.run(
        requests,
        measure,
        rounds=(20, 4),
        options={
            "--replicas": {"choices": (1, 2, 4), "default": (1, 2)},
            "--steps": {"type": int, "default": 300, "help": "calls per round and kind"},
        },
    )
