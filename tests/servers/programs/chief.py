"""A chief that saves after 20 steps, writes a line, and schedules steps until it is killed."""

import sys
from pathlib import Path

import numpy as np

import distributary as dist
from distributary.checkpoint import Checkpoint
from distributary.cluster_resolver import TFConfigClusterResolver
from distributary.coordinator import ClusterCoordinator, ParameterServerStrategy

strategy = ParameterServerStrategy(TFConfigClusterResolver())
with strategy.scope():
    counters = [dist.Variable(0), dist.Variable(0)]
coordinator = ClusterCoordinator(strategy)


def step(x):
    for counter in counters:
        counter.assign_add(1)
    return x


for _ in range(20):
    coordinator.schedule(step, args=(np.int32(0),))
Checkpoint(counters=counters).save(Path(sys.argv[1]) / "ckpt")
print("works", flush=True)
while True:
    coordinator.schedule(step, args=(np.int32(0),))
