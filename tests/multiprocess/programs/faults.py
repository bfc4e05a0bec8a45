"""Trains a number of steps; files in the given folder say what else to do: `WHAT.WORKER`."""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

import distributary as dist

folder, num_steps, heartbeat_timeout_seconds = Path(sys.argv[1]), int(sys.argv[2]), 3.0
strategy = dist.MultiWorkerMirroredStrategy(
    communication_options=dist.experimental.CommunicationOptions(
        heartbeat_timeout_seconds=heartbeat_timeout_seconds
    )
)
worker = strategy.extended.worker_number
with strategy.scope():
    w = dist.Variable(np.zeros(1000, np.float32))


def step():
    w.assign_add(dist.get_replica_context().all_reduce("SUM", np.ones(1000, np.float32)))
    return w.value()[0]


def put(what, text=""):
    path = folder / f"{what}.{worker}"
    new = folder / f"{path.name}.new"
    new.write_text(str(text))
    new.rename(path)


def is_told(what):
    return (folder / f"{what}.{worker}").exists()


try:
    for _ in range(num_steps):
        result = strategy.run(step)
        if is_told("run ahead"):  # errors show at the next step alone
            put("running ahead")
        else:
            float(strategy.experimental_local_results(result)[0])
        if not is_told("started"):
            put("started", os.getpid())
        if is_told("idle"):
            put("idling")
            while True:
                time.sleep(0.01)
        if is_told("raise"):
            raise OverflowError("the answer is 42\nor more")
    while not is_told("end"):
        time.sleep(0.01)
except dist.errors.WorkerLostError as error:
    print(json.dumps({"error": str(error)}))
    raise
