"""Do many workers, all in this process, run closures? And what would a large cluster cost?

50 workers and 4 servers in one process, links that encode every message. Counts that every step was
applied once on every server. Then a table of what limits a cluster, from this machine's figures in
`results/parameter_server.json`; it is arithmetic, no such cluster was run.

    python benchmarks/parameter_server_scale.py
"""

import json
import statistics
import time
import warnings
from argparse import Namespace
from typing import Any

import _harness
from _harness import Request, Row, number
from _peers import timed

NUM_WORKERS, NUM_SERVERS = 50, 4
NUM_STEPS = 5000
CLUSTERS = ((2, 2), (50, 4), (200, 20), (1000, 100))
STEPS_PER_WORKER_AND_SECOND = (1, 10)


def requests(arguments: Namespace) -> list[Request]:
    """Returns the only request."""
    return [{"replicas": f"{NUM_WORKERS} workers, {NUM_SERVERS} servers", "devices": 1}]


def measure(request: Request) -> list[Row]:
    """Runs; a step that was lost or applied twice is a problem."""
    import numpy as np

    import distributary as dist
    from distributary.coordinator import ClusterCoordinator
    from distributary.coordinator._messages import Limits

    warnings.simplefilter("error")
    num_steps = NUM_STEPS // 10 if request["quick"] else NUM_STEPS
    cluster = dist.experimental.local_cluster(NUM_WORKERS, NUM_SERVERS, limits=Limits())
    strategy = dist.ParameterServerStrategy(cluster)
    with strategy.scope():
        counts = [dist.Variable(np.zeros((64, 64), np.float32)) for _ in range(NUM_SERVERS)]
    coordinator = ClusterCoordinator(strategy)
    taking_part: set[int] = set()
    cpu_seconds: list[float] = []

    def step() -> Any:
        for count in counts:
            count.assign_add(np.ones((64, 64), np.float32))
        return dist.coordinator.experimental_get_current_worker_index()

    def block(num_steps: int) -> None:
        cpu = time.process_time()
        values = [coordinator.schedule(step) for _ in range(num_steps)]
        coordinator.join()
        cpu_seconds.append((time.process_time() - cpu) / num_steps)
        taking_part.update(int(value.fetch()) for value in values)

    seconds = _harness.interleave([timed("a step", block)], request["rounds"], num_steps)
    expected = (request["rounds"] + 1) * num_steps
    wrong = max(abs(int(count.numpy()[0, 0]) - expected) for count in counts)
    numbers = [
        number("steps lost or repeated on a server", wrong, "", 0),
        number("workers that took part", len(taking_part), ""),
        number("CPU per step", 1e3 * statistics.median(cpu_seconds[1:]), "ms"),
        *_limits(),
    ]
    problems = [f"{wrong} steps were lost or repeated"] * (wrong > 0)
    rounds = {name: [1e3 * value for value in values] for name, values in seconds.items()}
    what = f"{expected} steps in one process"
    replicas = request["replicas"]
    return [_harness.row(what, replicas, "ms", rounds, numbers=numbers, problems=problems)]


def _limits() -> list[Any]:
    """Returns what clusters would need, if every figure stayed what it is with two workers.

    A Python process uses about one core: above 1 it does not fit. The servers' figure falls with
    the bytes they have; that a step which touches every server also costs each a message is not in
    it.
    """
    path = _harness.RESULTS / "parameter_server.json"
    measured = {row["what"]: row["rounds"] for row in json.loads(path.read_text("utf-8"))["rows"]}
    chief = statistics.median(measured["CPU of the chief, an empty step"]["distributary"]) / 1e3
    server = statistics.median(measured["CPU of the servers, mlp32"]["distributary"]) / 1e3
    numbers = []
    for num_workers, num_servers in CLUSTERS:
        for rate in STEPS_PER_WORKER_AND_SECOND:
            steps = num_workers * rate
            where = f"{num_workers} workers, {num_servers} servers, {steps} steps/s"
            # The bytes of a step are divided between the servers, whatever their number.
            numbers += [
                number(f"{where}: the chief", steps * chief, "cores"),
                number(f"{where}: a server", steps * server / num_servers, "cores"),
            ]
    return numbers


if __name__ == "__main__":
    _harness.run(requests, measure, rounds=(3, 1))
