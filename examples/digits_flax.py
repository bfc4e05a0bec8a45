"""Trains a Flax NNX network with batch normalization on handwritten digits, with MirroredStrategy.

There is one replica per GPU, else one per TPU, else the CPU acts as two devices. Ends with status 1
if fewer than 95 % of the test images are recognized.
"""

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import distributary as dist

REQUIRED_ACCURACY = 0.95
BATCH_SIZE = 64  # global


class Network(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(64, 128, rngs=rngs)
        self.norm = nnx.BatchNorm(128, momentum=0.9, rngs=rngs)
        self.output = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, images):
        return self.output(nnx.relu(self.norm(self.hidden(images))))


def values_of(variables):
    return jax.tree.map(lambda variable: variable.value(), variables)


def assign(variables, values):
    jax.tree.map(lambda variable, value: variable.assign(value), variables, values)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20, help="default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")
    options = parser.parse_args()

    dist.config.set_logical_cpu_devices(2)  # first of all; for machines without GPU and TPU
    strategy = dist.MirroredStrategy()
    print(strategy)

    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=options.seed
    )
    train_set = dist.data.Dataset.from_tensor_slices((train_images, train_labels))
    train_set = train_set.shuffle(len(train_images), seed=options.seed)
    train_set = train_set.batch(BATCH_SIZE, drop_remainder=True)
    train_set = strategy.experimental_distribute_dataset(train_set)

    # The network as a function and two trees of arrays. The strategy keeps the arrays.
    network = Network(nnx.Rngs(options.seed))
    graph, initial_parameters, initial_statistics = nnx.split(network, nnx.Param, nnx.BatchStat)
    optimizer = optax.adam(3e-3)
    with strategy.scope():
        parameters = jax.tree.map(dist.Variable, initial_parameters)
        statistics = jax.tree.map(dist.Variable, initial_statistics)
        optimizer_state = jax.tree.map(dist.Variable, optimizer.init(initial_parameters))

    def train_step(images, labels):
        """The step of one replica; returns its part of the loss."""

        def loss():
            network = nnx.merge(graph, values_of(parameters), values_of(statistics))
            network.train()
            logits = network(images)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.sum() / BATCH_SIZE, nnx.state(network, nnx.BatchStat)

        (value, new_statistics), gradients = dist.value_and_grad(loss, parameters, has_aux=True)()
        context = dist.get_replica_context()
        gradients = context.all_reduce("SUM", gradients)
        updates, new_state = optimizer.update(gradients, values_of(optimizer_state))
        assign(parameters, optax.apply_updates(values_of(parameters), updates))
        assign(optimizer_state, new_state)
        assign(statistics, context.all_reduce("MEAN", new_statistics))  # each saw its own images
        return value

    for epoch in range(1, options.epochs + 1):
        losses = []
        for batch in train_set:
            losses.append(strategy.reduce("SUM", strategy.run(train_step, args=batch), axis=None))
        if epoch % 5 == 0:
            print(f"Epoch {epoch}/{options.epochs}, loss {jnp.mean(jnp.stack(losses)):.3f}")

    network = nnx.merge(graph, values_of(parameters), values_of(statistics))
    network.eval()
    accuracy = float(jnp.mean(network(test_images).argmax(axis=-1) == test_labels))
    print(f"Test accuracy: {accuracy:.2%} (required: {REQUIRED_ACCURACY:.0%})")
    return 0 if accuracy >= REQUIRED_ACCURACY else 1


if __name__ == "__main__":
    sys.exit(main())
