"""A training loop of one's own on several workers, with checkpoints to go on from.

    distributary launch --workers 2 --max-restarts 3 multi_worker_custom_loop.py

A program for tf.distribute; only its import is another one. Writes below the current directory,
which all workers must share.
"""

import argparse
from pathlib import Path

import numpy as np

import distributary.compat.tensorflow as tf

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=8, help="default %(default)s")
options = parser.parse_args()

strategy = tf.distribute.MultiWorkerMirroredStrategy()
resolver = strategy.cluster_resolver
global_batch_size = 32 * strategy.num_replicas_in_sync
num_train = 1408

digits = np.load(Path(__file__).parents[1] / "digits.npz")
images, labels = digits["images"].reshape(-1, 64), digits["labels"]


def dataset_fn(input_context):
    """The examples of one worker."""
    dataset = tf.data.Dataset.from_tensor_slices((images[:num_train], labels[:num_train]))
    dataset = dataset.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
    batch_size = input_context.get_per_replica_batch_size(global_batch_size)
    return dataset.shuffle(num_train, seed=1).repeat().batch(batch_size).prefetch(2)


train_set = strategy.distribute_datasets_from_function(dataset_fn)

with strategy.scope():
    model = tf.keras.Sequential(
        [
            tf.keras.Input((64,)),
            tf.keras.layers.Dense(64, activation="relu"),
            tf.keras.layers.Dense(10),
        ]
    )
    optimizer = tf.keras.optimizers.Adam(0.005)
    optimizer.build(model.trainable_variables)
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
    accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="accuracy")
    epoch = tf.Variable(0, dtype=tf.int64, name="epoch")
    step_in_epoch = tf.Variable(0, dtype=tf.int64, name="step_in_epoch")


@tf.function
def train_step(iterator):
    def step_fn(inputs):
        features, targets = inputs
        with tf.GradientTape() as tape:
            predictions = model(features, training=True)
            losses = loss_of(targets, predictions)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=global_batch_size)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        accuracy.update_state(targets, predictions)
        return loss

    losses = strategy.run(step_fn, args=(next(iterator),))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)


# All workers save together; the chief's files are those to go on from.
checkpoint = tf.train.Checkpoint(
    model=model, optimizer=optimizer, epoch=epoch, step_in_epoch=step_in_epoch
)
is_chief = resolver.task_type in (None, "chief") or resolver.task_id == 0
directory = "checkpoints" if is_chief else f"checkpoints-{resolver.task_id}"
manager = tf.train.CheckpointManager(checkpoint, directory, max_to_keep=2)
latest = tf.train.latest_checkpoint("checkpoints")
if latest:
    checkpoint.restore(latest)
    print(f"Goes on at epoch {epoch.numpy()}, step {step_in_epoch.numpy()}")

steps_per_epoch = num_train // global_batch_size
iterator = iter(train_set)
while epoch.numpy() < options.epochs:
    total_loss = 0.0
    while step_in_epoch.numpy() < steps_per_epoch:
        total_loss += train_step(iterator)
        step_in_epoch.assign_add(1)
        if step_in_epoch.numpy() % 10 == 0:
            manager.save()
    print(
        f"Epoch {epoch.numpy() + 1}: accuracy {accuracy.result().numpy():.3f},"
        f" loss {total_loss.numpy() / steps_per_epoch:.3f}"
    )
    accuracy.reset_state()
    epoch.assign_add(1)
    step_in_epoch.assign(0)
