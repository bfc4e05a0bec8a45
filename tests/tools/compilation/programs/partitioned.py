"""Steps on a whole batch, in plain JAX, whose collectives XLA inserts.

Compiles some of them for a topology; prints a line of JSON per step: its name and collectives.
"""

import json
import sys
from dataclasses import asdict

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import with_sharding_constraint as constrain
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from distributary.tools.compilation import collectives_of_step, parse_topology, prepare_compilers

prepare_compilers()
topology = parse_topology(sys.argv[1])
mesh = Mesh(np.array([device for host in topology.hosts for device in host]), ("replica",))
replicated, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("replica"))
ROWS, WIDTH = 16 * mesh.size, 64


def array(*shape, sharding=split):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


def error_of(middle=lambda x: x, first=lambda x: x, of=lambda squares: jnp.mean(squares)):
    def error(weights, batch):
        x = first(batch[0])
        for i, w in enumerate(weights):
            x = jax.nn.relu(x @ w)
            x = middle(x) if i == 0 else x
        return of((x - batch[1]) ** 2)

    return error


def descent(error):
    def step(weights, batch):
        gradients = jax.grad(error)(weights, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)

    return step


def normalized(x):
    return (x - x.mean(0)) / jnp.sqrt(1e-3 + x.var(0))  # statistics of the batch


def norm(arrays):
    return jnp.sqrt(sum(jnp.sum(a * a) for a in arrays))


def clipped(weights, batch):
    gradients = jax.grad(error_of())(weights, batch)
    return [w - g / norm(gradients) for w, g in zip(weights, gradients, strict=True)]


def several_steps(weights, batches):
    step = descent(error_of())
    return jax.lax.scan(lambda w, batch: (step(w, batch), None), weights, batches)[0]


def layers_in_a_loop(weights, batch):
    def error(weights, batch):
        out, _ = jax.lax.scan(lambda x, w: (jax.nn.relu(x @ w), None), batch[0], weights)
        return jnp.mean((out - batch[1]) ** 2)

    return descent(error)(weights, batch)


def sharded_state(state, batch):
    weights, momenta = state
    gradients = [constrain(g, split) for g in jax.grad(error_of())(weights, batch)]
    momenta = [m + g / norm(gradients) for m, g in zip(momenta, gradients, strict=True)]
    return [constrain(w - m, replicated) for w, m in zip(weights, momenta, strict=True)], momenta


def sharded_weights(weights, batch):
    gather = lambda weights: [constrain(w, replicated) for w in weights]
    gradients = jax.grad(lambda w: error_of()(gather(w), batch))(weights)
    return [w - constrain(g, split) for w, g in zip(weights, gradients, strict=True)]


weights = [array(WIDTH, WIDTH, sharding=replicated) for _ in range(3)]
parts = [array(WIDTH, WIDTH) for _ in range(3)]
batch = (array(ROWS, WIDTH), array(ROWS, WIDTH))
order = np.random.default_rng(0).permutation(ROWS)
in_steps = NamedSharding(mesh, P(None, "replica"))
large = [array(1024, 1024, sharding=replicated) for _ in range(12)]
STEPS = {
    "dense": (descent(error_of()), weights, batch),
    "normalized": (descent(error_of(normalized)), weights, batch),
    "shuffled": (descent(error_of(first=lambda x: x[order])), weights, batch),
    "all_shuffled": (
        descent(lambda w, b: error_of()(w, (b[0][order], b[1][order]))),
        weights,
        batch,
    ),
    "reversed": (descent(error_of(lambda x: x + x[::-1])), weights, batch),
    "mixed": (descent(error_of(lambda x: x.reshape(WIDTH, ROWS).T)), weights, batch),
    "related": (descent(error_of(lambda x: jax.nn.softmax(x @ x.T) @ x)), weights, batch),
    "root": (descent(error_of(of=lambda squares: jnp.sqrt(jnp.mean(squares)))), weights, batch),
    "clipped": (clipped, weights, batch),
    "several_steps": (several_steps, weights, (array(4, ROWS, WIDTH, sharding=in_steps),) * 2),
    "layers_in_a_loop": (layers_in_a_loop, array(6, WIDTH, WIDTH, sharding=replicated), batch),
    "sharded_state": (sharded_state, (weights, parts), batch),
    "sharded_weights": (sharded_weights, parts, batch),
    "large": (descent(error_of()), large, (array(ROWS, 1024), array(ROWS, 1024))),
}
for name in sys.argv[2:]:
    step, *args = STEPS[name]
    executable = jax.jit(step, donate_argnums=0).lower(*args).compile()
    print(json.dumps([name, [asdict(c) for c in collectives_of_step(executable)]]))
