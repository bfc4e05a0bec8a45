"""A chief that schedules steps until it is killed: writes a line when one has ended."""

import numpy as np

import distributary as dist
from distributary.cluster_resolver import TFConfigClusterResolver
from distributary.coordinator._cluster_coordinator import ClusterCoordinator
from distributary.coordinator._strategy import ParameterServerStrategy

strategy = ParameterServerStrategy(TFConfigClusterResolver())
with strategy.scope():
    counters = [dist.Variable(0), dist.Variable(0)]
coordinator = ClusterCoordinator(strategy)


def step(x):
    for counter in counters:
        counter.assign_add(1)
    return x


coordinator.schedule(step, args=(np.int32(0),)).fetch()
print("works", flush=True)
while True:
    coordinator.schedule(step, args=(np.int32(0),))
