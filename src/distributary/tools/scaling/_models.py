"""Models that `distributary bench` measures if you give it no script."""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

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
