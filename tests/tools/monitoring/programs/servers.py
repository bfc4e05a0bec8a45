"""A task of a job with parameter servers, whose chief does 20 steps and waits for a file."""

import sys
import time
from pathlib import Path

import numpy as np

import distributary as dist

resolver = dist.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type != "chief":
    dist.Server(
        resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id
    ).join()
    sys.exit()

strategy = dist.ParameterServerStrategy(resolver)
with strategy.scope():
    weights = dist.Variable(np.zeros(8, np.float32))
coordinator = dist.coordinator.ClusterCoordinator(strategy)


def step():
    weights.assign_add(np.ones(8, np.float32))


for _ in range(20):
    coordinator.schedule(step)
coordinator.join()
while not Path(sys.argv[1]).exists():
    time.sleep(0.05)
