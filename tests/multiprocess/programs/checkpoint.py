"""Saves and restores in a job; the first argument says what else happens.

"save", "restore", how parameters are sharded, or the seconds of grace after the signal that it
sends itself. Prints JSON.
"""

import errno
import json
import os
import shutil
import signal
import sys

import jax.numpy as jnp
import numpy as np

import distributary as dist
from distributary.checkpoint import Checkpoint, CheckpointManager
from distributary.data import Dataset

what, directory = sys.argv[1:]
divided = {"parts": True, "parts inside of hosts": "host"}.get(what, False)
strategy = dist.MultiWorkerMirroredStrategy(experimental_shard_parameters=divided)
worker = strategy.extended.worker_number
X = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)


def on_read(value, aggregation):
    return dist.Variable(
        value,
        synchronization=dist.VariableSynchronization.ON_READ,
        aggregation=dist.VariableAggregation[aggregation],
    )


def objects():
    with strategy.scope():
        w = dist.Variable(jnp.zeros(3))
        seen, mean = on_read(0.0, "SUM"), on_read(0.0, "MEAN")
    data = Dataset.from_tensor_slices(X).shuffle(40, seed=1).batch(4).repeat()
    batches = iter(strategy.experimental_distribute_dataset(data))
    return dict(w=w, seen=seen, mean=mean, batches=batches, epoch=0)


def train(checkpoint, num_steps):
    w, seen, mean = checkpoint.w, checkpoint.seen, checkpoint.mean

    def step(x):
        gradient = dist.grad(lambda: ((x @ w - 1.0) ** 2).sum(), w)()
        w.assign_sub(0.01 * dist.get_replica_context().all_reduce("SUM", gradient))
        seen.assign_add(x.sum())
        mean.assign(x.mean())

    for _ in range(num_steps):
        strategy.run(step, args=(next(checkpoint.batches),))


def values(checkpoint):
    numbers = [getattr(checkpoint, n).numpy().tolist() for n in ("w", "seen", "mean")]
    return [*numbers, checkpoint.epoch, checkpoint.batches.get_state()["position"]]


def message(function, *args):
    try:
        function(*args)
    except (OSError, ValueError) as error:
        return str(error)


result = {}
if what == "save":
    # Every worker is at a place of its own in these.
    own, rng = iter(Dataset.range(9)), np.random.default_rng(worker)
    checkpoint = Checkpoint(**objects(), own=own, rng=rng)
    manager = CheckpointManager(checkpoint, directory, max_to_keep=2)
    for _ in range(1 + worker):
        next(own)
    train(checkpoint, 3)
    checkpoint.epoch = 7
    manager.save()
    result["saved"] = values(checkpoint)
    draws = [float(rng.random()), int(next(own))]
    rows = [[float(v.numpy()) for v in checkpoint.seen.values]]
    train(checkpoint, 2)
    checkpoint.epoch = 8
    checkpoint.restore(manager.latest_checkpoint)
    result["restored"] = values(checkpoint)
    rows.append([float(v.numpy()) for v in checkpoint.seen.values])
    result["own"] = [draws, [float(rng.random()), int(next(own))], rows]
    different = Checkpoint(**{f"only_{worker}": 1})
    result["different"] = message(different.write, f"{directory}/different")
    result["unfit"] = message(Checkpoint(w=worker).restore, manager.latest_checkpoint)
    print(json.dumps(result), flush=True)

    def kill(event, args):
        if event == "os.rename":  # right before the checkpoint would get its name
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(kill)
    manager.save()
    manager.wait_until_finished()
