"""Saving and loading models, as in TensorFlow's tutorial of distributed saving."""

import os
import tempfile

import numpy as np

import distributary.compat.tensorflow as tf

mirrored_strategy = tf.distribute.MirroredStrategy()
random = np.random.default_rng(0)
features = random.normal(size=(48, 5)).astype("float32")
labels = random.integers(0, 3, 48)
batch_size = 12


def get_data():
    train = tf.data.Dataset.from_tensor_slices((features, labels)).cache().batch(batch_size)
    test = tf.data.Dataset.from_tensor_slices((features, labels)).batch(batch_size)
    return train, test


def get_model():
    with mirrored_strategy.scope():
        model = tf.keras.Sequential(
            [tf.keras.Input((5,)), tf.keras.layers.Dense(8, "relu"), tf.keras.layers.Dense(3)]
        )
        values = np.random.default_rng(1)
        model.set_weights([values.normal(0, 0.3, w.shape) for w in model.get_weights()])
        model.compile(
            loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            optimizer=tf.keras.optimizers.Adam(0.01),
            metrics=[tf.metrics.SparseCategoricalAccuracy()],
        )
        return model


model = get_model()
train_dataset, eval_dataset = get_data()
print("loss", model.fit(train_dataset, epochs=2, verbose=0).history["loss"])

folder = tempfile.mkdtemp()
keras_model_path = os.path.join(folder, "model.keras")
model.save(keras_model_path)
restored = tf.keras.models.load_model(keras_model_path)
print("restored", restored.fit(train_dataset, epochs=2, verbose=0).history["loss"])

another_strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
with another_strategy.scope():
    restored = tf.keras.models.load_model(keras_model_path)
    print("one device", restored.fit(train_dataset, epochs=2, verbose=0).history["loss"])

# Weights, and a checkpoint of everything.
weights = os.path.join(folder, "w.weights.h5")
model.save_weights(weights)
other = get_model()
other.load_weights(weights)
print("evaluated", other.evaluate(eval_dataset, verbose=0))
checkpoint = tf.train.Checkpoint(model=model, step=tf.Variable(7))
manager = tf.train.CheckpointManager(checkpoint, os.path.join(folder, "ckpt"), max_to_keep=2)
for _ in range(3):
    checkpoint.step.assign_add(1)
    manager.save()
print("kept", [os.path.basename(path) for path in manager.checkpoints])
model.set_weights([0 * w for w in model.get_weights()])
checkpoint.step.assign(0)
checkpoint.restore(manager.latest_checkpoint).expect_partial()
print("back", checkpoint.step.numpy(), model.evaluate(eval_dataset, verbose=0))
print(tf.io.gfile.exists(keras_model_path), tf.io.gfile.isdir(folder))
