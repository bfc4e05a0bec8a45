"""Trains on handwritten digits with the state of Adam mirrored, and with a part on each device.

Weights are on every device both times. What Adam keeps for them, twice their size, is on every
device the same at first; with experimental_shard_optimizer_state=True each of the four holds a
quarter of it. Ends with status 1 if the two networks do not come out alike.
"""

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")  # before keras is imported

import jax
import keras
import numpy as np

import distributary as dist


def bytes_on(device):
    """Bytes of all arrays that are on a device now."""
    pieces = (piece for array in jax.live_arrays() for piece in array.addressable_shards)
    return sum(piece.data.nbytes for piece in pieces if piece.device == device)


def train(strategy, images, labels, options):
    """Prints what the first device holds; returns the weights."""
    print(strategy)
    device = strategy.extended.mesh.devices.flat[0]
    before = bytes_on(device)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = [keras.layers.Dense(options.width, activation="relu"), keras.layers.Dense(10)]
        model = keras.Sequential([keras.Input((64,)), *layers])
        model.compile(
            optimizer=keras.optimizers.Adam(0.002),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    history = model.fit(images, labels, batch_size=64, epochs=options.epochs, verbose=0).history

    weights = sum(v.value.nbytes for v in model.variables)
    state = bytes_on(device) - before - weights
    print(f"  accuracy {history['accuracy'][-1]:.2%}")
    print(f"  on {device}: {weights / 1e3:.0f} kB of weights, {state / 1e3:.0f} kB of other state")
    return model.get_weights()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5, help="default %(default)s")
    parser.add_argument("--width", type=int, default=2048, help="of a layer, default %(default)s")
    options = parser.parse_args()

    dist.config.set_logical_cpu_devices(4)  # first of all; for machines without GPU and TPU
    digits = np.load(Path(__file__).with_name("digits.npz"))
    images, labels = digits["images"][:1792].reshape(-1, 64), digits["labels"][:1792]

    mirrored = train(dist.MirroredStrategy(), images, labels, options)
    sharded = train(
        dist.MirroredStrategy(experimental_shard_optimizer_state=True), images, labels, options
    )

    difference = max(np.abs(a - b).max() for a, b in zip(mirrored, sharded, strict=True))
    print(f"Largest difference of a weight: {difference:.1e}")
    return 0 if difference < 1e-3 else 1


if __name__ == "__main__":
    sys.exit(main())
