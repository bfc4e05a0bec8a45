"""The program that `distributary bench` runs without a script: it trains one of the models.

Its arguments are the name of the model and the batch size per replica. It is like a user's program.
The batch is on the devices from the start, so that the measurement includes no input. The loop is
endless: whoever measures it ends it.
"""

import math
import sys

import jax
import jax.numpy as jnp
import numpy as np

from distributary.context import get_replica_context
from distributary.gradients import value_and_grad
from distributary.strategies import MirroredStrategy
from distributary.tools.scaling._models import MODELS
from distributary.variables import Variable

_LEARNING_RATE = 0.01


def _train(model_name: str, batch_per_replica: int) -> None:
    model = MODELS[model_name]
    strategy = MirroredStrategy()
    rng = np.random.default_rng(0)
    with strategy.scope():
        weights = {
            name: Variable(rng.normal(0, shape[0] ** -0.5, shape).astype(np.float32))
            for name, shape in model.sizes.items()
        }
    batch_size = batch_per_replica * strategy.num_replicas_in_sync

    def summed_loss(inputs: jax.Array, targets: jax.Array) -> jax.Array:
        scores = jax.nn.log_softmax(model.scores(weights, inputs))
        of_targets = jnp.take_along_axis(scores, targets[..., None], axis=-1)
        return -of_targets.sum() / math.prod(targets.shape[1:])

    def step(inputs: jax.Array, targets: jax.Array) -> jax.Array:
        context = get_replica_context()
        assert context is not None
        loss, gradients = value_and_grad(summed_loss, weights)(inputs, targets)
        loss, gradients = context.all_reduce("SUM", (loss, gradients))
        for name, variable in weights.items():
            variable.assign_sub(_LEARNING_RATE / batch_size * gradients[name])
        return loss / batch_size

    batch = strategy.experimental_distribute_values_from_function(
        lambda context: model.batch(rng, batch_per_replica)
    )
    while True:
        strategy.run(step, args=batch)


if __name__ == "__main__":
    _train(sys.argv[1], int(sys.argv[2]))
