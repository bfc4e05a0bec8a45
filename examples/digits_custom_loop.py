"""Trains a small network on handwritten digits with MirroredStrategy and a loop of its own.

There is one replica per GPU, else one per TPU, else the CPU acts as two devices. Writes
digits_custom_loop_learning_curves.png into the current directory, and ends with status 1 if fewer
than 97 % of the test images are recognized.
"""

import argparse
import itertools
import math
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from learning_curves import draw
from rich.console import Console
from rich.progress import Progress

import distributary as dist

LAYERS = (64, 128, 64, 10)  # 8 x 8 pixels in, ten digits out
REQUIRED_ACCURACY = 0.97
PICTURE = "digits_custom_loop_learning_curves.png"


class Batches:
    """Global batches; the last one has what is left. `rng` shuffles and augments them."""

    def __init__(self, images, labels, global_batch_size, rng=None):
        self.images, self.labels, self.rng = images, labels, rng
        self.starts = range(0, len(images), global_batch_size)

    def __iter__(self):
        order = np.arange(len(self.images))
        if self.rng is not None:
            self.rng.shuffle(order)
        for rows in np.split(order, self.starts[1:]):
            images = self.images[rows]
            if self.rng is not None:
                images = augmented(images, self.rng)
            yield images, self.labels[rows]


def augmented(images, rng):
    """The images with noise, some of them shifted by a pixel."""
    padded = np.pad(images.reshape(-1, 8, 8), ((0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (8, 8), axis=(1, 2))
    down, right = rng.choice(3, (2, len(images)), p=(0.07, 0.86, 0.07))  # 1 is the middle
    shifted = windows[np.arange(len(images)), down, right].reshape(images.shape)
    return shifted + rng.normal(0, 0.1, images.shape).astype(np.float32)


def initial_parameters(rng):
    return [
        {
            "weights": rng.normal(0, math.sqrt(2 / num_in), (num_in, num_out)).astype(np.float32),
            "bias": np.zeros(num_out, np.float32),
        }
        for num_in, num_out in itertools.pairwise(LAYERS)
    ]


def network(parameters, images):
    hidden = images
    for layer in parameters[:-1]:
        hidden = jax.nn.relu(hidden @ layer["weights"] + layer["bias"])
    return hidden @ parameters[-1]["weights"] + parameters[-1]["bias"]


def train(strategy, options, console):
    """Trains the network; returns values per epoch, named as in the `History` of Keras."""
    # Input. Each replica gets a part of every global batch, also of the smaller last one.
    digits = np.load(Path(__file__).with_name("digits.npz"))
    images, labels = digits["images"].reshape(-1, 64), digits["labels"]
    rng = np.random.default_rng(options.seed)
    train_batches = Batches(images[:-360], labels[:-360], options.global_batch_size, rng)
    test_batches = Batches(images[-360:], labels[-360:], options.global_batch_size)
    train_set = strategy.experimental_distribute_dataset(train_batches)
    test_set = strategy.experimental_distribute_dataset(test_batches)

    # State. Variables created in the scope have the same value on every replica.
    num_steps = options.epochs * len(train_batches.starts)
    optimizer = optax.adam(optax.cosine_decay_schedule(options.learning_rate, num_steps))
    initial = initial_parameters(rng)
    with strategy.scope():
        parameters = jax.tree.map(dist.Variable, initial)
        optimizer_state = jax.tree.map(dist.Variable, optimizer.init(initial))

    # Steps. Each is the code of one replica, and is compiled to one program of all replicas.
    def test_step(images, labels):
        """Sums over the examples of this replica."""
        logits = network(parameters, images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        num_correct = jnp.sum(logits.argmax(axis=-1) == labels)
        return {"loss": losses.sum(), "correct": num_correct, "examples": jnp.float32(len(labels))}

    def train_step(images, labels):
        def loss():
            sums = test_step(images, labels)
            return sums["loss"], sums

        gradients, sums = dist.grad(loss, parameters, has_aux=True)()
        # The replicas' numbers of examples may differ: sum everything first, divide afterwards.
        gradients, num_examples = dist.get_replica_context().all_reduce(
            dist.ReduceOp.SUM, (gradients, sums["examples"])
        )
        gradients = jax.tree.map(lambda gradient: gradient / num_examples, gradients)
        updates, new_state = optimizer.update(gradients, dist.values(optimizer_state))
        dist.assign(parameters, optax.apply_updates(dist.values(parameters), updates))
        dist.assign(optimizer_state, new_state)
        return sums

    def run_epoch(step, dataset):
        """Mean loss and accuracy over a dataset."""
        totals = {"loss": 0.0, "correct": 0, "examples": 0}
        for batch in dataset:
            sums_per_replica = strategy.run(step, args=batch)
            sums = strategy.reduce(dist.ReduceOp.SUM, sums_per_replica, axis=None)
            totals = jax.tree.map(jnp.add, totals, sums)
        return [float(totals[name] / totals["examples"]) for name in ("loss", "correct")]

    history = []
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("Training", total=options.epochs)
        for epoch in range(1, options.epochs + 1):
            history.append([*run_epoch(train_step, train_set), *run_epoch(test_step, test_set)])
            text = f"Epoch {epoch}/{options.epochs}, test accuracy {history[-1][3]:.1%}"
            progress.update(task, advance=1, description=text)
            if not console.is_terminal and epoch % 10 == 0:
                print(text, flush=True)
    names = ("loss", "accuracy", "val_loss", "val_accuracy")
    return dict(zip(names, zip(*history, strict=True), strict=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=40, help="default %(default)s")
    parser.add_argument("--global-batch-size", type=int, default=64, help="default %(default)s")
    parser.add_argument("--learning-rate", type=float, default=0.004, help="default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")
    options = parser.parse_args()
    start_seconds = time.perf_counter()

    # For machines without GPU and TPU. It comes first, before anything starts JAX.
    dist.config.set_logical_cpu_devices(2)
    strategy = dist.MirroredStrategy()
    print(strategy)
    history = train(strategy, options, Console())
    draw(history, REQUIRED_ACCURACY, PICTURE)

    accuracy = history["val_accuracy"][-1]
    print(f"Test accuracy: {accuracy:.2%} (required: {REQUIRED_ACCURACY:.0%})")
    print(f"Time: {time.perf_counter() - start_seconds:.1f} s. Learning curves: {PICTURE}")
    return 0 if accuracy >= REQUIRED_ACCURACY else 1


if __name__ == "__main__":
    sys.exit(main())
