"""Do many workers, all in this process, run closures? And what would a large cluster cost?

50 workers and 4 servers in one process, links that encode every message. Counts that every step was
applied once on every server. Then a table of what limits a cluster, from this machine's figures in
`results/parameter_server.json`; it is arithmetic, no such cluster was run.

    python benchmarks/parameter_server_scale.py
"""

import json
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import _command_line
import _report

_FOLDER = Path(__file__).resolve().parent
NUM_WORKERS, NUM_SERVERS = 50, 4
NUM_STEPS = 5000
CLUSTERS = ((2, 2), (50, 4), (200, 20), (1000, 100))
STEPS_PER_WORKER_AND_SECOND = (1, 10)


def main(arguments: Any) -> int:
    """Runs, prints, writes; 1 if a step was lost or applied twice, else 0."""
    import numpy as np

    import distributary as dist
    from distributary.coordinator import ClusterCoordinator
    from distributary.coordinator._messages import Limits

    load_before = _report.load_average()
    num_steps = NUM_STEPS // 10 if arguments.quick else NUM_STEPS
    cluster = dist.experimental.local_cluster(NUM_WORKERS, NUM_SERVERS, limits=Limits())
    strategy = dist.ParameterServerStrategy(cluster)
    with strategy.scope():
        counts = [dist.Variable(np.zeros((64, 64), np.float32)) for _ in range(NUM_SERVERS)]
    coordinator = ClusterCoordinator(strategy)

    def step() -> Any:
        for count in counts:
            count.assign_add(np.ones((64, 64), np.float32))
        return dist.coordinator.experimental_get_current_worker_index()

    def block() -> tuple[float, float, set[int]]:
        start, cpu = time.perf_counter(), time.process_time()
        values = [coordinator.schedule(step) for _ in range(num_steps)]
        coordinator.join()
        seconds, spent = time.perf_counter() - start, time.process_time() - cpu
        return seconds / num_steps, spent / num_steps, {int(value.fetch()) for value in values}

    block()
    blocks = [block() for _ in range(arguments.rounds)]
    expected = (arguments.rounds + 1) * num_steps
    applied = [int(count.numpy()[0, 0]) for count in counts]
    workers = set().union(*(own for _, _, own in blocks))
    seconds = statistics.median(one for one, _, _ in blocks)
    cpu = statistics.median(one for _, one, _ in blocks)
    print(
        f"{NUM_WORKERS} workers, {NUM_SERVERS} servers in one process: {expected} steps,"
        f" {1 / seconds:.0f} steps/s, {1e3 * cpu:.2f} ms CPU per step; {len(workers)} workers"
        f" took part; applied minus scheduled on each server:"
        f" {[count - expected for count in applied]}"
    )
    rows = _limits()
    _report.write(
        "parameter_server_scale",
        rows=[
            {
                "workers": NUM_WORKERS,
                "servers": NUM_SERVERS,
                "steps": expected,
                "applied": applied,
                "workers_that_took_part": len(workers),
                "seconds_per_step": seconds,
                "cpu_seconds_per_step": cpu,
            },
            *rows,
        ],
        settings={"rounds": arguments.rounds, "quick": arguments.quick},
        load_before=load_before,
        folder=arguments.output,
    )
    return 0 if set(applied) == {expected} else 1


def _limits() -> list[dict[str, Any]]:
    """What clusters would need, if every figure stayed what it is with two workers."""
    path = _report.RESULTS / "parameter_server.json"
    if not path.exists():
        print(f"no {path.name}: run parameter_server.py first", file=sys.stderr)
        return []
    measured = {row["workload"]: row for row in json.loads(path.read_text("utf-8"))["rows"]}
    chief = statistics.median(measured["empty"]["chief_cpu_seconds"]["distributary"])
    server = statistics.median(measured["mlp32"]["server_cpu_seconds"]["distributary"])
    print(
        f"\nMeasured with 2 workers and 2 servers: {1e6 * chief:.0f} us CPU of the chief per leased"
        f" closure, {1e3 * server:.2f} ms CPU of both servers per step of mlp32 (0.4 MB each way)."
    )
    rows = []
    for num_workers, num_servers in CLUSTERS:
        for rate in STEPS_PER_WORKER_AND_SECOND:
            steps = num_workers * rate
            rows.append(
                {
                    "workers": num_workers,
                    "servers": num_servers,
                    "steps_per_second": steps,
                    "chief_cores": steps * chief,
                    # The bytes of a step are divided between the servers, whatever their number.
                    "cores_per_server": steps * server / num_servers,
                }
            )
    _report.print_table(
        ["workers", "servers", "steps/s", "cores of the chief", "cores of a server"],
        [list(row.values()) for row in rows],
    )
    print(
        "A Python process uses about one core: above 1 it does not fit. The servers' figure falls"
        " with the bytes they have; a step that touches every server also costs each a message,"
        " which is not in it."
    )
    return rows


if __name__ == "__main__":
    sys.path.insert(0, str(_FOLDER.parent / "src"))
    warnings.simplefilter("error")
    sys.exit(main(_command_line.parse(_command_line.parser(__doc__, "blocks", 3, 1))))
