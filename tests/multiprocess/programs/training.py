"""Trains for some epochs, from the last one that was saved.

Arguments: folder for what is saved, and number of epochs.
"""

import os
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import distributary as dist
from distributary.data import Dataset

folder, num_epochs = Path(sys.argv[1]), int(sys.argv[2])
strategy = dist.MultiWorkerMirroredStrategy(
    communication_options=dist.experimental.CommunicationOptions(heartbeat_timeout_seconds=3)
)
worker = strategy.extended.worker_number
saved = folder / "saved.npz"
state = dict(np.load(saved)) if saved.exists() else {"epoch": 0}
rng = np.random.default_rng(0)
x = rng.normal(size=(96, 8)).astype(np.float32)
y = np.tanh(x @ rng.normal(size=(8, 1))).astype(np.float32)
first = {"weights": rng.normal(size=(8, 1)).astype(np.float32), "momentum": np.zeros((8, 1), "f")}
with strategy.scope():
    variables = {name: dist.Variable(state.get(name, value)) for name, value in first.items()}
weights, momentum = variables.values()


def step(x, y):
    loss = dist.value_and_grad(lambda: ((jnp.tanh(x @ weights) - y) ** 2).sum() / 16, weights)
    value, gradient = dist.get_replica_context().all_reduce("SUM", loss())
    momentum.assign(0.9 * momentum.value() + gradient)
    weights.assign_sub(0.01 * momentum.value())
    return value


def save(epoch):
    arrays = {name: variable.numpy() for name, variable in variables.items()}
    with open(folder / "saving.npz", "wb") as file:
        np.savez(file, epoch=epoch, **arrays)
    os.replace(folder / "saving.npz", saved)


with open(folder / f"steps.{worker}", "a", buffering=1) as steps:
    for epoch in range(int(state["epoch"]), num_epochs):
        data = Dataset.from_tensor_slices((x, y)).shuffle(96, seed=epoch).batch(16)
        for number, batch in enumerate(strategy.experimental_distribute_dataset(data)):
            value = strategy.run(step, batch)
            value = float(strategy.experimental_local_results(value)[0])
            steps.write(f"{time.time()} {os.getpid()} {epoch} {number} {value}\n")
        if strategy.extended.should_checkpoint:
            save(epoch + 1)
