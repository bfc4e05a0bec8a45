"""Trains a Flax NNX network with dropout on handwritten digits, with MirroredStrategy.

There is one replica per GPU, else one per TPU, else the CPU acts as two devices. Ends with status 1
if fewer than 95 % of the test images are recognized.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import optax
from flax import nnx

import distributary as dist

REQUIRED_ACCURACY = 0.95
BATCH_SIZE = 64  # global


class Network(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(64, 128, rngs=rngs)
        self.norm = nnx.BatchNorm(128, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.output = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, images):
        return self.output(self.dropout(nnx.relu(self.norm(self.hidden(images)))))


def loss_of(network, images, labels):
    losses = optax.softmax_cross_entropy_with_integer_labels(network(images), labels)
    return losses.sum() / BATCH_SIZE


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20, help="default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")
    options = parser.parse_args()

    digits = np.load(Path(__file__).with_name("digits.npz"))
    images, labels = digits["images"].reshape(-1, 64), digits["labels"]
    train_images, test_images = images[:-360], images[-360:]
    train_labels, test_labels = labels[:-360], labels[-360:]
    dataset = dist.data.Dataset.from_tensor_slices((train_images, train_labels))
    dataset = dataset.shuffle(len(train_images), seed=options.seed)
    dataset = dataset.batch(BATCH_SIZE, drop_remainder=True)

    dist.config.set_logical_cpu_devices(2)  # first of all; for machines without GPU and TPU
    strategy = dist.MirroredStrategy()
    print(strategy)
    network = Network(nnx.Rngs(options.seed))
    optimizer = nnx.Optimizer(network, optax.adam(3e-3), wrt=nnx.Param)
    with strategy.scope():
        state = dist.nnx.State(network, optimizer)

    def train_step(images, labels):
        """The step of one replica; returns its part of the loss."""
        with state.merged() as (network, optimizer):
            loss, gradients = nnx.value_and_grad(loss_of)(network, images, labels)
            gradients = dist.get_replica_context().all_reduce("SUM", gradients)
            optimizer.update(network, gradients)
        return loss

    train_set = strategy.experimental_distribute_dataset(dataset)
    for epoch in range(1, options.epochs + 1):
        for batch in train_set:
            loss = strategy.reduce("SUM", strategy.run(train_step, args=batch), axis=None)
        if epoch % 5 == 0:
            print(f"Epoch {epoch}/{options.epochs}, loss {float(loss):.3f}")

    with state.merged() as (network, _):
        network.eval()
        accuracy = float((network(test_images).argmax(axis=-1) == test_labels).mean())
    print(f"Test accuracy: {accuracy:.2%} (required: {REQUIRED_ACCURACY:.0%})")
    return 0 if accuracy >= REQUIRED_ACCURACY else 1


if __name__ == "__main__":
    sys.exit(main())
