"""What a coordinator counts."""

import contextlib
import dataclasses
import threading
import urllib.error
import urllib.request

import numpy as np
import pytest

import distributary as dist
from distributary.coordinator import ClusterCoordinator, ParameterServerStrategy, local_cluster
from distributary.errors import InvalidValueError, OutOfRangeError
from distributary.launch import free_addresses
from tests.servers.message_faults import duplicate

_SECONDS = 60.0  # more than anything takes


class _Job:
    """A variable of 400 bytes on each of two servers, and a step that adds to both."""

    def __init__(self, workers):
        self.cluster = local_cluster(workers, 2)
        self.strategy = ParameterServerStrategy(self.cluster)
        with self.strategy.scope():
            self.variables = [dist.Variable(np.zeros(100, np.float32)) for _ in range(2)]
        self.coordinator = ClusterCoordinator(self.strategy)

    def step(self, x):
        total = sum(v.read_value().sum() for v in self.variables)
        for variable in self.variables:
            variable.assign_add(x)
        return total

    def run(self, num_steps):
        for _ in range(num_steps):
            self.coordinator.schedule(self.step, args=(np.ones(100, np.float32),))
        self.coordinator.join()


@pytest.fixture
def new_job():
    with contextlib.ExitStack() as stack:

        def new(workers):
            job = _Job(workers)
            stack.callback(job.cluster.close)
            stack.callback(job.strategy._cluster.close)
            return job

        yield new


def test_closures_bytes_pushes_losses_repetitions_and_failures_are_counted(new_job):
    def push_twice(source, target, message, deliver):
        return duplicate(message, deliver) if message.kind == "push" else deliver(message)

    job = new_job(1)
    job.run(10)

    found = job.coordinator.statistics()

    assert (found.num_done, found.num_queued, found.num_running) == (10, 0, 0)
    assert (found.num_failed, found.num_cancelled, found.num_retried) == (0, 0, 0)
    (worker,) = found.workers
    assert (worker.name, worker.num_closures, worker.num_losses) == ("worker 0", 10, 0)
    assert worker.received_bytes == worker.sent_bytes == 10 * 2 * 400
    assert min(worker.pull_seconds, worker.compute_seconds, worker.push_seconds) > 0
    servers = [dataclasses.astuple(server) for server in found.servers]
    assert servers == [("ps 0", 10, 0, 0, 0), ("ps 1", 10, 0, 0, 0)]

    job.cluster.fault = push_twice
    job.run(5)
    job.cluster.fault = None
    job.cluster.kill("worker 0")
    job.cluster.restart("worker 0")
    job.run(5)
    empty = iter(job.coordinator.create_per_worker_dataset(lambda: [np.float32(1)]))
    with pytest.raises(OutOfRangeError):
        for _ in range(100):
            job.coordinator.schedule(next, args=(empty,))
        job.coordinator.join()

    found = job.coordinator.statistics()

    assert (found.num_done, found.num_failed) == (21, 1)
    assert [server.num_repeated for server in found.servers] == [5, 5]
    (worker,) = found.workers
    assert (worker.state, worker.num_losses, worker.num_closures) == ("idle", 1, 21)
    assert worker.received_bytes == 20 * 2 * 400  # of both incarnations


def test_the_staleness_of_pushes_is_counted(new_job):
    job = new_job(2)
    job.run(1)
    held, go_on = threading.Event(), threading.Event()
    lock = threading.Lock()

    def hold_the_first(source, target, message, deliver):
        if message.kind == "push" and target == "ps 0":
            with lock:
                is_first = not held.is_set()
                held.set()
            if is_first:
                go_on.wait(_SECONDS)
        return deliver(message)

    job.cluster.fault = hold_the_first
    x = np.ones(100, np.float32)
    late = job.coordinator.schedule(job.step, args=(x,))
    assert held.wait(_SECONDS)
    for value in [job.coordinator.schedule(job.step, args=(x,)) for _ in range(6)]:
        value.fetch()
    go_on.set()
    late.fetch()

    server = job.coordinator.statistics().servers[0]

    assert (server.num_pushes, server.max_staleness, server.staleness_sum) == (8, 6, 6)


def _get(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=_SECONDS) as reply:
        return reply.read().decode().splitlines()


def test_metrics_are_read_over_http_at_one_port_after_the_other(new_job, monkeypatch):
    (address,) = free_addresses("127.0.0.1", 1)
    port = int(address.partition(":")[2])
    monkeypatch.setenv("DISTRIBUTARY_METRICS_PORT", str(port))
    job, _ = new_job(1), new_job(1)
    job.run(3)

    lines = _get(port)

    assert "distributary_coordinator_num_done 3" in lines
    assert 'distributary_worker_num_closures{name="worker 0"} 3' in lines
    assert 'distributary_server_num_pushes{name="ps 1"} 3' in lines
    assert all(float(line.split()[-1]) >= 0 for line in lines)
    assert "distributary_coordinator_num_done 0" in _get(port + 1)
    job.cluster.kill("ps 1")
    with pytest.raises(urllib.error.HTTPError, match="503") as caught:
        _get(port)
    assert caught.value.read().startswith(b"PSUnavailableError: ps 1 cannot be reached")
    caught.value.close()
    job.strategy._cluster.close()
    with pytest.raises(urllib.error.URLError):
        _get(port)


def test_what_is_no_port_is_named(new_job, monkeypatch):
    for text in ("many", "-1", "65530"):
        monkeypatch.setenv("DISTRIBUTARY_METRICS_PORT", text)
        with pytest.raises(InvalidValueError, match=f"DISTRIBUTARY_METRICS_PORT is '{text}'"):
            new_job(1)
