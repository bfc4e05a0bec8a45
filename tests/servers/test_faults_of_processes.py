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
from distributary.errors import CoordinatorReplacedError, PSUnavailableError
from tests.servers.jobs import CountingJob

_SECONDS = 60.0  # more than anything takes
_NUM_ELEMENTS = 1 << 20


@pytest.fixture
def new_job(cluster, certificates, monkeypatch):
    """A function that makes a job with new variables, when all tasks are there."""
    monkeypatch.setenv("DISTRIBUTARY_CERTS", str(certificates))
    with contextlib.ExitStack() as stack:

        def new():
            resolver = SimpleClusterResolver(ClusterSpec(cluster.spec), task_type="chief")
            return stack.enter_context(contextlib.closing(CountingJob(resolver)))

        yield new


def test_a_worker_is_killed_and_restarted(cluster, new_job):
    job = new_job()
    job.wait_for_workers(2)
    values = job.schedule(300)
    values[50].fetch()
    cluster.kill("worker 0")
    job.coordinator.join()
    cluster.start("worker 0")
    job.wait_for_workers(2)
    job.run(100)

    assert job.counts() == [400, 400]
    lines = cluster.metrics()
    assert lines.count("distributary_ps_num_pushes 400") == 2
    assert sum(line.startswith("distributary_worker_pull_seconds ") for line in lines) == 2


def test_a_chief_that_was_frozen_itself_blames_nobody(cluster, new_job):
    job = new_job()
    job.wait_for_workers(2)
    job.schedule(200)[20].fetch()
    this = os.getpid()
    # Longer than a heartbeat may take, and than pings of the transport may.
    subprocess.run(["sh", "-c", f"kill -STOP {this}; sleep 7; kill -CONT {this}"], check=True)
    job.coordinator.join()
    job.wait_for_workers(2)
    job.run(200)

    assert job.counts() == [400, 400]
    assert [worker.num_losses for worker in job.coordinator.statistics().workers] == [0, 0]


def test_a_chief_is_killed_and_another_one_goes_on(cluster, new_job, tmp_path):
    chief = cluster.start_program("chief.py", "chief", 0, tmp_path)
    assert chief.stdout.readline() == "works\n"
    chief.kill()
    chief.wait(_SECONDS)
    job = new_job()
    assert job.counts() == [0, 0]
    Checkpoint(counters=job.counters).restore(latest_checkpoint(tmp_path))
    assert job.counts() == [20, 20]
    job.run(100)

    assert job.counts() == [120, 120]


def test_a_server_is_killed_and_restored(cluster, new_job, tmp_path):
    def saved_job():
        job = new_job()
        with job.strategy.scope():
            large = dist.Variable(np.zeros(_NUM_ELEMENTS, np.float32))
        checkpoint = Checkpoint(counters=job.counters, large=large)
        return job, large, CheckpointManager(checkpoint, tmp_path, max_to_keep=1)

    job, large, manager = saved_job()

    def large_step(x):
        job.step(x)
        large.assign_add(x * jnp.ones(_NUM_ELEMENTS))

    job.coordinator.schedule(large_step, args=(np.float32(3),))
    saved = manager.save()
    job.schedule(1000)[10].fetch()
    address = cluster.spec["ps"][1]
    cluster.kill("ps 1")
    with pytest.raises(PSUnavailableError, match=f"ps 1 at {address} cannot be reached"):
        job.coordinator.join()
    for call in (manager.save, job.coordinator.done, lambda: job.schedule(1)):
        with pytest.raises(PSUnavailableError, match=f"ps 1 at {address}"):
            call()
    cluster.start("ps 1")
    with pytest.raises(PSUnavailableError, match=f"ps 1 at {address}"):
        job.schedule(1)

    other, large, manager = saved_job()
    assert manager.restore_or_initialize() == saved
    assert other.counts() == [1, 1]
    np.testing.assert_array_equal(large.numpy(), np.full(_NUM_ELEMENTS, 3, np.float32))
    other.run(100)

    assert other.counts() == [101, 101]
    with pytest.raises(CoordinatorReplacedError):
        job.counts()
