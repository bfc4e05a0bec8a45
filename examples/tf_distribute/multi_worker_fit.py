"""Keras' fit on several workers, which goes on from the last epoch when it is started again.

    distributary launch --workers 2 multi_worker_fit.py

A program for tf.distribute; only its import is another one. Writes below the current directory,
which all workers must share.
"""

import argparse
import os
from pathlib import Path

import numpy as np

import distributary.compat.tensorflow as tf

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=10, help="default %(default)s")
options = parser.parse_args()

# Reads TF_CONFIG, and connects the workers: it comes before anything that computes.
strategy = tf.distribute.MultiWorkerMirroredStrategy()
resolver = strategy.cluster_resolver
is_chief = resolver.task_type in (None, "chief") or resolver.task_id == 0

digits = np.load(Path(__file__).parents[1] / "digits.npz")
images, labels = digits["images"].reshape(-1, 64), digits["labels"]
num_train = 1408
global_batch_size = 32 * strategy.num_replicas_in_sync

# Each worker takes its rows of every batch; a number as seed gives all of them the same order.
sharding = tf.data.Options()
sharding.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
train_set = (
    tf.data.Dataset.from_tensor_slices((images[:num_train], labels[:num_train]))
    .shuffle(num_train, seed=1)
    .batch(global_batch_size)
    .with_options(sharding)
)
test_set = (
    tf.data.Dataset.from_tensor_slices((images[num_train:], labels[num_train:]))
    .batch(global_batch_size)
    .with_options(sharding)
)

with strategy.scope():
    model = tf.keras.Sequential(
        [
            tf.keras.Input((64,)),
            tf.keras.layers.Dense(64, activation="relu"),
            tf.keras.layers.Dense(10),
        ]
    )
    model.compile(
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=tf.keras.optimizers.Adam(0.005),
        metrics=["accuracy"],
    )

# The chief writes what a job that is started again begins with.
os.makedirs("backup", exist_ok=True)
history = model.fit(
    train_set,
    epochs=options.epochs,
    verbose=0,
    callbacks=[tf.keras.callbacks.BackupAndRestore("backup", delete_checkpoint=False)],
)
loss, accuracy = model.evaluate(test_set, verbose=0)
# A job that finds all epochs done trains none, and says so.
print(f"Trained {len(history.epoch)} epochs; test loss {loss:.3f}, accuracy {accuracy:.3f}")

if is_chief:
    model.save("digits.keras")
