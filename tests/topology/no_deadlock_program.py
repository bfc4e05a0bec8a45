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

from distributary import topology

_NUM_CORES = 2
_NUM_REPLICAS = 8
_NUM_STEPS = 500
_ROWS_PER_REPLICA = 4
_SIDE = 12
_FILTERS = 16
_CLASSES = 10


def main(mode: str) -> None:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:_NUM_CORES])
    devices = _start(mode)
    mesh = topology.make_mesh(devices)
    rows = jax.NamedSharding(mesh, jax.P(topology.REPLICA_AXIS))
    random = np.random.default_rng(0)
    parameters = {
        "kernel": 0.1 * random.normal(size=(3, 3, 3, _FILTERS)),
        "dense": 0.01 * random.normal(size=(_SIDE * _SIDE * _FILTERS, _CLASSES)),
    }
    parameters = jax.tree.map(np.float32, parameters)
    parameters = jax.device_put(parameters, jax.NamedSharding(mesh, jax.P()))
    batches: queue.Queue[tuple[jax.Array, jax.Array]] = queue.Queue(maxsize=4)
    loader = threading.Thread(target=_load, args=(batches, rows, random), daemon=True)
    loader.start()
    compiled = jax.jit(_replica_step(mesh))
    dispatcher = topology.dispatcher_for(devices)

    losses = []
    for _ in range(_NUM_STEPS):
        batch = batches.get()
        if mode == "none":
            parameters, loss = compiled(parameters, *batch)
        else:
            # Called before the loop goes on.
            call = lambda: compiled(parameters, *batch)  # noqa: B023
            parameters, loss = dispatcher.run(call, token_of=lambda outputs: outputs[1])
        losses.append(loss)
    loader.join()
    first, last = (np.asarray(loss)[0] for loss in (losses[0], losses[-1]))
    print("learned" if last < 0.5 * first else f"did not learn: {first} to {last}")


def _start(mode: str) -> tuple[jax.Device, ...]:
    if mode == "pool":
        return topology.replica_devices([f"CPU:{i}" for i in range(_NUM_REPLICAS)])
    jax.config.update("jax_num_cpu_devices", _NUM_REPLICAS)
    jax.devices()
    with warnings.catch_warnings(record=True, action="always") as caught:
        devices = topology.replica_devices(None)
    print(f"{len(caught)} {caught[0].category.__name__}")
    return devices


def _load(batches: queue.Queue, rows: jax.NamedSharding, random: np.random.Generator) -> None:
    num_rows = _ROWS_PER_REPLICA * _NUM_REPLICAS
    x = random.normal(size=(num_rows, _SIDE, _SIDE, 3)).astype(np.float32)
    y = random.normal(size=(num_rows, _CLASSES)).astype(np.float32)
    for _ in range(_NUM_STEPS):
        batches.put((jax.device_put(x, rows), jax.device_put(y, rows)))


def _replica_step(mesh: jax.sharding.Mesh):
    def loss_of(parameters, x, y):
        features = jax.lax.conv_general_dilated(
            x, parameters["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        features = jax.nn.relu(features).reshape(len(x), -1)
        return jnp.mean((features @ parameters["dense"] - y) ** 2)

    def step(parameters, x, y):
        loss, gradients = jax.value_and_grad(loss_of)(parameters, x, y)
        loss, gradients = jax.lax.pmean((loss, gradients), topology.REPLICA_AXIS)
        parameters = jax.tree.map(lambda p, g: p - 0.01 * g, parameters, gradients)
        return parameters, loss[None]

    replicated, split = jax.P(), jax.P(topology.REPLICA_AXIS)
    return jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(replicated, split, split),
        out_specs=(replicated, split),
        check_vma=False,
    )


if __name__ == "__main__":
    main(sys.argv[1])
