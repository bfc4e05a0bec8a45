"""Does a job with parameter servers lose or repeat steps when its workers are killed all the time?

A chief schedules steps, each of which adds 1 to a counter on every server, while random workers are
killed, and started again, or frozen for a while. At the end every counter must be the number of
steps. Then servers are killed, and the chief must name each of them within a second.

    python benchmarks/soak_ps.py --minutes 10
"""

import random
import signal
import threading
import time
from argparse import Namespace
from typing import Any

import _harness
import numpy as np
from _clusters import SERVER, Cluster
from _harness import Request, Row, number

import distributary as dist
from distributary.errors import PSUnavailableError

NAMED_SECONDS = 1.0
_STEPS_PER_ROUND = 1000


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
                self._cluster.start_task("worker", index)
            else:
                process = self._cluster.processes["worker", index]
                process.send_signal(signal.SIGSTOP)
                self.num_freezes += 1
                self.ended.wait(chance.uniform(0, 10))
                process.send_signal(signal.SIGCONT)


def soak(cluster: Cluster, request: Request) -> dict[str, Any]:
    """What has become of the steps."""
    job = Job(cluster)
    for value in job.schedule(10):
        value.fetch()
    faults = Faults(cluster, request["seed"], request["seconds_between"])
    faults.start()
    longest_gap = 0.0
    start = last = time.monotonic()
    end = start + (30 if request["quick"] else 60 * request["minutes"])
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
        cluster.start_task("ps", index)
    return seconds


def requests(arguments: Namespace) -> list[Request]:
    """Returns the only request."""
    replicas = f"{arguments.workers} workers, {arguments.servers} servers"
    return [{"replicas": replicas, "devices": 1}]


def measure(request: Request) -> list[Row]:
    """Runs; a step that is lost or repeated, or a server that is named late, is a problem."""
    cluster = Cluster(
        SERVER, _harness.environment(), worker=request["workers"], ps=request["servers"]
    )
    try:
        cluster.start("worker", "ps")
        soaked = soak(cluster, request)
        seconds = name_killed_servers(cluster, request["rounds"])
    finally:
        cluster.close()
    wrong = max(map(abs, soaked.pop("applied - scheduled, by server")))
    late = max(seconds)
    numbers = [
        *(number(what, value, "") for what, value in soaked.items()),
        number("steps lost or repeated on a server", wrong, "", 0),
        number("server killed until named, longest", late, "s", NAMED_SECONDS),
    ]
    problems = [
        f"{one['what']}: {one['value']}" for one in numbers[-2:] if one["value"] > one["bar"]
    ]
    rounds = {"server killed until named": seconds}
    replicas = request["replicas"]
    return [_harness.row("soak", replicas, "s", rounds, numbers=numbers, problems=problems)]


if __name__ == "__main__":
    _harness.run(
        requests,
        measure,
        rounds=(6, 1),  # servers that are killed
        options={
            "--minutes": {"type": float, "default": 10.0},
            "--workers": {"type": int, "default": 2},
            "--servers": {"type": int, "default": 2},
            "--seconds-between": {"type": float, "default": 10.0, "help": "faults, on average"},
            "--seed": {"type": int, "default": 0},
        },
    )
