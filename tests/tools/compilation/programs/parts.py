"""A transformer in mixed precision, whose variables are divided over the devices."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np
from keras import layers as kl

import distributary as dist

keras.mixed_precision.set_dtype_policy("mixed_bfloat16")
strategy = dist.MirroredStrategy(experimental_shard_parameters=True)
with strategy.scope():
    ids = keras.Input((64,), dtype="int32")
    x = kl.Embedding(512, 256)(ids)
    for _ in range(3):
        x = kl.LayerNormalization()(x + kl.MultiHeadAttention(2, 128, use_bias=False)(x, x))
        x = kl.LayerNormalization()(x + kl.Dense(256)(kl.Dense(1024, "relu")(x)))
    model = keras.Model(ids, kl.Dense(512)(x))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
batch = np.zeros((64, 64), np.int32)
model.fit(batch, batch, batch_size=64, verbose=0)
