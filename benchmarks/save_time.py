"""How long does an asynchronous save of 256 MiB keep a training loop waiting?

32 variables of 8 MiB on two devices, a step that changes all of them and donates their buffers.
Every round saves once in a loop of steps with `checkpoint.CheckpointManager`:

    save       seconds until `save` returns, and training goes on
    next step  seconds of the step after it, over those of a step before it
    on disk    seconds until the checkpoint is complete, while training goes on
    numpy      seconds that a copy of the same arrays to NumPy takes: what cannot be avoided

    python benchmarks/save_time.py
"""

import argparse
import statistics
import sys
import tempfile
import time
from typing import Any, TypeAlias

import _command_line
import _processes
import _report

Json: TypeAlias = Any

BAR_SECONDS = 0.3
NUM_VARIABLES = 32
NUM_VALUES = 2 * 2**20
_CHILD_TIMEOUT_SECONDS = 300.0


def main(arguments: argparse.Namespace) -> int:
    """Measures, prints, writes; 1 if the measurement failed, else 0."""
    load_before = _report.load_average()
    request = {"rounds": arguments.rounds}
    try:
        row = _processes.run_child(__file__, request, 2, _CHILD_TIMEOUT_SECONDS)
    except _processes.ChildFailedError as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    median = {name: statistics.median(seconds) for name, seconds in row.items()}
    print("\nSeconds; the first save touches memory that the process did not have before.\n")
    _report.print_table(
        ["", "first", "median", "max", "bar", ""],
        [
            [name, seconds[0], median[name], max(seconds)]
            + ([BAR_SECONDS, _report.verdict(median[name], BAR_SECONDS)] * (name == "save"))
            + [None, ""] * (name != "save")
            for name, seconds in row.items()
        ],
    )
    _report.write(
        "save_time",
        rows=[row],
        settings={
            "rounds": arguments.rounds,
            "mebibytes": NUM_VARIABLES * NUM_VALUES * 4 / 2**20,
            "bar_seconds": BAR_SECONDS,
        },
        load_before=load_before,
        folder=arguments.output,
    )
    return 0


def measure(request: dict[str, Json]) -> dict[str, list[float]]:
    """Seconds of every round; runs in the child process."""
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

    result: dict[str, list[float]] = {"save": [], "next step": [], "on disk": [], "numpy": []}
    with tempfile.TemporaryDirectory() as folder:
        state = dist.checkpoint.Checkpoint(variables=variables)
        manager = dist.checkpoint.CheckpointManager(state, folder, max_to_keep=1)
        step()
        for _ in range(request["rounds"]):
            before = statistics.median(step() for _ in range(3))
            start = time.perf_counter()
            manager.save()
            result["save"].append(time.perf_counter() - start)
            result["next step"].append(step() - before)
            manager.wait_until_finished()
            result["on disk"].append(time.perf_counter() - start)
            start = time.perf_counter()
            copies = [np.array(variable.value()) for variable in variables]
            result["numpy"].append(time.perf_counter() - start)
            del copies
    return result


def _parse() -> argparse.Namespace:
    parser = _command_line.parser(__doc__, "saves", 9, 2)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return _command_line.parse(parser)


if __name__ == "__main__":
    _command_line.run(_parse(), main, measure)
