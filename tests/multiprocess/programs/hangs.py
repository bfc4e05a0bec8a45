"""Trains; worker 1 hangs in a loop, is slow for longer than a report takes, or saves alone.

hangs.py loop|slow|save|late

late: worker 1 is slow to take the answer of the last meeting, after which worker 0 ends.
"""

import signal
import sys
import time

import numpy as np

import distributary as dist

kind = sys.argv[1]
if kind == "save":
    import keras
strategy = dist.MultiWorkerMirroredStrategy(
    communication_options=dist.experimental.CommunicationOptions(
        heartbeat_timeout_seconds=3.0, timeout_seconds=None if kind == "slow" else 6.0
    )
)
with strategy.scope():
    w = dist.Variable(np.zeros(10, np.float32))
    if kind == "save":
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])


def train_step():
    w.assign_add(dist.get_replica_context().all_reduce("SUM", np.ones(10, np.float32)))
    return w.value()[0]


def interrupt():
    if kind == "slow":
        time.sleep(5.0)  # what is shown is that nothing but a report happens
    while kind == "loop":
        pass
    if kind == "save":
        model.save("saved_by_one.keras")


for step in range(10):
    result = strategy.run(train_step)
    float(strategy.experimental_local_results(result)[0])
    if strategy.extended.worker_number == 1 and step == 4:
        interrupt()
if kind == "late":
    batches = iter(strategy.experimental_distribute_dataset([np.ones(2, np.float32)]))
    next(batches)
    if strategy.extended.worker_number == 1:
        signal.signal(signal.SIGALRM, lambda *_: time.sleep(4.0))
        signal.setitimer(signal.ITIMER_REAL, 1.0)
    else:
        time.sleep(2.0)
    next(batches, None)
print('{"trained": true}')
