"""A training loop of one's own on several devices with MirroredStrategy.

A program for tf.distribute; only its import is another one. Writes below the current directory.
"""

import argparse
import os
from pathlib import Path

import numpy as np

import distributary.compat.tensorflow as tf

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=10, help="default %(default)s")
options = parser.parse_args()

# Without GPUs, the CPU acts as two devices.
if not tf.config.list_physical_devices("GPU"):
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )
strategy = tf.distribute.MirroredStrategy()
print(f"Number of devices: {strategy.num_replicas_in_sync}")

digits = np.load(Path(__file__).parents[1] / "digits.npz")
images, labels = digits["images"].reshape(-1, 64), digits["labels"]
num_train = 1408
global_batch_size = 32 * strategy.num_replicas_in_sync
train_set = (
    tf.data.Dataset.from_tensor_slices((images[:num_train], labels[:num_train]))
    .shuffle(num_train)
    .batch(global_batch_size)
)
test_set = tf.data.Dataset.from_tensor_slices((images[num_train:], labels[num_train:])).batch(
    global_batch_size
)
train_set = strategy.experimental_distribute_dataset(train_set)
test_set = strategy.experimental_distribute_dataset(test_set)


def create_model():
    regularizer = tf.keras.regularizers.L2(1e-5)
    return tf.keras.Sequential(
        [
            tf.keras.Input((64,)),
            tf.keras.layers.Dense(64, activation="relu", kernel_regularizer=regularizer),
            tf.keras.layers.Dense(10, kernel_regularizer=regularizer),
        ]
    )


with strategy.scope():
    # A loss for each example: it is divided by the size of the global batch, not of the replica's.
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
    test_loss = tf.keras.metrics.Mean(name="test_loss")
    train_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
    test_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="test_accuracy")
    model = create_model()
    optimizer = tf.keras.optimizers.Adam(learning_rate=0.005)
    checkpoint = tf.train.Checkpoint(optimizer=optimizer, model=model)


def compute_loss(labels, predictions, model_losses):
    loss = tf.nn.compute_average_loss(loss_of(labels, predictions))
    if model_losses:
        loss += tf.nn.scale_regularization_loss(tf.add_n(model_losses))
    return loss


def train_step(inputs):
    images, labels = inputs
    with tf.GradientTape() as tape:
        predictions = model(images, training=True)
        loss = compute_loss(labels, predictions, model.losses)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    train_accuracy.update_state(labels, predictions)
    return loss


def test_step(inputs):
    images, labels = inputs
    predictions = model(images, training=False)
    test_loss.update_state(loss_of(labels, predictions))
    test_accuracy.update_state(labels, predictions)


@tf.function
def distributed_train_step(inputs):
    losses = strategy.run(train_step, args=(inputs,))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)


@tf.function
def distributed_test_step(inputs):
    strategy.run(test_step, args=(inputs,))


prefix = os.path.join("training_checkpoints", "ckpt")
for epoch in range(options.epochs):
    total_loss, num_batches = 0.0, 0
    for inputs in train_set:
        total_loss += distributed_train_step(inputs)
        num_batches += 1
    train_loss = total_loss / num_batches
    for inputs in test_set:
        distributed_test_step(inputs)
    if epoch == options.epochs - 1:
        checkpoint.save(prefix)
    print(
        f"Epoch {epoch + 1}: loss {train_loss.numpy():.3f},"
        f" accuracy {train_accuracy.result().numpy():.3f},"
        f" test loss {test_loss.result():.3f}, test accuracy {test_accuracy.result():.3f}"
    )
    last_accuracy = float(test_accuracy.result())
    for metric in (test_loss, train_accuracy, test_accuracy):
        metric.reset_state()

# A checkpoint needs no strategy to be restored, nor the same one.
restored_model = create_model()
restored_optimizer = tf.keras.optimizers.Adam()
restored_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="restored_accuracy")
restored_optimizer.build(restored_model.trainable_variables)
checkpoint = tf.train.Checkpoint(optimizer=restored_optimizer, model=restored_model)
checkpoint.restore(tf.train.latest_checkpoint("training_checkpoints"))


@tf.function
def evaluate(images, labels):
    restored_accuracy.update_state(labels, restored_model(images, training=False))


for images_batch, labels_batch in tf.data.Dataset.from_tensor_slices(
    (images[num_train:], labels[num_train:])
).batch(global_batch_size):
    evaluate(images_batch, labels_batch)
print(f"Accuracy of the restored model: {restored_accuracy.result():.3f}")
assert abs(float(restored_accuracy.result()) - last_accuracy) < 0.01
