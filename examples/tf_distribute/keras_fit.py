"""Keras' fit on several devices with MirroredStrategy: callbacks, saving, loading.

A program for tf.distribute; only its import is another one. Writes below the current directory.
"""

import argparse
import os
from pathlib import Path

import numpy as np

import distributary.compat.tensorflow as tf

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=12, help="default %(default)s")
options = parser.parse_args()

# Without GPUs, the CPU acts as two devices.
if not tf.config.list_physical_devices("GPU"):
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration(), tf.config.LogicalDeviceConfiguration()]
    )
strategy = tf.distribute.MirroredStrategy()
print(f"Number of devices: {strategy.num_replicas_in_sync}")

# Every replica gets its part of a global batch.
digits = np.load(Path(__file__).parents[1] / "digits.npz")
images, labels = digits["images"].reshape(-1, 64), digits["labels"]
num_train = 1408
batch_size = 32 * strategy.num_replicas_in_sync


def scale(images, labels):
    return 2 * tf.cast(images, tf.float32) - 1, labels


train_set = (
    tf.data.Dataset.from_tensor_slices((images[:num_train], labels[:num_train]))
    .shuffle(num_train)
    .batch(batch_size)
    .map(scale)
    .prefetch(tf.data.AUTOTUNE)
)
test_set = (
    tf.data.Dataset.from_tensor_slices((images[num_train:], labels[num_train:]))
    .batch(batch_size)
    .map(scale)
)

# What the scope creates is there on all devices.
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


def decay(epoch):
    return 0.005 if epoch < 8 else 0.001


class PrintLearningRate(tf.keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        rate = self.model.optimizer.learning_rate.numpy()
        print(f"Epoch {epoch + 1}: learning rate {rate:.3f}, loss {logs['loss']:.3f}")


os.makedirs("checkpoints", exist_ok=True)
model.fit(
    train_set,
    epochs=options.epochs,
    verbose=0,
    callbacks=[
        tf.keras.callbacks.ModelCheckpoint(
            filepath="checkpoints/{epoch:02d}.weights.h5", save_weights_only=True
        ),
        tf.keras.callbacks.LearningRateScheduler(decay),
        PrintLearningRate(),
    ],
)
loss, accuracy = model.evaluate(test_set, verbose=0)
print(f"Test loss {loss:.3f}, accuracy {accuracy:.3f}")

# The last checkpoint has the same weights, and so has the saved model, on one device as well.
model.load_weights(f"checkpoints/{options.epochs:02d}.weights.h5")
model.save("digits.keras")
on_one_device = tf.keras.models.load_model("digits.keras")
with strategy.scope():
    on_all_devices = tf.keras.models.load_model("digits.keras")
for loaded in (on_one_device, on_all_devices):
    np.testing.assert_allclose(loaded.evaluate(test_set, verbose=0), [loss, accuracy], rtol=1e-3)
print("Loaded with the same accuracy.")
