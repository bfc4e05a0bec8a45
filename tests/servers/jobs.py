"""A job whose steps count on every server."""

import numpy as np

import distributary as dist
from distributary.coordinator import ClusterCoordinator, ParameterServerStrategy
from distributary.options import RecoveryOptions

_SECONDS = 60.0  # more than anything takes


class CountingJob:
    """A counter on each server of some tasks, and a step that increases them."""

    def __init__(self, tasks, **options):
        self.cluster = tasks
        options = RecoveryOptions(**options)
        self.strategy = ParameterServerStrategy(tasks, recovery_options=options)
        with self.strategy.scope():
            self.counters = [dist.Variable(0), dist.Variable(0)]
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

    def run(self, num_steps):
        values = self.schedule(num_steps)
        self.coordinator.join()
        expected = range(self.num_scheduled - num_steps, self.num_scheduled)
        assert [int(value.fetch()) for value in values] == [*expected]

    def counts(self):
        return [int(counter.numpy()) for counter in self.counters]

    def wait_for_workers(self, num_workers):
        workers = self.coordinator._workers
        with workers._changed:
            assert workers._changed.wait_for(lambda: workers.num_live() >= num_workers, _SECONDS)

    def close(self):
        self.strategy._cluster.close()
