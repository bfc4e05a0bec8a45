"""A small transformer in plain JAX, trained with momentum in a `dist.function`."""

import jax
import jax.numpy as jnp
import numpy as np

import distributary as dist
from distributary.tools.scaling import MODELS

rng = np.random.default_rng(0)
strategy = dist.MultiWorkerMirroredStrategy()
sizes, scores_of, make_batch = MODELS["transformer"]
with strategy.scope():
    weights = {name: dist.Variable(rng.normal(0, 0.02, sizes[name])) for name in sizes}
    momenta = [dist.Variable(np.zeros(sizes[name]), trainable=False) for name in sizes]


def step(inputs, targets):
    with dist.GradientTape() as tape:
        chances = jax.nn.log_softmax(scores_of(weights, inputs))
        loss = -jnp.mean(jnp.take_along_axis(chances, targets[..., None], -1))
    variables = list(weights.values())
    context = dist.get_replica_context()
    gradients = context.all_reduce("mean", tape.gradient(loss, variables))
    for variable, momentum, gradient in zip(variables, momenta, gradients, strict=True):
        momentum.assign(0.9 * momentum + gradient)
        variable.assign_sub(0.1 * momentum)
    return loss


@dist.function
def train(batch):
    return strategy.reduce("mean", strategy.run(step, args=batch), axis=None)


for batch in strategy.experimental_distribute_dataset([make_batch(rng, 64)]):
    train(batch)
