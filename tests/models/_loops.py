"""Flax NNX networks and optax optimizers, in custom loops."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _case import ROWS, Loop
from flax import nnx


def _numbers(*shape: int) -> Callable[[np.random.Generator], np.ndarray]:
    return lambda random: random.normal(size=(ROWS, *shape)).astype(np.float32)


def _tokens(random: np.random.Generator) -> np.ndarray:
    return random.integers(0, 16, (ROWS, 8)).astype(np.int32)


def _labels(random: np.random.Generator) -> np.ndarray:
    return random.integers(0, 5, ROWS).astype(np.int32)


def _mlp(rngs: nnx.Rngs) -> Any:
    return nnx.Sequential(
        nnx.Linear(8, 16, rngs=rngs), nnx.relu, nnx.LayerNorm(16, rngs=rngs),
        nnx.Linear(16, 5, rngs=rngs),
    )  # fmt: skip


class _Cnn(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.norm = nnx.GroupNorm(8, num_groups=2, rngs=rngs)
        self.dense = nnx.Linear(8, 5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = nnx.relu(self.norm(self.conv(x)))
        return self.dense(nnx.max_pool(x, (2, 2), (2, 2)).mean((1, 2)))


class _Transformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(16, 16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
        self.norm = nnx.RMSNorm(16, rngs=rngs)
        self.dense = nnx.Linear(16, 5, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        return self.dense(self.norm(x + self.attention(x)).mean(1))


class _Recurrent(nnx.Module):
    def __init__(self, cell: Any, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(16, 8, rngs=rngs)
        self.rnn = nnx.RNN(cell(8, 8, rngs=rngs))
        self.dense = nnx.Linear(8, 5, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        return self.dense(self.rnn(self.embed(tokens))[:, -1])


class _LoRA(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense = nnx.LoRALinear(8, 16, lora_rank=2, rngs=rngs)
        self.logits = nnx.Linear(16, 5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.logits(nnx.gelu(self.dense(x)))


class _AutoEncoder(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.encoder, self.decoder = nnx.Linear(8, 3, rngs=rngs), nnx.Linear(3, 8, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.decoder(nnx.tanh(self.encoder(x)))


def _loop(
    name: str,
    package: str,
    network: Callable[[nnx.Rngs], Any],
    optimizer: Callable[[], Any],
    x: Callable[[np.random.Generator], Any],
    y: Callable[[np.random.Generator], Any] = _labels,
) -> Loop:
    def parts() -> tuple[Any, Any, Any]:
        return nnx.split(network(nnx.Rngs(0)), (nnx.Param, nnx.LoRAParam), ...)

    def initial() -> Any:
        _, parameters, _ = parts()
        return jax.tree.map(np.asarray, nnx.to_pure_dict(parameters))

    def loss(parameters: Any, x: Any, y: Any) -> Any:
        definition, empty, rest = parts()
        nnx.replace_by_pure_dict(empty, parameters)
        out = nnx.merge(definition, empty, rest)(x)
        if y.ndim > 1:
            return jnp.sum(jnp.mean((out - y) ** 2, tuple(range(1, out.ndim))))
        return jnp.sum(optax.softmax_cross_entropy_with_integer_labels(out, y))

    return Loop(name, package, initial, loss, optimizer, x, y)


def cases() -> Iterator[Loop]:
    """Yields the loops."""
    for name, network, x, y in (
        ("MLP", _mlp, _numbers(8), _labels),
        ("CNN", _Cnn, _numbers(8, 8, 3), _labels),
        ("Transformer", _Transformer, _tokens, _labels),
        ("LSTM", lambda rngs: _Recurrent(nnx.LSTMCell, rngs), _tokens, _labels),
        ("GRU", lambda rngs: _Recurrent(nnx.GRUCell, rngs), _tokens, _labels),
        ("LoRA", _LoRA, _numbers(8), _labels),
        ("autoencoder", _AutoEncoder, _numbers(8), _numbers(8)),
    ):
        yield _loop(f"NNX {name}", "flax", network, lambda: optax.sgd(0.05, 0.9), x, y)
    for name, build in {
        "MultiSteps": lambda: optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
        "masked": lambda: optax.chain(
            optax.masked(
                optax.add_decayed_weights(0.01),
                lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree),
            ),
            optax.sgd(0.1, 0.9),
        ),
        "EMA": lambda: optax.chain(optax.ema(0.9), optax.sgd(0.1)),
        "inject_hyperparams": lambda: optax.inject_hyperparams(optax.sgd)(
            optax.linear_schedule(0.1, 0.0, 10), momentum=0.9
        ),
        "adamw, clipped": lambda: optax.chain(
            optax.clip_by_global_norm(0.1), optax.adamw(1e-3, eps=1e-5)
        ),
        "apply_if_finite": lambda: optax.apply_if_finite(optax.sgd(0.1, 0.9), 3),
    }.items():
        yield _loop(f"optax {name}", "optax", _mlp, build, _numbers(8))
