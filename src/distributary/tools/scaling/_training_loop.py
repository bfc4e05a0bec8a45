"""The program that `distributary bench` runs without a script: it trains one of the models.

Its arguments are the name of the model and the batch size per replica. It is like a user's program.
The batch is on the devices from the start, so that the measurement includes no input. The loop is
endless: whoever measures it ends it.
"""

import math
import sys
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from distributary.context import get_replica_context
from distributary.gradients import value_and_grad
from distributary.strategies import MirroredStrategy
from distributary.variables import Variable

_WIDTH, _NUM_HEADS, _NUM_LAYERS, _LENGTH, _VOCABULARY_SIZE = 128, 4, 2, 64, 1000


class Model(NamedTuple):
    """A model.

    Args:
        sizes: Shapes of the weights by name.
        scores: Returns the scores of a batch.
        batch: Returns inputs and targets of a number of examples.
    """

    sizes: Mapping[str, tuple[int, ...]]
    scores: Callable[[Mapping[str, Variable], jax.Array], jax.Array]
    batch: Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]


def _mlp(weights: Mapping[str, Variable], images: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(images @ weights["hidden"].value())
    hidden = jax.nn.relu(hidden @ weights["hidden_2"].value())
    return hidden @ weights["output"].value()


def _mlp_batch(rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
    return rng.random((size, 784), np.float32), rng.integers(0, 10, size, np.int32)


def _transformer_sizes() -> dict[str, tuple[int, ...]]:
    sizes = {"tokens": (_VOCABULARY_SIZE, _WIDTH), "positions": (_LENGTH, _WIDTH)}
    for layer in range(_NUM_LAYERS):
        sizes |= {f"{layer}/{name}": (_WIDTH, _WIDTH) for name in ("q", "k", "v", "out")}
        sizes |= {f"{layer}/up": (_WIDTH, 4 * _WIDTH), f"{layer}/down": (4 * _WIDTH, _WIDTH)}
    return {**sizes, "output": (_WIDTH, _VOCABULARY_SIZE)}


def _transformer(weights: Mapping[str, Variable], tokens: jax.Array) -> jax.Array:
    def product(x: jax.Array, name: str) -> jax.Array:
        return x @ weights[name].value()

    x = jnp.take(weights["tokens"].value(), tokens, axis=0) + weights["positions"].value()
    for layer in range(_NUM_LAYERS):
        y = jax.nn.standardize(x)
        q, k, v = (
            product(y, f"{layer}/{name}").reshape(*x.shape[:2], _NUM_HEADS, -1) for name in "qkv"
        )
        attended = jax.nn.dot_product_attention(q, k, v).reshape(x.shape)
        x += product(attended, f"{layer}/out")
        x += product(jax.nn.gelu(product(jax.nn.standardize(x), f"{layer}/up")), f"{layer}/down")
    return product(jax.nn.standardize(x), "output")


def _transformer_batch(rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
    tokens = rng.integers(0, _VOCABULARY_SIZE, (size, _LENGTH), np.int32)
    return tokens, np.roll(tokens, 1, axis=1)


MODELS: Final[Mapping[str, Model]] = {
    "mlp": Model(
        {"hidden": (784, 512), "hidden_2": (512, 512), "output": (512, 10)}, _mlp, _mlp_batch
    ),
    "transformer": Model(_transformer_sizes(), _transformer, _transformer_batch),
}


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
