"""A loop of one's own, whose variables are divided over the devices."""

import jax
import jax.numpy as jnp
import numpy as np

import distributary as dist

strategy = dist.MirroredStrategy(experimental_shard_parameters=True)
with strategy.scope():
    weights = [dist.Variable(np.eye(512, dtype=np.float32)) for _ in range(8)]


def loss(values, x):
    for value in values:
        x = jnp.tanh(x @ value)
    return jnp.sum(x**2)


def step(x):
    gradients = jax.grad(loss)([weight.value() for weight in weights], x)
    gradients = dist.get_replica_context().all_reduce("SUM", gradients)
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.assign_sub(0.1 * gradient)


for batch in strategy.experimental_distribute_dataset([np.ones((64, 512), np.float32)]):
    strategy.run(step, args=(batch,))
