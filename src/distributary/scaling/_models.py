"""Models that `distributary bench` measures if you give it no script."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["MODELS"]

_WIDTH, _NUM_HEADS, _NUM_LAYERS, _LENGTH, _VOCABULARY_SIZE = 128, 4, 2, 64, 1000


def _mlp_sizes() -> dict[str, tuple[int, ...]]:
    return {"hidden": (784, 512), "hidden_2": (512, 512), "output": (512, 10)}


def _mlp(weights: Mapping[str, Any], images: Any) -> Any:
    hidden = jax.nn.relu(images @ weights["hidden"].value())
    hidden = jax.nn.relu(hidden @ weights["hidden_2"].value())
    return hidden @ weights["output"].value()


def _mlp_batch(rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
    return rng.random((size, 784), np.float32), rng.integers(0, 10, size, np.int32)


def _transformer_sizes() -> dict[str, tuple[int, ...]]:
    layers: dict[str, tuple[int, ...]] = {}
    for layer in range(_NUM_LAYERS):
        layers |= {f"{layer}/{name}": (_WIDTH, _WIDTH) for name in ("q", "k", "v", "out")}
        layers |= {f"{layer}/up": (_WIDTH, 4 * _WIDTH), f"{layer}/down": (4 * _WIDTH, _WIDTH)}
    return {
        "tokens": (_VOCABULARY_SIZE, _WIDTH),
        "positions": (_LENGTH, _WIDTH),
        **layers,
        "output": (_WIDTH, _VOCABULARY_SIZE),
    }


def _transformer(weights: Mapping[str, Any], tokens: Any) -> Any:
    def product(x: Any, name: str) -> Any:
        return x @ weights[name].value()

    def heads(x: Any) -> Any:
        return x.reshape(*x.shape[:2], _NUM_HEADS, -1)

    x = jnp.take(weights["tokens"].value(), tokens, axis=0) + weights["positions"].value()
    for layer in range(_NUM_LAYERS):
        y = _normalized(x)
        q, k, v = (heads(product(y, f"{layer}/{name}")) for name in "qkv")
        attended = jax.nn.dot_product_attention(q, k, v).reshape(x.shape)
        x += product(attended, f"{layer}/out")
        x += product(jax.nn.gelu(product(_normalized(x), f"{layer}/up")), f"{layer}/down")
    return product(_normalized(x), "output")


def _normalized(x: Any) -> Any:
    return jax.nn.standardize(x, axis=-1)


def _transformer_batch(rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
    tokens = rng.integers(0, _VOCABULARY_SIZE, (size, _LENGTH), np.int32)
    return tokens, np.roll(tokens, 1, axis=1)


MODELS: Final[Mapping[str, tuple[Callable[..., Any], ...]]] = {
    "mlp": (_mlp_sizes, _mlp, _mlp_batch),
    "transformer": (_transformer_sizes, _transformer, _transformer_batch),
}
"""Shapes of the weights, scores of a batch, and a batch, by the name of the model."""
