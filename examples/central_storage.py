"""Trains a wide network on handwritten digits with CentralStorageStrategy.

One device keeps the variables and updates them, others compute: here three logical devices of the
CPU. Prints how much of the training's state each device holds between steps, and ends with status 1
if fewer than 95 % of the test images are recognized.
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

REQUIRED_ACCURACY = 0.95


def build_model(width):
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(width, activation="relu"),
            layers.Dense(width, activation="relu"),
            layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(0.001),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def bytes_on(device):
    """Bytes of all arrays that are on a device now."""
    pieces = (piece for array in jax.live_arrays() for piece in array.addressable_shards)
    return sum(piece.data.nbytes for piece in pieces if piece.device == device)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10, help="default %(default)s")
    parser.add_argument("--width", type=int, default=512, help="of layers, default %(default)s")
    options = parser.parse_args()

    dist.config.set_logical_cpu_devices(3)  # first of all, before anything starts JAX
    strategy = dist.CentralStorageStrategy(["CPU:1", "CPU:2"], parameter_device="CPU:0")
    print(strategy)

    digits = np.load(Path(__file__).with_name("digits.npz"))
    images, labels = digits["images"].reshape(-1, 64), digits["labels"]
    train_x, test_x = images[:-325], images[-325:]
    train_y, test_y = labels[:-325], labels[-325:]
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = build_model(options.width)
    model.fit(train_x, train_y, batch_size=64, epochs=options.epochs, verbose=0)

    weights = sum(v.value.nbytes for v in model.variables)
    slots = sum(v.value.nbytes for v in model.optimizer.variables)
    print(f"Weights: {weights / 1e6:.1f} MB, state of Adam: {slots / 1e6:.1f} MB")
    for device in jax.devices("cpu"):
        print(f"CPU:{device.id} holds {bytes_on(device) / 1e6:.1f} MB")

    _, accuracy = model.evaluate(test_x, test_y, batch_size=64, verbose=0)
    print(f"Test accuracy: {accuracy:.2%} (required: {REQUIRED_ACCURACY:.0%})")
    return 0 if accuracy >= REQUIRED_ACCURACY else 1


if __name__ == "__main__":
    sys.exit(main())
