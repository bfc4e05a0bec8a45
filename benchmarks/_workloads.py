"""What is trained: start parameters, data and settings, as NumPy arrays.

Imports NumPy alone, so the TensorFlow process builds the same numbers without JAX.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = [
    "CHECK_STEPS",
    "FIT_WORKLOADS",
    "NUM_HEADS",
    "NUM_LAYERS",
    "STEP_WORKLOADS",
    "WORKLOADS",
    "Array",
    "Model",
    "Workload",
    "select",
]

Array: TypeAlias = npt.NDArray[Any]
Model: TypeAlias = Literal["mlp", "transformer", "cnn", "wide"]

NUM_BATCHES = 4
"""Batches that are prepared on the devices and used in turn, so no input time is measured."""

CHECK_STEPS = 16
"""Steps of the short epochs of `fit` whose mean losses must agree."""

NUM_LAYERS = 2
NUM_HEADS = 4
_WIDTH = 128
_SEQUENCE_LENGTH = 64
_VOCABULARY_SIZE = 1000

_NUM_TABLE_ROWS = 100_000
_TABLE_WIDTH = 64
_NUM_IDS = 26


@dataclass(frozen=True)
class Workload:
    """One model, batch size and update rule.

    Attributes:
        name: What `--only` and the tables say.
        model: Which loss function of `_losses` or `_tensorflow`.
        global_batch_size: Examples per step over all replicas.
        optimizer: `"adam"` (optax defaults) or `"sgd"` (`p - learning_rate * g`).
        learning_rate: Of either optimizer.
        sparse: Exchange and update only the table rows that a batch touches.
        description: One line for the report.
    """

    name: str
    model: Model
    global_batch_size: int
    optimizer: Literal["adam", "sgd"]
    learning_rate: float
    description: str
    sparse: bool = False

    def parameters(self) -> dict[str, Array]:
        """Start values by name, the same at every call."""
        return _PARAMETERS[self.model](np.random.default_rng(0))

    def batches(self, num_replicas: int) -> list[tuple[Array, Array]]:
        """`NUM_BATCHES` pairs of inputs and targets, each `[replica, example, ...]`.

        The examples are the same for every `num_replicas`; replica 0 holds the first ones.
        """
        if self.global_batch_size % num_replicas:
            raise ValueError(
                f"{self.name}: global batch size {self.global_batch_size} does not divide by"
                f" {num_replicas} replicas."
            )
        per_replica_batch_size = self.global_batch_size // num_replicas
        rng = np.random.default_rng(1)
        pairs = (_DATA[self.model](rng, self.global_batch_size) for _ in range(NUM_BATCHES))
        return [
            (
                inputs.reshape(num_replicas, per_replica_batch_size, *inputs.shape[1:]),
                targets.reshape(num_replicas, per_replica_batch_size, *targets.shape[1:]),
            )
            for inputs, targets in pairs
        ]

    def examples(self, num_steps: int) -> tuple[Array, Array]:
        """Inputs and targets of `num_steps` different batches, `[example, ...]`."""
        return _DATA[self.model](np.random.default_rng(1), num_steps * self.global_batch_size)


def select(only: str | None, among: Sequence[str]) -> list[Workload]:
    """The workloads named in a comma-separated list, or all of those that there are."""
    names = [name.strip() for name in (only or ",".join(among)).split(",") if name.strip()]
    unknown = [name for name in names if name not in among]
    if unknown or not names:
        raise SystemExit(f"--only: unknown workload {unknown}; there are {', '.join(among)}.")
    return [WORKLOADS[name] for name in names]


def _normal(rng: np.random.Generator, *shape: int, scale: float | None = None) -> Array:
    """float32 normal values; the default scale is one over the root of the fan-in."""
    deviation = shape[0] ** -0.5 if scale is None else scale
    return (rng.standard_normal(shape) * deviation).astype(np.float32)


def _zeros(*shape: int) -> Array:
    return np.zeros(shape, np.float32)


def _mlp_parameters(rng: np.random.Generator) -> dict[str, Array]:
    return {
        "hidden_kernel": _normal(rng, 784, 128),
        "hidden_bias": _zeros(128),
        "output_kernel": _normal(rng, 128, 10),
        "output_bias": _zeros(10),
    }


def _mlp_data(rng: np.random.Generator, global_batch_size: int) -> tuple[Array, Array]:
    images = rng.random((global_batch_size, 784)).astype(np.float32)
    teacher = np.random.default_rng(2).standard_normal((784, 10))
    return images, np.argmax((images - 0.5) @ teacher, axis=1).astype(np.int32)


def _transformer_parameters(rng: np.random.Generator) -> dict[str, Array]:
    parameters = {
        "tokens": _normal(rng, _VOCABULARY_SIZE, _WIDTH, scale=0.1),
        "positions": _normal(rng, _SEQUENCE_LENGTH, _WIDTH, scale=0.1),
        "output_kernel": _normal(rng, _WIDTH, _VOCABULARY_SIZE),
        "output_bias": _zeros(_VOCABULARY_SIZE),
        "norm_scale": np.ones(_WIDTH, np.float32),
        "norm_offset": _zeros(_WIDTH),
    }
    for layer in range(NUM_LAYERS):
        for name in ("query", "key", "value", "projection"):
            parameters[f"{layer}/{name}_kernel"] = _normal(rng, _WIDTH, _WIDTH)
            parameters[f"{layer}/{name}_bias"] = _zeros(_WIDTH)
        for name in ("attention", "feedforward"):
            parameters[f"{layer}/{name}_norm_scale"] = np.ones(_WIDTH, np.float32)
            parameters[f"{layer}/{name}_norm_offset"] = _zeros(_WIDTH)
        parameters[f"{layer}/expand_kernel"] = _normal(rng, _WIDTH, 4 * _WIDTH)
        parameters[f"{layer}/expand_bias"] = _zeros(4 * _WIDTH)
        parameters[f"{layer}/contract_kernel"] = _normal(rng, 4 * _WIDTH, _WIDTH)
        parameters[f"{layer}/contract_bias"] = _zeros(_WIDTH)
    return parameters


def _transformer_data(rng: np.random.Generator, global_batch_size: int) -> tuple[Array, Array]:
    tokens = rng.integers(0, _VOCABULARY_SIZE, (global_batch_size, _SEQUENCE_LENGTH))
    targets = (7 * tokens + np.roll(tokens, 1, axis=1)) % _VOCABULARY_SIZE
    return tokens.astype(np.int32), targets.astype(np.int32)


def _cnn_parameters(rng: np.random.Generator) -> dict[str, Array]:
    return {
        "0/kernel": _normal(rng, 3, 3, 1, 32, scale=9**-0.5),
        "0/bias": _zeros(32),
        "1/kernel": _normal(rng, 3, 3, 32, 64, scale=(9 * 32) ** -0.5),
        "1/bias": _zeros(64),
        "hidden_kernel": _normal(rng, 5 * 5 * 64, 64),
        "hidden_bias": _zeros(64),
        "output_kernel": _normal(rng, 64, 10),
        "output_bias": _zeros(10),
    }


def _cnn_data(rng: np.random.Generator, global_batch_size: int) -> tuple[Array, Array]:
    images, labels = _mlp_data(rng, global_batch_size)
    return images.reshape(-1, 28, 28, 1), labels


def _wide_parameters(rng: np.random.Generator) -> dict[str, Array]:
    return {
        "table": _normal(rng, _NUM_TABLE_ROWS, _TABLE_WIDTH, scale=0.1),
        "hidden_kernel": _normal(rng, _NUM_IDS * _TABLE_WIDTH, 128),
        "hidden_bias": _zeros(128),
        "output_kernel": _normal(rng, 128, 1),
        "output_bias": _zeros(1),
    }


def _wide_data(rng: np.random.Generator, global_batch_size: int) -> tuple[Array, Array]:
    # Squaring makes low ids frequent: a batch holds some rows several times, on one replica
    # and on different ones, as real categories do.
    uniform = rng.random((global_batch_size, _NUM_IDS))
    ids = (uniform**2 * _NUM_TABLE_ROWS).astype(np.int32)
    hidden = np.random.default_rng(2).standard_normal(_NUM_TABLE_ROWS)
    return ids, (hidden[ids].sum(axis=1) > 0).astype(np.float32)


_PARAMETERS: Mapping[Model, Callable[[np.random.Generator], dict[str, Array]]] = {
    "mlp": _mlp_parameters,
    "transformer": _transformer_parameters,
    "cnn": _cnn_parameters,
    "wide": _wide_parameters,
}

_DATA: Mapping[Model, Callable[[np.random.Generator, int], tuple[Array, Array]]] = {
    "mlp": _mlp_data,
    "transformer": _transformer_data,
    "cnn": _cnn_data,
    "wide": _wide_data,
}

# Adam divides by the root of the squared gradient, so where a gradient is rounding noise the
# step is noise of the size of the learning rate. At 1e-3 the transformer's losses at 1, 2 and 4
# replicas part by 6e-4 within 20 steps in float32 (by 2e-15 in float64); 1e-4 keeps them close.
WORKLOADS: Mapping[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("mlp32", "mlp", 32, "adam", 1e-3, "784-128-10, batch 32, Adam"),
        Workload("mlp256", "mlp", 256, "adam", 1e-3, "784-128-10, batch 256, Adam"),
        Workload(
            "transformer32",
            "transformer",
            32,
            "adam",
            1e-4,
            "encoder, 2 layers, d 128, 4 heads, sequence 64, vocabulary 1000, batch 32, Adam",
        ),
        Workload(
            "cnn64",
            "cnn",
            64,
            "adam",
            1e-3,
            "28x28x1, convolutions 3x3 of 32 and 64 with pooling, dense 64-10, batch 64, Adam",
        ),
        Workload(
            "wide256",
            "wide",
            256,
            "sgd",
            1.0,
            "100k x 64 table, 26 ids, dense 128-1, batch 256, SGD on the touched rows",
            sparse=True,
        ),
        Workload(
            "wide256_dense",
            "wide",
            256,
            "sgd",
            1.0,
            "100k x 64 table, 26 ids, dense 128-1, batch 256, SGD on the whole table",
        ),
    )
}

STEP_WORKLOADS = ("mlp32", "mlp256", "transformer32", "wide256", "wide256_dense")
"""What is measured of steps of `strategy.run`."""

FIT_WORKLOADS = ("mlp32", "mlp256", "transformer32", "cnn64")
"""What is measured of `model.fit`."""
