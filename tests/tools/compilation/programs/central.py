"""Compiles a step of `CentralStorageStrategy` with its state in host memory for a topology.

Prints the memory of both of its stages as JSON.
"""

import json
import sys

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

from distributary.devices import REPLICA_AXIS
from distributary.engine import Placement
from distributary.engine._staged import Place, Staged
from distributary.tools.compilation import parse_topology, prepare_compilers

NUM_LAYERS, WIDTH = 16, 8192

prepare_compilers()
(devices,) = parse_topology(sys.argv[1]).hosts
placement = Placement.around_home(devices, devices[0], in_host_memory=True)
mesh, home, storage, rows = placement.mesh, placement.home, placement.storage, placement.stacked


def gradients_of(weights, x):
    def loss(weights):
        y = x
        for w in weights:
            y = jnp.tanh(y @ w)
        return jnp.mean(y)

    return jax.lax.psum(jax.grad(loss)(weights), REPLICA_AXIS)


def step(count, weights, momenta, velocities, x):
    specs = (P(), P(REPLICA_AXIS))
    on_mesh = jax.shard_map(gradients_of, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    gradients = on_mesh(weights, x)
    # As optimizers do that update all slots before all weights.
    momenta = [0.9 * m + 0.1 * g for m, g in zip(momenta, gradients, strict=True)]
    velocities = [0.99 * v + 0.01 * g * g for v, g in zip(velocities, gradients, strict=True)]
    updates = [m / (jnp.sqrt(v) + 1e-7) for m, v in zip(momenta, velocities, strict=True)]
    rate = 0.001 * 0.9**count
    weights = [w - rate * u for w, u in zip(weights, updates, strict=True)]
    return count + 1, weights, momenta, velocities


def aval(sharding, rows=WIDTH):
    return jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32, sharding=sharding)


def count_aval(sharding):
    return jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding)


weights = [aval(None)] * NUM_LAYERS
closed = jax.make_jaxpr(step)(count_aval(None), weights, weights, weights, aval(None, 64))
num_state = 1 + 3 * NUM_LAYERS
inputs = [*[Place(storage)] * num_state, Place(rows, is_data=True)]
outputs = [Place(storage, replaces=i) for i in range(num_state)]
staged = Staged(closed, inputs, outputs, placement)

on_replicas = [*[aval(NamedSharding(mesh, P()))] * NUM_LAYERS, aval(rows, 64)]
state = [count_aval(storage), *[aval(storage)] * 3 * NUM_LAYERS]
at_home = [*state, *[aval(home)] * NUM_LAYERS]
compiled = [staged._first.lower(*on_replicas).compile(), staged._second.lower(*at_home).compile()]
names = ["argument", "output", "alias", "temp"]
names = [f"{name}_size_in_bytes" for name in [*names, *(f"host_{name}" for name in names)]]
for executable in compiled:
    memory = executable.memory_analysis()
    print(json.dumps({n.removesuffix("_size_in_bytes"): getattr(memory, n) for n in names}))
