"""The program that `distributary bench` runs without a script: it trains one of the models.

It is like a user's program. The batch is on the devices from the start, so that the measurement
includes no input. The loop is endless: whoever measures it ends it.
"""

import argparse
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distributary.context import get_replica_context
from distributary.gradients import value_and_grad
from distributary.scaling._models import MODELS
from distributary.strategies import MirroredStrategy
from distributary.variables import Variable

_LEARNING_RATE = 0.01


def _train() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("batch_per_replica", type=int)
    namespace = parser.parse_args()
    sizes, scores_of, make_batch = MODELS[namespace.model]
    strategy = MirroredStrategy()
    rng = np.random.default_rng(0)
    with strategy.scope():
        weights = {
            name: Variable(rng.normal(0, shape[0] ** -0.5, shape).astype(np.float32))
            for name, shape in sizes().items()
        }
    batch_size = namespace.batch_per_replica * strategy.num_replicas_in_sync

    def summed_loss(inputs: Any, targets: Any) -> Any:
        scores = jax.nn.log_softmax(scores_of(weights, inputs))
        of_targets = jnp.take_along_axis(scores, targets[..., None], axis=-1)
        return -of_targets.sum() / math.prod(targets.shape[1:])

    def step(inputs: Any, targets: Any) -> Any:
        context = get_replica_context()
        assert context is not None
        loss, gradients = value_and_grad(summed_loss, weights)(inputs, targets)
        loss, gradients = context.all_reduce("SUM", (loss, gradients))
        for name, variable in weights.items():
            variable.assign_sub(_LEARNING_RATE / batch_size * gradients[name])
        return loss / batch_size

    batch = strategy.experimental_distribute_values_from_function(
        lambda context: make_batch(rng, namespace.batch_per_replica)
    )
    while True:
        strategy.run(step, args=batch)


if __name__ == "__main__":
    _train()
