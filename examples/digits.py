"""Trains a small Keras model on handwritten digits with MirroredStrategy.

There is one replica per GPU, else one per TPU, else the CPU acts as two devices. With
`--devices 1 2 4`, it trains on one, two and four of them, with the same loss. Writes
digits_learning_curves.png into the current directory, and ends with status 1 if fewer than 97 %
of the test images are recognized.
"""

import argparse
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")  # before keras is imported

import keras
import numpy as np
from learning_curves import draw

import distributary as dist

REQUIRED_ACCURACY = 0.97
PICTURE = "digits_learning_curves.png"


def load_digits():
    """Train images and labels, test images and labels; images are [n, 8, 8, 1], 0 to 1."""
    digits = np.load(Path(__file__).with_name("digits.npz"))
    images, labels = digits["images"][..., None], digits["labels"]
    return (images[:-360], labels[:-360]), (images[-360:], labels[-360:])


def build_model(learning_rate):
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.RandomTranslation(0.1, 0.1, fill_mode="constant"),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.4),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def train(strategy, train_set, test_set, options):
    print(strategy, flush=True)
    keras.utils.set_random_seed(options.seed)
    with strategy.scope():
        model = build_model(options.learning_rate)
    fitted = model.fit(
        *train_set,
        batch_size=options.batch_size,
        epochs=options.epochs,
        validation_data=test_set,
        verbose=1 if sys.stdout.isatty() else 2,
    )
    return model, fitted.history


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=25, help="default %(default)s")
    parser.add_argument("--batch-size", type=int, default=64, help="global, default %(default)s")
    parser.add_argument("--learning-rate", type=float, default=0.002, help="default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")
    parser.add_argument("--devices", type=int, nargs="+", default=[], help="in turn, default all")
    options = parser.parse_args()
    start_seconds = time.perf_counter()

    # For machines without GPU and TPU. It comes first, before anything starts JAX.
    dist.config.set_logical_cpu_devices(max([2, *options.devices]))
    devices = dist.MirroredStrategy().extended.worker_devices
    train_set, test_set = load_digits()
    losses = {}
    for number in options.devices or [len(devices)]:
        strategy = dist.MirroredStrategy(devices[:number])
        model, history = train(strategy, train_set, test_set, options)
        losses[number] = history["loss"]
    draw(history, REQUIRED_ACCURACY, PICTURE, losses)

    _, accuracy = model.evaluate(*test_set, batch_size=options.batch_size, verbose=0)
    print(f"Test accuracy: {accuracy:.2%} (required: {REQUIRED_ACCURACY:.0%})")
    print(f"Time: {time.perf_counter() - start_seconds:.1f} s. Learning curves: {PICTURE}")
    return 0 if accuracy >= REQUIRED_ACCURACY else 1


if __name__ == "__main__":
    sys.exit(main())
