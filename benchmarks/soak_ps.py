"""Does a job with parameter servers lose or repeat steps when its workers are killed all the time?

A chief schedules steps, each of which adds 1 to a counter on every server, while random workers are
killed, and started again, or frozen for a while. At the end every counter must be the number of
steps. Then servers are killed, and the chief must name each of them within a second.

    python benchmarks/soak_ps.py --minutes 10
"""

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import _processes
import _report
import numpy as np

import distributary as dist
from distributary.errors import PSUnavailableError
from distributary.launch._environment import free_addresses

NAMED_SECONDS = 1.0
_STEPS_PER_ROUND = 1000
_SECONDS = 120.0


class Cluster:
    """The processes of workers and servers."""

    def __init__(self, num_workers: int, num_servers: int) -> None:
        addresses = free_addresses("127.0.0.1", num_workers + num_servers)
        self.spec = {"worker": addresses[:num_workers], "ps": addresses[num_workers:]}
        self.processes: dict[tuple[str, int], Any] = {}
        for task_type, tasks in self.spec.items():
            for index in range(len(tasks)):
                self.start(task_type, index)

    def start(self, task_type: str, index: int) -> None:
        config = {"cluster": self.spec, "task": {"type": task_type, "index": index}}
        self.processes[task_type, index] = subprocess.Popen(
            [sys.executable, __file__, "--task"],
            env={**_processes.environment(1), "TF_CONFIG": json.dumps(config)},
        )

    def kill(self, task_type: str, index: int) -> None:
        self.processes[task_type, index].kill()
        self.processes[task_type, index].wait(_SECONDS)

    def close(self) -> None:
        for task in self.processes:
            self.kill(*task)


class Job:
    """A chief with a counter on each server."""

    def __init__(self, cluster: Cluster) -> None:
        spec = dist.cluster_resolver.ClusterSpec(cluster.spec)
        self.strategy = dist.ParameterServerStrategy(
            dist.cluster_resolver.SimpleClusterResolver(spec, task_type="chief")
        )
        with self.strategy.scope():
            self.counters = [dist.Variable(0) for _ in cluster.spec["ps"]]
            self.weights = dist.Variable(np.zeros((256, 64), np.float32))
        self.coordinator = dist.coordinator.ClusterCoordinator(self.strategy)
        self.num_scheduled = 0

    def step(self, x: Any) -> Any:
        for counter in self.counters:
            counter.assign_add(1)
        with dist.GradientTape() as tape:
            loss = ((x @ self.weights) ** 2).mean()
        (gradient,) = dist.get_replica_context().all_reduce(
            "SUM", tape.gradient(loss, [self.weights])
        )
        self.weights.assign_sub(0.1 * gradient)
        return loss

    def closure(self, x: Any) -> Any:
        return self.strategy.run(self.step, args=(x,))

    def schedule(self, num_steps: int) -> list[Any]:
        x = np.ones((8, 256), np.float32)
        self.num_scheduled += num_steps
        return [self.coordinator.schedule(self.closure, args=(x,)) for _ in range(num_steps)]

    def differences(self) -> list[int]:
        return [int(counter.numpy()) - self.num_scheduled for counter in self.counters]


class Faults(threading.Thread):
    """Kills and freezes workers until `ended` is set, never all at once."""

    def __init__(self, cluster: Cluster, seed: int, mean_seconds: float) -> None:
        super().__init__()
        self.ended = threading.Event()
        self.num_kills = 0
        self.num_freezes = 0
        self._cluster = cluster
        self._chance = random.Random(seed)
        self._mean_seconds = mean_seconds

    def run(self) -> None:
        chance = self._chance
        while not self.ended.wait(chance.expovariate(1 / self._mean_seconds)):
            index = chance.randrange(len(self._cluster.spec["worker"]))
            if chance.random() < 0.75:
                self._cluster.kill("worker", index)
                self.num_kills += 1
                self.ended.wait(chance.uniform(0, 1))
                self._cluster.start("worker", index)
            else:
                process = self._cluster.processes["worker", index]
                process.send_signal(signal.SIGSTOP)
                self.num_freezes += 1
                self.ended.wait(chance.uniform(0, 10))
                process.send_signal(signal.SIGCONT)


