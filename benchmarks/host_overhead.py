"""How long does a cached `strategy.run` keep the host, over calling the compiled function?

20 variables of shape (8,), an update that costs nothing, one input, no collective. Each call is
timed alone, until it returns; the wait for its result is outside the clock. "back to back" is
the time per call of a block of calls that ends with one wait, as in a training loop.

    python benchmarks/host_overhead.py
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import _command_line
import _processes
import _report

Json: TypeAlias = Any
Call: TypeAlias = Callable[[], Any]
Wait: TypeAlias = Callable[[Any], object]

BAR_MICROSECONDS = 60.0
NUM_VARIABLES = 20
SHAPE = (8,)

_CHILD_TIMEOUT_SECONDS = 300.0


def main(arguments: argparse.Namespace) -> int:
    """Measures, prints, writes; 1 if a measurement failed, else 0."""
    load_before = _report.load_average()
    requests = [
        (
            {
                "replicas": num_replicas,
                "rounds": arguments.rounds,
                "calls": arguments.steps,
                "peers": arguments.peers.split(","),
            },
            num_replicas,
        )
        for num_replicas in arguments.replicas
    ]
    rows, failed = _processes.run_children(__file__, requests, _CHILD_TIMEOUT_SECONDS)
    print("Microseconds per call; host = until the call returns; medians of a round's calls.\n")
    _report.print_table(
        [
            "R",
            "hand host min",
            "median",
            "dist host min",
            "median",
            "overhead",
            "of min",
            "bar",
            "",
            "hand back to back",
            "dist back to back",
        ],
        [_table_row(row) for row in rows],
    )
    if rows:
        _report.write(
            "host_overhead",
            rows=rows,
            settings={
                "variables": NUM_VARIABLES,
                "shape": SHAPE,
                "rounds": arguments.rounds,
                "calls_per_round": arguments.steps,
                "bar_microseconds": BAR_MICROSECONDS,
            },
            load_before=load_before,
            folder=arguments.output,
        )
    return int(failed)


def measure(request: dict[str, Json]) -> dict[str, Json]:
    """All peers in turns at one replica count; runs in the child process."""
    builders = {"handwritten": _handwritten, "distributary": _distributary}
    peers = {name: builders[name](request["replicas"]) for name in request["peers"]}
    host: dict[str, list[float]] = {name: [] for name in peers}
    back_to_back: dict[str, list[float]] = {name: [] for name in peers}
    for call, wait in peers.values():
        for _ in range(50):  # compiles; fills the caches
            wait(call())
    names = list(peers)
    for round_number in range(request["rounds"]):
        for name in names if round_number % 2 == 0 else reversed(names):
            call, wait = peers[name]
            host[name].append(_time_calls(call, wait, request["calls"]))
            back_to_back[name].append(_time_block(call, wait, request["calls"]))
    overhead = overhead_of_minima = None
    if "distributary" in peers:
        overhead_of_minima = min(host["distributary"]) - min(host["handwritten"])
        overhead = statistics.median(
            ours - theirs
            for ours, theirs in zip(host["distributary"], host["handwritten"], strict=True)
        )
    return {
        "replicas": request["replicas"],
        "host_microseconds": host,
        "back_to_back_microseconds": back_to_back,
        "overhead_microseconds": overhead,
        "overhead_of_minima_microseconds": overhead_of_minima,
    }


def _time_calls(call: Call, wait: Wait, num_calls: int) -> float:
    """Median microseconds until a call returns, each with nothing else in flight."""
    durations: list[float] = []
    for _ in range(num_calls):
        _let_the_pool_fall_asleep()
        start = time.perf_counter()
        output = call()
        durations.append(time.perf_counter() - start)
        wait(output)
    return 1e6 * statistics.median(durations)


def _let_the_pool_fall_asleep() -> None:
    """Keeps this thread busy until XLA's threads have stopped spinning for more work.

    A call that comes sooner finds them awake and is 40 us cheaper on two cores, for whichever peer
    leaves the shorter gap between its calls.
    """
    end = time.perf_counter() + 0.0005
    while time.perf_counter() < end:
        pass


def _time_block(call: Call, wait: Wait, num_calls: int) -> float:
    """Microseconds per call of `num_calls` calls and one wait."""
    start = time.perf_counter()
    output = None
    for _ in range(num_calls):
        output = call()
    wait(output)
    return 1e6 * (time.perf_counter() - start) / num_calls


def _handwritten(num_replicas: int) -> tuple[Call, Wait]:
    import _handwritten as handwritten
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    def replica_step(state: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        return [value * 0.5 + 1.0 for value in state], x.sum(keepdims=True)

    state = [jnp.zeros(SHAPE) for _ in range(NUM_VARIABLES)]
    x = jnp.ones((num_replicas * SHAPE[0],))
    mesh = None
    if num_replicas > 1:
        mesh = Mesh(np.array(jax.devices()[:num_replicas]), ("replica",))
        state = jax.device_put(state, NamedSharding(mesh, PartitionSpec()))
        x = jax.device_put(x, NamedSharding(mesh, PartitionSpec("replica")))
    step = handwritten.compile_step(replica_step, mesh, PartitionSpec("replica"))

    def call() -> jax.Array:
        nonlocal state
        state, total = step(state, x)
        return total

    return call, jax.block_until_ready


def _distributary(num_replicas: int) -> tuple[Call, Wait]:
    import jax
    import numpy as np
    from _distributary import on_every_replica

    import distributary as dist

    strategy = dist.MirroredStrategy([f"CPU:{i}" for i in range(num_replicas)])
    with strategy.scope():
        variables = [
            dist.Variable(np.zeros(SHAPE, np.float32), name=f"v{i}") for i in range(NUM_VARIABLES)
        ]
    x = on_every_replica(strategy, np.ones((num_replicas, *SHAPE), np.float32))

    def step(x: jax.Array) -> jax.Array:
        for variable in variables:
            variable.assign(variable.value() * 0.5 + 1.0)
        return x.sum()

    def call() -> Any:
        return strategy.run(step, args=(x,))

    # The result is a tree. Asking it for its components instead would dispatch a slice for each
    # replica, which then still occupies the devices' threads when the next call is timed.
    return call, jax.block_until_ready


def _table_row(row: dict[str, Json]) -> list[object]:
    def both(name: str) -> list[object]:
        times = row["host_microseconds"].get(name)
        return [min(times), statistics.median(times)] if times else [None, None]

    def block(name: str) -> object:
        times = row["back_to_back_microseconds"].get(name)
        return statistics.median(times) if times else None

    overhead = row["overhead_microseconds"]
    cells = [
        row["replicas"],
        *both("handwritten"),
        *both("distributary"),
        overhead,
        row["overhead_of_minima_microseconds"],
        BAR_MICROSECONDS,
        _report.verdict(overhead, BAR_MICROSECONDS),
        block("handwritten"),
        block("distributary"),
    ]
    return [f"{cell:.1f}" if isinstance(cell, float) else cell for cell in cells]


def _parse() -> argparse.Namespace:
    parser = _command_line.parser(__doc__, "rounds per peer", 20, 4)
    parser.add_argument("--steps", type=int, default=300, help="calls per round and kind")
    _command_line.add_replicas(parser, "1,2")
    parser.add_argument("--peers", default="handwritten,distributary")
    arguments = _command_line.parse(parser)
    return arguments


if __name__ == "__main__":
    _command_line.run(_parse(), main, measure)
