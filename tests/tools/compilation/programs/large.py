"""A model with 4 GiB of parameters, in blocks that contain layers."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np

import distributary as dist

WIDTH = 16384


class Block(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(WIDTH, "relu", use_bias=False)
        self.second = keras.layers.Dense(WIDTH, use_bias=False)

    def build(self, shape):
        self.first.build(shape)
        self.second.build(shape)

    def call(self, x, training=False):
        assert isinstance(training, bool)  # not traced, also where it is rematerialized
        return x + self.second(self.first(x))


keras.mixed_precision.set_dtype_policy("mixed_bfloat16")
strategy = dist.MirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((WIDTH,)), Block(), Block()])
    model.compile("adam", "mse")
rows = np.zeros((512, WIDTH), np.float32)
model.fit(rows, rows, batch_size=512, verbose=0)
