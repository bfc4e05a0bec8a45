"""Trains on handwritten digits with several workers, and goes on after one of them is lost.

    distributary launch --workers 2 --max-restarts 1 multi_worker_recovery.py --lose-a-worker

The last worker kills itself in the middle of the training. The other one notices and ends, the
launcher starts both again, and they go on from the last checkpoint. Ends with status 1 if fewer
than 95 % of the test images are recognized.
"""

import argparse
import os
import signal
import sys
from pathlib import Path

import jax
import numpy as np
import optax

import distributary as dist
from distributary.checkpoint import Checkpoint, CheckpointManager

REQUIRED_ACCURACY = 0.95
BATCH_SIZE = 64  # global


def network(parameters, images):
    hidden = jax.nn.relu(images @ parameters["hidden"] + parameters["hidden_bias"])
    return hidden @ parameters["output"] + parameters["output_bias"]


def initial_parameters(rng):
    return {
        "hidden": rng.normal(0, 0.18, (64, 64)).astype(np.float32),
        "hidden_bias": np.zeros(64, np.float32),
        "output": rng.normal(0, 0.18, (64, 10)).astype(np.float32),
        "output_bias": np.zeros(10, np.float32),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12, help="default %(default)s")
    parser.add_argument("--directory", type=Path, default="checkpoints", help="default %(default)s")
    parser.add_argument("--lose-a-worker", action="store_true", help="after half of the epochs")
    options = parser.parse_args()
    is_first_attempt = os.environ.get("DISTRIBUTARY_RESTART", "0") == "0"

    # Finds the others in TF_CONFIG, which the launcher sets; alone it is a strategy of one machine.
    strategy = dist.MultiWorkerMirroredStrategy()
    is_chief = strategy.is_chief

    digits = np.load(Path(__file__).with_name("digits.npz"))
    images, labels = digits["images"].reshape(-1, 64), digits["labels"]
    train_images, test_images = images[:-325], images[-325:]
    train_labels, test_labels = labels[:-325], labels[-325:]
    # All workers read the same batches; each computes its rows.
    dataset = dist.data.Dataset.from_tensor_slices((train_images, train_labels))
    dataset = dataset.shuffle(len(train_images), seed=0).batch(BATCH_SIZE).repeat()
    batches = iter(strategy.experimental_distribute_dataset(dataset))

    optimizer = optax.adam(3e-3)
    initial = initial_parameters(np.random.default_rng(0))
    with strategy.scope():
        parameters = jax.tree.map(dist.Variable, initial)
        optimizer_state = jax.tree.map(dist.Variable, optimizer.init(initial))

    def step(images, labels):
        def loss():
            logits = network(parameters, images)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum()

        gradients = dist.get_replica_context().all_reduce("SUM", dist.grad(loss, parameters)())
        gradients = jax.tree.map(lambda gradient: gradient / BATCH_SIZE, gradients)
        updates, new_state = optimizer.update(gradients, dist.values(optimizer_state))
        dist.assign(parameters, optax.apply_updates(dist.values(parameters), updates))
        dist.assign(optimizer_state, new_state)

    # Everything that a training needs to go on as if nothing had happened, `batches` included.
    checkpoint = Checkpoint(
        parameters=parameters, optimizer_state=optimizer_state, batches=batches, epoch=0
    )
    manager = CheckpointManager(checkpoint, options.directory, max_to_keep=2)
    manager.restore_or_initialize()
    if is_chief:
        print(f"Starts after epoch {checkpoint.epoch}", flush=True)

    for epoch in range(checkpoint.epoch + 1, options.epochs + 1):
        for _ in range(len(train_images) // BATCH_SIZE):
            strategy.run(step, args=next(batches))
        if options.lose_a_worker and is_first_attempt and epoch > options.epochs // 2:
            manager.wait_until_finished()
            if not is_chief:
                os.kill(os.getpid(), signal.SIGKILL)
        checkpoint.epoch = epoch
        manager.save()
    manager.wait_until_finished()

    logits = network({name: v.numpy() for name, v in parameters.items()}, test_images)
    accuracy = float(np.mean(logits.argmax(axis=-1) == test_labels))
    if is_chief:
        print(f"Test accuracy: {accuracy:.2%} (required: {REQUIRED_ACCURACY:.0%})")
    return 0 if accuracy >= REQUIRED_ACCURACY else 1


if __name__ == "__main__":
    sys.exit(main())
