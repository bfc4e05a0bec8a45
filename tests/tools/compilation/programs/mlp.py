"""A Keras MLP; with the argument `evaluate` it is evaluated before it is trained."""

import os
import sys

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np

import distributary as dist

keras.utils.set_random_seed(0)
dist.config.set_logical_cpu_devices(2)  # without effect here
strategy = dist.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((784,)),
            keras.layers.Dense(256, "relu"),
            keras.layers.Dropout(0.1),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
rng = np.random.default_rng(0)
images = rng.random((160, 784), np.float32)
labels = rng.integers(0, 10, 160)

# What comes before the training step is computed here.
if sys.argv[1:] == ["evaluate"]:
    hidden, output = (layer.get_weights() for layer in (model.layers[0], model.layers[2]))
    logits = np.maximum(images @ hidden[0] + hidden[1], 0) @ output[0] + output[1]
    accuracy = np.mean(np.argmax(logits, 1) == labels)
    _, evaluated = model.evaluate(images, labels, batch_size=160, verbose=0)
    np.testing.assert_allclose(evaluated, accuracy, rtol=1e-6)
    predicted = model.predict(images, batch_size=160, verbose=0)
    np.testing.assert_allclose(predicted, logits, rtol=1e-4, atol=1e-5)

model.fit(images, labels, batch_size=160, verbose=0)
raise AssertionError("the script goes on after its step")
