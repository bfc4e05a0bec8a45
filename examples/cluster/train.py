"""Trains an image classifier with Keras, on one machine or on many, and resumes after a failure.

    python train.py                            # all devices of this machine
    distributary launch --workers 2 train.py   # two workers on this machine

The other files in this folder run it on a cluster. If it is started again with the same
`--checkpoints`, it continues after the last epoch that it has finished.
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")  # before keras is imported

import keras
import numpy as np

import distributary as dist


def load(folder):
    """Returns images [n, height, width, channels] from 0 to 1, and their classes [n]."""
    if folder is not None:  # each worker reads only its rows of the mapped file
        return np.load(folder / "images.npy", mmap_mode="r"), np.load(folder / "labels.npy")
    from sklearn.datasets import load_digits

    digits = load_digits()
    return (digits.images[..., None] / 16).astype("float32"), digits.target


def build_model(image_shape, num_classes):
    layers = [
        keras.Input(image_shape),
        keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(num_classes),
    ]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.002), loss, metrics=["accuracy"])
    return model


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with images.npy and labels.npy")
    parser.add_argument("--checkpoints", type=Path, default="checkpoints", help="%(default)s")
    parser.add_argument("--epochs", type=int, default=10, help="default %(default)s")
    parser.add_argument("--batch-size", type=int, default=64, help="global, default %(default)s")
    parser.add_argument("--tpu", action="store_true", help="find the other hosts of a TPU slice")
    options = parser.parse_args()

    # Connects the workers, so it comes before anything that computes.
    strategy = dist.TPUStrategy() if options.tpu else dist.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(0)
    images, labels = load(options.data)
    num_train = len(images) * 4 // 5
    with strategy.scope():
        model = build_model(images.shape[1:], int(labels.max()) + 1)

    # The chief writes the backup after each epoch, and all workers continue from it.
    backup = keras.callbacks.BackupAndRestore(options.checkpoints, delete_checkpoint=False)
    train = {"x": images[:num_train], "y": labels[:num_train], "batch_size": options.batch_size}
    history = model.fit(**train, epochs=options.epochs, callbacks=[backup], verbose=2)
    _, accuracy = model.evaluate(images[num_train:], labels[num_train:], verbose=0)
    model.save(options.checkpoints / "model.keras")  # by all workers; the chief writes
    if strategy.is_chief:
        print(f"Trained {len(history.epoch)} of {options.epochs} epochs on {strategy}")
        print(f"Test accuracy: {accuracy:.1%}")


if __name__ == "__main__":
    main()