def soak(cluster: Cluster, arguments: argparse.Namespace) -> dict[str, Any]:
    """What has become of the steps."""
    job = Job(cluster)
    for value in job.schedule(10):
        value.fetch()
    faults = Faults(cluster, arguments.seed, arguments.seconds_between)
    faults.start()
    longest_gap = 0.0
    start = last = time.monotonic()
    try:
        while time.monotonic() < start + 60 * arguments.minutes:
            for value in job.schedule(_STEPS_PER_ROUND):
                value.fetch()
                now = time.monotonic()
                longest_gap, last = max(longest_gap, now - last), now
    finally:
        faults.ended.set()
        faults.join()
    job.coordinator.join()
    found = job.coordinator.statistics()
    result = {
        "minutes": round((time.monotonic() - start) / 60, 1),
        "steps": job.num_scheduled,
        "workers killed": faults.num_kills,
        "workers frozen": faults.num_freezes,
        "losses noticed": sum(worker.num_losses for worker in found.workers),
        "closures repeated": found.num_retried,
        "pushes refused as repetitions": sum(server.num_repeated for server in found.servers),
        "longest gap between results, s": round(longest_gap, 2),
        "applied - scheduled, by server": job.differences(),
    }
    job.strategy._cluster.close()
    return result


def name_killed_servers(cluster: Cluster, rounds: int) -> list[float]:
    """Seconds from the end of a server to the error that names it."""
    seconds = []
    for i in range(rounds):
        job = Job(cluster)
        job.schedule(10)[-1].fetch()
        job.schedule(_STEPS_PER_ROUND)[100].fetch()
        index = i % len(cluster.spec["ps"])
        start = time.monotonic()
        cluster.kill("ps", index)
        try:
            while True:
                job.schedule(_STEPS_PER_ROUND)
                job.coordinator.join()
        except PSUnavailableError as error:
            seconds.append(time.monotonic() - start)
            if f"ps {index} at {cluster.spec['ps'][index]}" not in str(error):
                raise
        job.strategy._cluster.close()
        cluster.start("ps", index)
    return seconds


def main(arguments: argparse.Namespace) -> int:
    """Runs, prints, writes; 1 if a step was lost or repeated or a server named late, else 0."""
    load_before = _report.load_average()
    cluster = Cluster(arguments.workers, arguments.servers)
    try:
        soaked = soak(cluster, arguments)
        seconds = name_killed_servers(cluster, arguments.server_kills)
    finally:
        cluster.close()
    lost = any(soaked["applied - scheduled, by server"])
    late = max(seconds)
    rows = [[name, value, None] for name, value in soaked.items()]
    rows[-1][-1] = "over" if lost else "ok"
    rows.append(["server killed until named, median, s", statistics.median(seconds), None])
    rows.append(["the same, maximum, s", late, _report.verdict(late, NAMED_SECONDS)])
    _report.print_table(["", "measured", "bar"], rows)
    _report.write(
        "soak_ps",
        rows=[soaked, {"named_seconds": seconds}],
        settings={n: v for n, v in vars(arguments).items() if isinstance(v, int | float)},
        load_before=load_before,
        folder=arguments.output,
    )
    return int(lost or late > NAMED_SECONDS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--seconds-between", type=float, default=10.0, help="faults, on average")
    parser.add_argument("--server-kills", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=_report.RESULTS, metavar="FOLDER")
    parser.add_argument("--task", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.task:
        dist.Server(dist.cluster_resolver.TFConfigClusterResolver()).join()
    sys.exit(main(given))