elif what == "restore":
    checkpoint = Checkpoint(**objects())
    manager = CheckpointManager(checkpoint, directory, max_to_keep=2)
    checkpoint.restore(manager.latest_checkpoint, partial=True)
    result["restored"] = values(checkpoint)
    # As programs for tf.distribute: a folder for each worker, which the others remove.
    own = f"{directory}/own" if worker == 0 else f"{directory}/own/workertemp_{worker}"
    manager = CheckpointManager(checkpoint, own, max_to_keep=1)
    for checkpoint.epoch in (1, 2):
        path = manager.save()
        if worker != 0:
            shutil.rmtree(own)
    manager.wait_until_finished()
    result["own"] = [os.listdir(path)] if worker == 0 else os.path.exists(own)
    # What only the chief sees ends the save on all of them.
    if worker == 0:
        os.makedirs(f"{directory}/results/notes")
    result["in the way"] = message(checkpoint.write, f"{directory}/results")
    checkpoint.write(f"{directory}/free")
    print(json.dumps(result), flush=True)
    manager = CheckpointManager(Checkpoint(step=1), directory, max_to_keep=2)
    if worker == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    manager.save(2)
    message(manager.wait_until_finished)
    os._exit(7)  # without waiting for the other one
elif divided:
    import keras

    with strategy.scope():
        w = dist.Variable(np.arange(33 * 21, dtype=np.float32).reshape(33, 21))
        model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(30)])
        model.compile("adam", "mse")
    model.fit(np.ones((8, 40)), np.arange(240).reshape(8, 30), batch_size=8, verbose=0)
    checkpoint = Checkpoint(w=w, model=model, step=3)
    own = directory if worker == 0 else f"{directory}/workertemp"
    path = checkpoint.save(f"{own}/ckpt")
    saved = [w.numpy(), *map(np.array, model.get_weights())]
    w.assign(np.zeros((33, 21), np.float32))
    model.set_weights([np.zeros_like(value) for value in model.get_weights()])
    checkpoint.restore(f"{directory}/ckpt-1")
    restored = [w.numpy(), *map(np.array, model.get_weights())]
    result["same"] = all(map(np.array_equal, saved, restored))
    result["saved"] = [value.tolist() for value in saved]
    model.fit(np.ones((8, 40)), np.ones((8, 30)), batch_size=8, verbose=0)

    # Keras follows attributes, also to optimizers that `compile` does not get.
    with strategy.scope():
        model.other = keras.optimizers.SGD(momentum=0.9)
        model.other.build(model.trainable_variables)
    momentum = model.other.variables[2]
    momentum.assign(np.arange(1200, dtype=np.float32).reshape(40, 30))
    model.other.iterations.assign(5)
    model.save_weights(f"{own}/own.weights.h5")
    momentum.assign(np.zeros((40, 30), np.float32))
    model.other.iterations.assign(0)
    model.load_weights(f"{directory}/own.weights.h5")
    result["own"] = np.asarray(momentum.value).ravel().tolist()
    result["iterations"] = int(model.other.iterations.value)
    result["not loaded"] = message(model.load_weights, f"{directory}/none.weights.h5")

    # A worker that cannot write ends the save on all.
    def fill_disk(event, args):
        if event == "open" and str(args[0]).endswith("worker-0.safetensors"):
            raise OSError(errno.ENOSPC, "No space left on device")

    if worker == 0:
        sys.addaudithook(fill_disk)
    result["failed"] = message(checkpoint.write, f"{directory}/failed")
    print(json.dumps(result))
else:
    checkpoint = Checkpoint(**objects())
    handler = dist.experimental.PreemptionCheckpointHandler(
        strategy.cluster_resolver,
        checkpoint,
        directory,
        dist.experimental.TerminationConfig(grace_period=float(what)),
    )
    start = handler.total_run_calls
    if os.environ["DISTRIBUTARY_RESTART"] == "0":
        while True:
            if worker == 1 and handler.total_run_calls == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            handler.run(train, checkpoint, 1)
    for _ in range(5):
        handler.run(train, checkpoint, 1)
    undisturbed = Checkpoint(**objects())
    train(undisturbed, start + 5)
    result["start"], result["num_saved"] = start, checkpoint.save_counter
    result["values"] = [values(checkpoint), values(undisturbed)]
    print(json.dumps(result))
