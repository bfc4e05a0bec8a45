"""How long does an asynchronous save of 256 MiB keep a training loop waiting?

32 variables of 8 MiB on two devices, a step that changes all of them and donates their buffers.
Every round saves once in a loop of steps with `checkpoint.CheckpointManager`:

    save       seconds until `save` returns, and training goes on
    next step  seconds of the step after it, over those of a step before it
    on disk    seconds until the checkpoint is complete, while training goes on
    numpy      seconds that a copy of the same arrays to NumPy takes: what cannot be avoided

    python benchmarks/save_time.py
"""

import statistics
import tempfile
import time
from argparse import Namespace
from typing import Any

import _harness
from _harness import Request, Row, number

BAR_SECONDS = 0.3
NUM_VARIABLES = 32
NUM_VALUES = 2 * 2**20


def requests(arguments: Namespace) -> list[Request]:
    """Returns the only request."""
    return [{"replicas": 2}]


def measure(request: Request) -> list[Row]:
    """Saves once per round."""
    import jax.numpy as jnp
    import numpy as np

    import distributary as dist

    strategy = dist.MirroredStrategy()
    with strategy.scope():
        variables = [
            dist.Variable(np.full(NUM_VALUES, i, np.float32), name=f"v{i}")
            for i in range(NUM_VARIABLES)
        ]

    def replica_step() -> Any:
        for variable in variables:
            variable.assign(variable.value() * 0.999 + 1.0)
        return jnp.float32(1.0)

    def step() -> float:
        start = time.perf_counter()
        strategy.run(replica_step)
        np.asarray(variables[-1].value()[:1])
        return time.perf_counter() - start

    found: dict[str, list[float]] = {"save": [], "next step": [], "on disk": [], "numpy": []}
    with tempfile.TemporaryDirectory() as folder:
        state = dist.checkpoint.Checkpoint(variables=variables)
        manager = dist.checkpoint.CheckpointManager(state, folder, max_to_keep=1)
        step()
        for _ in range(request["rounds"]):
            before = statistics.median(step() for _ in range(3))
            start = time.perf_counter()
            manager.save()
            found["save"].append(time.perf_counter() - start)
            found["next step"].append(step() - before)
            manager.wait_until_finished()
            found["on disk"].append(time.perf_counter() - start)
            start = time.perf_counter()
            copies = [np.array(variable.value()) for variable in variables]
            found["numpy"].append(time.perf_counter() - start)
            del copies
    numbers = [
        # The first save touches memory that the process did not have before.
        number("the first save", found["save"][0], "s"),
        number("save, median", statistics.median(found["save"]), "s", BAR_SECONDS),
    ]
    return [_harness.row("a save of 256 MiB", 2, "s", found, numbers=numbers)]


if __name__ == "__main__":
    _harness.run(requests, measure, rounds=(9, 2))
