"""What is trained: start parameters, data and settings, as NumPy arrays.

Imports NumPy alone, so the TensorFlow process builds the same numbers without JAX.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = [
    "CHECK_STEPS",
    "FIT_WORKLOADS",
    "NUM_HEADS",
    "NUM_LAYERS",
    "ROW_BATCH",
    "STEP_WORKLOADS",
    "WORKLOADS",
    "Array",
    "Model",
    "Workload",
    "random_rows",
]

Array: TypeAlias = npt.NDArray[Any]
Model: TypeAlias = Literal["mlp", "transformer", "cnn", "resnet", "wide", "deep"]

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
_NUM_DEEP_LAYERS = 16


@dataclass(frozen=True)
class Workload:
    """One model, batch size and update rule; the README describes them.

    Attributes:
        name: What `--only` and the tables say.
        model: Which loss function of `_losses` or `_tensorflow`.
        global_batch_size: Examples per step over all replicas.
        optimizer: `"adam"` (optax defaults), `"sgd"` (`p - learning_rate * g`) or, of parameter
            servers alone, `"adagrad"`.
        learning_rate: Of the optimizer.
        sparse: Exchange and update only the table rows that a batch touches.
    """

    name: str
    model: Model
    global_batch_size: int
    optimizer: Literal["adam", "sgd", "adagrad"]
    learning_rate: float
    sparse: bool = False

    def parameters(self) -> dict[str, Array]:
        """Start values by name, the same at every call."""
        rng = np.random.default_rng(0)
        shapes = _SHAPES[self.model]
        return {name: _start_value(rng, name, shape) for name, shape in shapes.items()}

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


_Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


def _dense(name: str, num_inputs: int, num_outputs: int) -> _Shapes:
    return {f"{name}_kernel": (num_inputs, num_outputs), f"{name}_bias": (num_outputs,)}


def _norm(prefix: str) -> _Shapes:
    return {f"{prefix}norm_scale": (_WIDTH,), f"{prefix}norm_offset": (_WIDTH,)}


def _transformer_layer(layer: int) -> _Shapes:
    shapes: dict[str, tuple[int, ...]] = {}
    for name in ("query", "key", "value", "projection"):
        shapes |= _dense(f"{layer}/{name}", _WIDTH, _WIDTH)
    for name in ("attention", "feedforward"):
        shapes |= _norm(f"{layer}/{name}_")
    return {
        **shapes,
        **_dense(f"{layer}/expand", _WIDTH, 4 * _WIDTH),
        **_dense(f"{layer}/contract", 4 * _WIDTH, _WIDTH),
    }


_SHAPES: Mapping[Model, _Shapes] = {
    "mlp": {**_dense("hidden", 784, 128), **_dense("output", 128, 10)},
    "transformer": {
        "tokens": (_VOCABULARY_SIZE, _WIDTH),
        "positions": (_SEQUENCE_LENGTH, _WIDTH),
        **_dense("output", _WIDTH, _VOCABULARY_SIZE),
        **_norm(""),
        **{
            name: shape
            for layer in range(NUM_LAYERS)
            for name, shape in _transformer_layer(layer).items()
        },
    },
    "cnn": {
        "0/kernel": (3, 3, 1, 32),
        "0/bias": (32,),
        "1/kernel": (3, 3, 32, 64),
        "1/bias": (64,),
        **_dense("hidden", 5 * 5 * 64, 64),
        **_dense("output", 64, 10),
    },
    "resnet": {},  # Keras alone builds it; `_keras` gives its kernels start values
    "deep": {
        name: shape
        for layer in range(_NUM_DEEP_LAYERS)
        for name, shape in _dense(f"{layer}", 1024, 1024).items()
    },
    "wide": {
        "table": (_NUM_TABLE_ROWS, _TABLE_WIDTH),
        **_dense("hidden", _NUM_IDS * _TABLE_WIDTH, 128),
        **_dense("output", 128, 1),
    },
}


def _start_value(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> Array:
    """Returns zeros, ones, or normal values; of a kernel, over the root of the fan-in."""
    if name.endswith(("bias", "offset")):
        return np.zeros(shape, np.float32)
    if name.endswith("scale"):
        return np.ones(shape, np.float32)
    deviation = math.prod(shape[:-1]) ** -0.5 if name.endswith("kernel") else 0.1
    return (rng.standard_normal(shape) * deviation).astype(np.float32)


def _mlp_data(rng: np.random.Generator, global_batch_size: int) -> tuple[Array, Array]:
    images = rng.random((global_batch_size, 784)).astype(np.float32)
    teacher = np.random.default_rng(2).standard_normal((784, 10))
    return images, np.argmax((images - 0.5) @ teacher, axis=1).astype(np.int32)


def _transformer_data(rng: np.random.Generator, global_batch_size: int) -> tuple[Array, Array]:
    tokens = rng.integers(0, _VOCABULARY_SIZE, (global_batch_size, _SEQUENCE_LENGTH))
    targets = (7 * tokens + np.roll(tokens, 1, axis=1)) % _VOCABULARY_SIZE
    return tokens.astype(np.int32), targets.astype(np.int32)


def _cnn_data(rng: np.random.Generator, global_batch_size: int) -> tuple[Array, Array]:
    images, labels = _mlp_data(rng, global_batch_size)
    return images.reshape(-1, 28, 28, 1), labels


def _resnet_data(rng: np.random.Generator, global_batch_size: int) -> tuple[Array, Array]:
    images = rng.standard_normal((global_batch_size, 32, 32, 3), np.float32)
    teacher = np.random.default_rng(2).standard_normal((32 * 32 * 3, 10))
    return images, np.argmax(images.reshape(global_batch_size, -1) @ teacher, 1).astype(np.int32)


def _wide_data(rng: np.random.Generator, global_batch_size: int) -> tuple[Array, Array]:
    # Squaring makes low ids frequent: a batch holds some rows several times, on one replica
    # and on different ones, as real categories do.
    uniform = rng.random((global_batch_size, _NUM_IDS))
    ids = (uniform**2 * _NUM_TABLE_ROWS).astype(np.int32)
    hidden = np.random.default_rng(2).standard_normal(_NUM_TABLE_ROWS)
    return ids, (hidden[ids].sum(axis=1) > 0).astype(np.float32)


def _deep_data(rng: np.random.Generator, global_batch_size: int) -> tuple[Array, Array]:
    inputs = rng.standard_normal((global_batch_size, 1024), np.float32)
    return inputs, inputs[:, ::-1]


_DATA: Mapping[Model, Callable[[np.random.Generator, int], tuple[Array, Array]]] = {
    "mlp": _mlp_data,
    "transformer": _transformer_data,
    "cnn": _cnn_data,
    "resnet": _resnet_data,
    "wide": _wide_data,
    "deep": _deep_data,
}

# Adam divides by the root of the squared gradient, so where a gradient is rounding noise the
# step is noise of the size of the learning rate. At 1e-3 the transformer's losses at 1, 2 and 4
# replicas part by 6e-4 within 20 steps in float32 (by 2e-15 in float64); 1e-4 keeps them close.
WORKLOADS: Mapping[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("mlp32", "mlp", 32, "adam", 1e-3),
        Workload("mlp256", "mlp", 256, "adam", 1e-3),
        Workload("transformer32", "transformer", 32, "adam", 1e-4),
        Workload("cnn64", "cnn", 64, "adam", 1e-3),
        Workload("resnet18", "resnet", 32, "sgd", 1e-3),
        Workload("wide256", "wide", 256, "sgd", 1.0, sparse=True),
        Workload("wide256_dense", "wide", 256, "sgd", 1.0),
        Workload("wide256_adam", "wide", 256, "adam", 1e-3),
        Workload("deep256", "deep", 256, "sgd", 1.0),
        Workload("embedding256", "wide", 256, "adagrad", 0.01),
    )
}

ROW_BATCH = 128
"""Rows of a batch, where reading is measured and nothing is trained."""


def random_rows() -> Array:
    """Returns the rows that are read, float32 `[60_000, 784]`."""
    return np.random.default_rng(0).random((60_000, 784), np.float32)


STEP_WORKLOADS = ("mlp32", "mlp256", "transformer32", "wide256", "wide256_dense")
"""What is measured of steps of `strategy.run`."""

FIT_WORKLOADS = (
    *("mlp32", "mlp256", "transformer32", "cnn64", "resnet18"),
    *("wide256_dense", "wide256_adam"),
)
"""What is measured of `model.fit`."""
