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

_NUM_STEPS = 500
_NUM_ROWS, _SIDE, _FILTERS, _CLASSES = 4 * 8, 12, 16, 10

mode = sys.argv[1]
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
if mode == "pool":
    strategy = dist.MirroredStrategy([f"CPU:{i}" for i in range(8)])
else:
    jax.config.update("jax_num_cpu_devices", 8)
    jax.devices()
    with warnings.catch_warnings(record=True, action="always") as caught:
        strategy = dist.MirroredStrategy()
    print(f"{len(caught)} {caught[0].category.__name__}")
if mode == "none":
    dispatcher = devices.dispatcher_for(tuple(strategy.extended.mesh.devices.flat))
    dispatcher._max_in_flight = _NUM_STEPS + 1

random = np.random.default_rng(0)
shapes = {"kernel": (3, 3, 3, _FILTERS), "dense": (_SIDE * _SIDE * _FILTERS, _CLASSES)}
scales = {"kernel": 0.1, "dense": 0.01}
with strategy.scope():
    weights = [
        dist.Variable(scales[name] * random.normal(size=shape), name=name, dtype="float32")
        for name, shape in shapes.items()
    ]


def step(x, y):
    def loss_fn():
        kernel, dense = (variable.value() for variable in weights)
        numbers = ("NHWC", "HWIO", "NHWC")
        features = jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=numbers
        )
        return jnp.mean((jax.nn.relu(features).reshape(len(x), -1) @ dense - y) ** 2)

    loss, gradients = dist.value_and_grad(loss_fn, weights)()
    loss, gradients = dist.get_replica_context().all_reduce("MEAN", (loss, gradients))
    for variable, gradient in zip(weights, gradients, strict=True):
        variable.assign_sub(0.01 * gradient)
    return loss


def load():
    x = random.normal(size=(_NUM_ROWS, _SIDE, _SIDE, 3)).astype(np.float32)
    y = random.normal(size=(_NUM_ROWS, _CLASSES)).astype(np.float32)
    for batch in strategy.experimental_distribute_dataset((x, y) for _ in range(_NUM_STEPS)):
        batches.put(batch)


batches = queue.Queue(maxsize=4)
loader = threading.Thread(target=load, daemon=True)
loader.start()
losses = [strategy.run(step, args=batches.get()) for _ in range(_NUM_STEPS)]
loader.join()
first, last = (float(strategy.experimental_local_results(losses[i])[0]) for i in (0, -1))
assert {"keras", "tensorflow"}.isdisjoint(sys.modules), "imported without being used"
print("learned" if last < 0.5 * first else f"did not learn: {first} to {last}")
