"""Trains; one worker hangs, or is slow for longer than the heartbeat's timeout.

hangs.py NAME
hangs.py slow
"""

import sys
import time
from pathlib import Path

import numpy as np

import distributary as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "job"))
import activity_cases

heartbeat_timeout_seconds = 3.0
strategy = dist.MultiWorkerMirroredStrategy(
    communication_options=dist.experimental.CommunicationOptions(
        heartbeat_timeout_seconds=heartbeat_timeout_seconds
    )
)
worker = strategy.extended.worker_number
with strategy.scope():
    w = dist.Variable(np.zeros(10, np.float32))


def train_step():
    w.assign_add(dist.get_replica_context().all_reduce("SUM", np.ones(10, np.float32)))
    return w.value()[0]


def compute(seconds):
    end, total = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        total += sum(number * number for number in range(1000))
    return total


def is_slow():
    """Sleeps, computes and reads slowly, each for longer than the timeout."""
    seconds = 1.4 * heartbeat_timeout_seconds
    time.sleep(seconds)
    yield
    compute(seconds)
    yield
    slow = dist.data.Dataset.from_generator(lambda: (compute(seconds / 2) for _ in range(2)))
    list(slow)
    yield


interruptions = is_slow() if sys.argv[1] == "slow" else iter([None])
for step in range(20):
    result = strategy.run(train_step)
    float(strategy.experimental_local_results(result)[0])
    if worker == 1 and step % 5 == 4:
        if sys.argv[1] == "slow":
            next(interruptions, None)
        else:
            getattr(activity_cases, sys.argv[1])()
print('{"trained": true}')
