"""A `fit` whose workers are killed, and that goes on from its backup; then one that is left alone.

keras_recovery.py FOLDER [EPOCH.BATCH:WORKER ...]    at the n-th start, who dies after which step
"""

import os
import signal
import sys
from pathlib import Path

os.environ["KERAS_BACKEND"] = "jax"

import numpy as np

import distributary as dist

# The first kernel is in parts, and the other variables are whole on every worker.
strategy = dist.MultiWorkerMirroredStrategy(experimental_shard_parameters=True)

import keras  # noqa: E402  (it must not start JAX before the strategy connects it)

folder, *plan = sys.argv[1:]
worker = strategy.extended.worker_number
x = np.random.RandomState(0).randn(48, 4).astype(np.float32)


class Dies(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        start = int(os.environ["DISTRIBUTARY_RESTART"])
        if plan[start : start + 1] == [f"{self.epoch}.{batch}:{worker}"]:
            os.kill(os.getpid(), signal.SIGKILL)


# Only the first worker has a file: the others take what it reads.
backup = keras.callbacks.BackupAndRestore(
    f"{folder}/of_worker{worker}", save_freq=2, delete_checkpoint=False
)


def weights(*callbacks):
    """Trains a model with a first state that is always the same, and returns its weights."""
    keras.utils.set_random_seed(worker)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(64),
                keras.layers.Dropout(0.2),
                keras.layers.Dense(1),
            ]
        )
        model.compile("adam", "mse")
    model.fit(x, x[:, :1], batch_size=8, epochs=4, verbose=0, callbacks=[*callbacks])
    return model.get_weights()


disturbed = weights(backup, Dies())
np.savez(Path(folder) / f"disturbed{worker}.npz", *disturbed)
np.savez(Path(folder) / f"undisturbed{worker}.npz", *weights())
