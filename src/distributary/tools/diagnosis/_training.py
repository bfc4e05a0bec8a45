"""A short training: it must learn, replicas must agree, and one device must get the same."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from distributary.context import ReplicaContext, get_replica_context
from distributary.data import Dataset
from distributary.devices import local_devices_of
from distributary.gradients import value_and_grad
from distributary.strategies import OneDeviceStrategy, Strategy
from distributary.tools.diagnosis._machine import Check
from distributary.variables import Variable

_NUM_STEPS = 60
_GLOBAL_BATCH_SIZE = 64  # at least; all replicas get the same number of examples
_HIDDEN = 32
_LEARNING_RATE = 0.5
_MAX_DIFFERENCE = 1e-3  # for float32, because sums are computed in another order


def training(strategy: Strategy) -> Check:
    """Trains a small network; all processes of the strategy must call it."""
    images, labels = _data()
    num_replicas = strategy.num_replicas_in_sync
    batch_size = num_replicas * math.ceil(_GLOBAL_BATCH_SIZE / num_replicas)
    losses, weights, same = _trained(strategy, images, labels, batch_size)
    device = local_devices_of(strategy.extended.mesh.devices.flat[0].platform.upper())[0]
    _, expected, _ = _trained(OneDeviceStrategy(device), images, labels, batch_size)
    difference = float(max(np.abs(a - b).max() for a, b in zip(weights, expected, strict=True)))
    detail = (
        f"{_NUM_STEPS} steps, {num_replicas} replicas: loss {losses[0]:.2f} to {losses[-1]:.2f}"
    )
    numbers = {
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "difference_to_one_device": difference,
        "replicas_agree": same,
    }
    if not losses[-1] < losses[0] / 2:
        problem = "the network does not learn"
    elif not same:
        problem = "the replicas have different weights"
    elif not difference < _MAX_DIFFERENCE:
        problem = f"its weights differ from those of one device by {difference:.1e}"
    else:
        agreement = (
            f"all replicas have the same weights, within {difference:.0e} of those of one device"
        )
        return Check("training", "ok", f"{detail}; {agreement}", numbers=numbers)
    fix = (
        "Leave out one device at a time to find the one that computes wrong results; compare the"
        " versions of jax and the driver with those that JAX supports"
    )
    return Check("training", "problem", f"{detail}; {problem}", fix, numbers)


def _data() -> tuple[np.ndarray, np.ndarray]:
    """Returns images `[n, 64]` and their labels `[n]`: ten images with noise."""
    rng = np.random.default_rng(0)
    labels = np.arange(1024, dtype=np.int32) % 10
    noise = rng.normal(0.0, 0.3, (1024, 64))
    return (rng.random((10, 64))[labels] + noise).astype(np.float32), labels


def _trained(
    strategy: Strategy, images: np.ndarray, labels: np.ndarray, batch_size: int
) -> tuple[list[float], list[np.ndarray], bool]:
    """Returns the loss of every step, the weights, and whether they are equal on all replicas."""
    rng = np.random.default_rng(1)
    sizes = ((images.shape[1], _HIDDEN), (_HIDDEN, 10))
    with strategy.scope():
        kernels = [Variable(rng.normal(0, n**-0.5, (n, m)).astype(np.float32)) for n, m in sizes]
        biases = [Variable(np.zeros(m, np.float32)) for _, m in sizes]
    variables = [*kernels, *biases]

    def summed_loss(x: jax.Array, y: jax.Array) -> jax.Array:
        with jax.default_matmul_precision("highest"):
            hidden = jax.nn.relu(x @ kernels[0].value() + biases[0])
            scores = jax.nn.log_softmax(hidden @ kernels[1].value() + biases[1])
        return -jnp.take_along_axis(scores, y[:, None], axis=1).sum()

    def step(x: jax.Array, y: jax.Array) -> jax.Array:
        loss, gradients = value_and_grad(summed_loss, variables)(x, y)
        loss, gradients = _context().all_reduce("SUM", (loss, gradients))
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(_LEARNING_RATE / batch_size * gradient)
        return loss / batch_size

    def copies() -> jax.Array:
        flat = jnp.concatenate([jnp.ravel(v.value()) for v in variables])
        return _context().all_gather(flat[None], axis=0)

    examples = Dataset.from_tensor_slices((images, labels)).repeat()
    batches = strategy.experimental_distribute_dataset(examples.batch(batch_size).take(_NUM_STEPS))
    losses = [strategy.run(step, args=batch) for batch in batches]
    gathered = np.asarray(strategy.experimental_local_results(strategy.run(copies))[0])
    same = bool((gathered == gathered[0]).all())
    results = [float(np.asarray(strategy.experimental_local_results(loss)[0])) for loss in losses]
    return results, [np.asarray(v.value()) for v in variables], same


def _context() -> ReplicaContext:
    context = get_replica_context()
    assert context is not None
    return context
