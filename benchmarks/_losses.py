"""Loss functions in JAX, used unchanged by the hand-written and the distributary steps.

Each takes parameters by name, inputs `[example, ...]` and targets, and returns the **sum** of
the examples' losses; the step divides by the global batch size.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from _workloads import NUM_HEADS, NUM_LAYERS, Model

__all__ = ["LOSSES", "wide_loss_of_rows"]


def _cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Loss `[...]` of logits `[..., class]` and integer targets `[...]`."""
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


def _mlp_loss(parameters: Mapping[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    p = parameters
    hidden = jax.nn.relu(x @ p["hidden_kernel"] + p["hidden_bias"])
    return _cross_entropy(hidden @ p["output_kernel"] + p["output_bias"], y).sum()


def _normalize(x: jax.Array, scale: jax.Array, offset: jax.Array) -> jax.Array:
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = (centred**2).mean(axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + 1e-5) * scale + offset


def _transformer_loss(
    parameters: Mapping[str, jax.Array], tokens: jax.Array, targets: jax.Array
) -> jax.Array:
    p = parameters
    x = p["tokens"][tokens] + p["positions"]  # [example, position, feature]
    num_examples, length, width = x.shape
    for layer in range(NUM_LAYERS):

        def dense(x: jax.Array, name: str, layer: int = layer) -> jax.Array:
            return x @ p[f"{layer}/{name}_kernel"] + p[f"{layer}/{name}_bias"]

        def norm(x: jax.Array, name: str, layer: int = layer) -> jax.Array:
            return _normalize(x, p[f"{layer}/{name}_norm_scale"], p[f"{layer}/{name}_norm_offset"])

        normed = norm(x, "attention")
        query, key, value = (
            dense(normed, name).reshape(num_examples, length, NUM_HEADS, -1)
            for name in ("query", "key", "value")
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * (width // NUM_HEADS) ** -0.5
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)
        x = x + dense(mixed.reshape(num_examples, length, width), "projection")
        x = x + dense(jax.nn.relu(dense(norm(x, "feedforward"), "expand")), "contract")
    logits = _normalize(x, p["norm_scale"], p["norm_offset"]) @ p["output_kernel"]
    return _cross_entropy(logits + p["output_bias"], targets).mean(axis=1).sum()


def _cnn_loss(parameters: Mapping[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    p = parameters
    for layer in range(2):
        x = jax.lax.conv_general_dilated(
            x, p[f"{layer}/kernel"], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x + p[f"{layer}/bias"])
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return _mlp_loss(p, x.reshape(x.shape[0], -1), y)


def wide_loss_of_rows(
    rows: jax.Array, parameters: Mapping[str, jax.Array], y: jax.Array
) -> jax.Array:
    """Loss of table rows `[example, id, feature]` that were looked up before."""
    p = parameters
    features = rows.reshape(rows.shape[0], -1)
    hidden = jax.nn.relu(features @ p["hidden_kernel"] + p["hidden_bias"])
    logits = (hidden @ p["output_kernel"] + p["output_bias"])[:, 0]
    return (jax.nn.softplus(logits) - y * logits).sum()


def _wide_loss(parameters: Mapping[str, jax.Array], ids: jax.Array, y: jax.Array) -> jax.Array:
    return wide_loss_of_rows(parameters["table"][ids], parameters, y)


def _deep_loss(parameters: Mapping[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    p = parameters
    for layer in range(len(p) // 2):
        x = jnp.tanh(x @ p[f"{layer}_kernel"] + p[f"{layer}_bias"])
    return ((x - y) ** 2).mean(axis=1).sum()


LOSSES: Mapping[Model, Callable[[Mapping[str, jax.Array], jax.Array, jax.Array], jax.Array]] = {
    "mlp": _mlp_loss,
    "transformer": _transformer_loss,
    "cnn": _cnn_loss,
    "wide": _wide_loss,
    "deep": _deep_loss,
}
