"""The tf.data peer of `input_time.py`, in a process of its own."""

import numpy as np
import tensorflow as tf
from _peers import Peer, timed

__all__ = ["peers"]


def peers(shape: tuple[int, int], batch: int) -> list[Peer]:
    """Returns a peer that takes batches of random rows."""
    rows = np.random.default_rng(0).random(tuple(shape), np.float32)
    dataset = tf.data.Dataset.from_tensor_slices(rows).shuffle(shape[0]).repeat().batch(batch)
    batches = dataset.prefetch(tf.data.AUTOTUNE).as_numpy_iterator()

    def take(num_steps: int) -> None:
        for _ in range(num_steps):
            next(batches)

    return [timed("tf.data", take)]
