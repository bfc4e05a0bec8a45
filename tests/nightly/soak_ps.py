"""Kills and freezes the workers of a job with parameter servers; no step may be lost or repeated.

A chief schedules steps, each of which adds 1 to a counter on every server, while random workers are
killed, and started again, or frozen for a while. At the end every counter must be the number of
steps. Then servers are killed, and the chief must name each of them within a second.

    python tests/nightly/soak_ps.py [--minutes 10] [--seed 0]

Ends with 1 if a step was lost or repeated, or a server was named late.
"""

import argparse
import random
import signal
import sys
import threading
import time
from typing import Any

import numpy as np
from _workers import FOLDER, Cluster, environment

import distributary as dist
from distributary.errors import PSUnavailableError

_NUM_WORKERS, _NUM_SERVERS = 3, 2
_NUM_KILLED_SERVERS = 6
_NAMED_SECONDS = 1.0
_STEPS_PER_ROUND = 1000
_MEAN_SECONDS_BETWEEN_FAULTS = 10.0


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

    def __init__(self, cluster: Cluster, seed: int) -> None:
        super().__init__()
        self.ended = threading.Event()
        self.num_kills = 0
        self.num_freezes = 0
        self._cluster = cluster
        self._chance = random.Random(seed)

    def run(self) -> None:
        chance = self._chance
        while not self.ended.wait(chance.expovariate(1 / _MEAN_SECONDS_BETWEEN_FAULTS)):
            index = chance.randrange(len(self._cluster.spec["worker"]))
            if chance.random() < 0.75:
                self._cluster.kill("worker", index)
                self.num_kills += 1
                self.ended.wait(chance.uniform(0, 1))
                self._cluster.start_task("worker", index)
            else:
                process = self._cluster.processes["worker", index]
                process.send_signal(signal.SIGSTOP)
                self.num_freezes += 1
                self.ended.wait(chance.uniform(0, 10))
                process.send_signal(signal.SIGCONT)


def soak(cluster: Cluster, seconds: float, seed: int) -> dict[str, Any]:
    """Returns what has become of the steps."""
    job = Job(cluster)
    for value in job.schedule(10):
        value.fetch()
    faults = Faults(cluster, seed)
    faults.start()
    longest_gap = 0.0
    start = last = time.monotonic()
    end = start + seconds
    try:
        while time.monotonic() < end:
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


def name_killed_servers(cluster: Cluster) -> list[float]:
    """Returns seconds from the end of a server to the error that names it."""
    seconds = []
    for i in range(_NUM_KILLED_SERVERS):
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
        cluster.start_task("ps", index)
    return seconds


def main() -> int:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    command = [sys.executable, str(FOLDER / "_ps_tasks.py")]
    cluster = Cluster(command, environment(), worker=_NUM_WORKERS, ps=_NUM_SERVERS)
    try:
        cluster.start("worker", "ps")
        soaked = soak(cluster, 60 * options.minutes, options.seed)
        seconds = name_killed_servers(cluster)
    finally:
        cluster.close()
    for what, value in soaked.items():
        print(f"{what}: {value}")
    print("server killed until named, s:", [round(one, 2) for one in seconds])
    is_exact = not any(soaked["applied - scheduled, by server"])
    return 0 if is_exact and max(seconds) <= _NAMED_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
