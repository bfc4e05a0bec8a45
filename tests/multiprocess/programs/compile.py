"""Runs a step on all workers, first a program of its own on each."""

import json
import os
import sys

import numpy as np

import distributary as dist

os.chdir(sys.argv[1])
strategy = dist.MultiWorkerMirroredStrategy()
number = strategy.cluster_resolver.task_id


def accumulate(x):
    sums = dist.get_replica_context().all_reduce("sum", x)
    total.assign_add(sums)
    return sums


alone = dist.function(lambda x: x + number)(np.float32(1))
with strategy.scope():
    total = dist.Variable(np.zeros(3, np.float32))
for i in range(3):
    x = np.arange(3, dtype=np.float32) + i
    strategy.run(accumulate, args=(x,))
print(json.dumps({"alone": float(alone), "total": np.asarray(total).tolist()}))
