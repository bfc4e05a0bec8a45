"""Dispatches many steps on 8 CPU devices with two cores, where XLA deadlocks without protection.

Takes `pool` (the thread pool is prepared before JAX starts) or `window` (JAX has started with its
own pool, so only the number of steps in flight protects). `none` shows the deadlock: the same steps
dispatched without either, which XLA aborts after 40 seconds.
"""

import os
import queue
import sys
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np

import distributary as dist
from distributary import devices

_NUM_CORES = 2
_NUM_REPLICAS = 8
_NUM_STEPS = 500
_ROWS_PER_REPLICA = 4
_SIDE = 12
_FILTERS = 16
_CLASSES = 10


def main(mode: str) -> None:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:_NUM_CORES])
    strategy = _start(mode)
    random = np.random.default_rng(0)
    with strategy.scope():
        kernel = dist.Variable(
            0.1 * random.normal(size=(3, 3, 3, _FILTERS)), name="kernel", dtype="float32"
        )
        dense = dist.Variable(
            0.01 * random.normal(size=(_SIDE * _SIDE * _FILTERS, _CLASSES)),
            name="dense",
            dtype="float32",
        )
    batches: queue.Queue[dist.PerReplica] = queue.Queue(maxsize=4)
    loader = threading.Thread(target=_load, args=(batches, strategy, random), daemon=True)
    loader.start()

    def step(x: jax.Array, y: jax.Array) -> jax.Array:
        def loss_fn() -> jax.Array:
            return _loss(kernel.value(), dense.value(), x, y)

        loss, gradients = dist.value_and_grad(loss_fn, [kernel, dense])()
        context = dist.get_replica_context()
        loss, gradients = context.all_reduce(dist.ReduceOp.MEAN, (loss, gradients))
        kernel.assign_sub(0.01 * gradients[0])
        dense.assign_sub(0.01 * gradients[1])
        return loss

    if mode == "none":
        _without_protection(strategy)
    losses = [strategy.run(step, args=batches.get()) for _ in range(_NUM_STEPS)]
    loader.join()
    first, last = (
        float(strategy.experimental_local_results(loss)[0]) for loss in (losses[0], losses[-1])
    )
    assert {"keras", "tensorflow"}.isdisjoint(sys.modules), "imported without being used"
    print("learned" if last < 0.5 * first else f"did not learn: {first} to {last}")


def _start(mode: str) -> dist.MirroredStrategy:
    if mode == "pool":
        return dist.MirroredStrategy([f"CPU:{i}" for i in range(_NUM_REPLICAS)])
    jax.config.update("jax_num_cpu_devices", _NUM_REPLICAS)
    jax.devices()
    with warnings.catch_warnings(record=True, action="always") as caught:
        strategy = dist.MirroredStrategy()
    print(f"{len(caught)} {caught[0].category.__name__}")
    return strategy


def _without_protection(strategy: dist.MirroredStrategy) -> None:
    dispatcher = devices.dispatcher_for(tuple(strategy.extended.mesh.devices.flat))
    dispatcher._max_in_flight = _NUM_STEPS + 1


def _load(batches: queue.Queue, strategy: dist.Strategy, random: np.random.Generator) -> None:
    num_rows = _ROWS_PER_REPLICA * _NUM_REPLICAS
    x = random.normal(size=(num_rows, _SIDE, _SIDE, 3)).astype(np.float32)
    y = random.normal(size=(num_rows, _CLASSES)).astype(np.float32)
    for batch in strategy.experimental_distribute_dataset((x, y) for _ in range(_NUM_STEPS)):
        batches.put(batch)


def _loss(kernel: jax.Array, dense: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    features = jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    features = jax.nn.relu(features).reshape(len(x), -1)
    return jnp.mean((features @ dense - y) ** 2)


if __name__ == "__main__":
    main(sys.argv[1])
