"""Workers, servers and chiefs that are killed, frozen and cut off, as processes."""

import contextlib
import os
import subprocess

import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist
from distributary.checkpoint import Checkpoint, CheckpointManager, latest_checkpoint
from distributary.cluster_resolver import ClusterSpec, SimpleClusterResolver
from distributary.coordinator import ClusterCoordinator, ParameterServerStrategy
from distributary.errors import CoordinatorReplacedError, PSUnavailableError

_SECONDS = 60.0  # more than anything takes
_NUM_ELEMENTS = 1 << 20


class _Job:
    """A counter on each server, a large variable on the first, and a step that changes them."""

    def __init__(self, cluster):
        self.strategy = ParameterServerStrategy(
            SimpleClusterResolver(ClusterSpec(cluster.spec), task_type="chief")
        )
        with self.strategy.scope():
            self.counters = [dist.Variable(0), dist.Variable(0)]
            self.large = dist.Variable(np.zeros(_NUM_ELEMENTS, np.float32))
        self.coordinator = ClusterCoordinator(self.strategy)
        self.checkpoint = Checkpoint(counters=self.counters, large=self.large)

    def step(self):
        for counter in self.counters:
            counter.assign_add(1)

    def large_step(self, x):
        self.step()
        self.large.assign_add(x * jnp.ones(_NUM_ELEMENTS))

    def schedule(self, num_steps):
        return [self.coordinator.schedule(self.step) for _ in range(num_steps)]

    def counts(self):
        return [int(counter.numpy()) for counter in self.counters]

    def wait_for_workers(self, num_workers=2):
        workers = self.coordinator._workers
        with workers._changed:
            assert workers._changed.wait_for(lambda: workers.num_live() == num_workers, _SECONDS)


@pytest.fixture
def new_job(cluster, certificates, monkeypatch):
    """A function that makes a job with new variables, when all tasks are there."""
    monkeypatch.setenv("DISTRIBUTARY_CERTS", str(certificates))
    with contextlib.ExitStack() as stack:

        def new():
            job = _Job(cluster)
            stack.callback(job.strategy._cluster.close)
            return job

        yield new


def test_a_worker_is_killed_and_restarted(cluster, new_job):
    job = new_job()
    job.wait_for_workers()
    values = job.schedule(500)
    values[50].fetch()
    cluster.kill("worker 0")
    job.coordinator.join()
    cluster.start("worker 0")
    job.wait_for_workers()
    job.schedule(500)
    job.coordinator.join()

    assert job.counts() == [1000, 1000]
    lines = cluster.metrics()
    assert lines.count("distributary_ps_num_pushes 1000") == 2
    assert sum(line.startswith("distributary_worker_pull_seconds ") for line in lines) == 2


def test_a_chief_that_was_frozen_itself_blames_nobody(cluster, new_job):
    job = new_job()
    job.wait_for_workers()
    job.schedule(200)[20].fetch()
    this = os.getpid()
    # Longer than a heartbeat may take, and than pings of the transport may.
    subprocess.run(["sh", "-c", f"kill -STOP {this}; sleep 7; kill -CONT {this}"], check=True)
    job.coordinator.join()
    job.wait_for_workers()
    job.schedule(200)
    job.coordinator.join()

    assert job.counts() == [400, 400]
    assert [worker.num_losses for worker in job.coordinator.statistics().workers] == [0, 0]


def test_a_chief_is_killed_and_another_one_goes_on(cluster, new_job, tmp_path):
    chief = cluster.start_program("chief.py", "chief", 0, tmp_path)
    assert chief.stdout.readline() == "works\n"
    chief.kill()
    chief.wait(_SECONDS)
    job = new_job()
    assert job.counts() == [0, 0]
    job.checkpoint.restore(latest_checkpoint(tmp_path), partial=True)
    assert job.counts() == [20, 20]
    job.schedule(100)
    job.coordinator.join()

    assert job.counts() == [120, 120]


def test_a_server_is_killed_and_restored(cluster, new_job, tmp_path):
    job = new_job()
    job.coordinator.schedule(job.large_step, args=(np.float32(3),))
    manager = CheckpointManager(job.checkpoint, tmp_path, max_to_keep=1)
    saved = manager.save()
    job.schedule(1000)[10].fetch()
    address = cluster.spec["ps"][1]
    cluster.kill("ps 1")
    with pytest.raises(PSUnavailableError, match=f"ps 1 at {address} cannot be reached"):
        job.coordinator.join()
    with pytest.raises(PSUnavailableError, match=f"ps 1 at {address}"):
        manager.save()
    cluster.start("ps 1")
    with pytest.raises(PSUnavailableError, match=f"ps 1 at {address}"):
        job.schedule(1)

    other = new_job()
    manager = CheckpointManager(other.checkpoint, tmp_path, max_to_keep=1)
    assert manager.restore_or_initialize() == saved
    assert other.counts() == [1, 1]
    np.testing.assert_array_equal(other.large.numpy(), np.full(_NUM_ELEMENTS, 3, np.float32))
    other.schedule(100)
    other.coordinator.join()

    assert other.counts() == [101, 101]
    with pytest.raises(CoordinatorReplacedError):
        job.counts()
