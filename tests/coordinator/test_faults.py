"""Training goes on when workers are lost, and says why when it cannot."""

import contextlib

import numpy as np
import pytest

import distributary as dist
from distributary.coordinator._cluster import local_cluster
from distributary.coordinator._cluster_coordinator import ClusterCoordinator
from distributary.coordinator._messages import Limits
from distributary.coordinator._sessions import Patience
from distributary.coordinator._strategy import ParameterServerStrategy


class _Job:
    """A cluster in this process with a counter on each server, and a step that increases them."""

    def __init__(self, workers=2, ps=2, **patience):
        self.cluster = local_cluster(
            workers, ps, limits=Limits(), patience=Patience(heartbeat_seconds=0.3, **patience)
        )
        self.strategy = ParameterServerStrategy(self.cluster)
        with self.strategy.scope():
            self.counters = [dist.Variable(0, name=f"on ps {i}") for i in range(ps)]
        self.coordinator = ClusterCoordinator(self.strategy)
        self.num_scheduled = 0

    def step(self, x):
        for counter in self.counters:
            counter.assign_add(1)
        return x

    def schedule(self, num_steps):
        numbers = range(self.num_scheduled, self.num_scheduled + num_steps)
        self.num_scheduled += num_steps
        return [self.coordinator.schedule(self.step, args=(np.int32(i),)) for i in numbers]

    def counts(self):
        return [int(counter.numpy()) for counter in self.counters]


@pytest.fixture
def new_job():
    """A function that makes jobs, which are ended after the test."""
    with contextlib.ExitStack() as stack:

        def new(**options):
            job = _Job(**options)
            stack.callback(job.cluster.close)
            stack.callback(job.strategy._cluster.close)
            return job

        yield new


def test_a_worker_that_is_killed_and_restarted(new_job):
    job = new_job()
    job.schedule(1)[0].fetch()
    for _ in range(3):
        values = job.schedule(50)
        job.cluster.kill("worker 0")
        values += job.schedule(50)
        job.cluster.restart("worker 0")
        job.coordinator.join()
        expected = range(job.num_scheduled - 100, job.num_scheduled)
        assert [int(value.fetch()) for value in values] == list(expected)

    assert job.counts() == [301, 301]
