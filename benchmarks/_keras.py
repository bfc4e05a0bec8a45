"""The same training with Keras' `fit`, on the backend of the process."""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import keras
import numpy as np
from _peers import Peer, timed
from _workloads import CHECK_STEPS, NUM_HEADS, NUM_LAYERS, WORKLOADS, Model, Workload

__all__ = ["build_model", "first_step", "fit"]

KerasModel: TypeAlias = Any
Layers: TypeAlias = Mapping[str, tuple[str, ...]]
"""Names of a layer's parameters, in the order of its weights."""


def build_model(
    workload: Workload,
    scope: AbstractContextManager[object] | None = None,
    steps_per_execution: int = 1,
) -> KerasModel:
    """Returns the compiled model with the workload's parameters, in the scope of a strategy."""
    optimizer = {"adam": keras.optimizers.Adam, "sgd": keras.optimizers.SGD}[workload.optimizer]
    is_binary = workload.model == "wide"
    losses = keras.losses
    loss = losses.BinaryCrossentropy if is_binary else losses.SparseCategoricalCrossentropy
    with scope or nullcontext():
        model, layers = _MODELS[workload.model]()
        model.compile(
            optimizer=optimizer(workload.learning_rate),
            loss=loss(from_logits=True),
            steps_per_execution=steps_per_execution,
        )
        parameters = workload.parameters()
        for name, parts in layers.items():
            layer = model.get_layer(name)
            shapes = [weight.shape for weight in layer.weights]
            values = zip(parts, shapes, strict=True)
            layer.set_weights([parameters.pop(part).reshape(shape) for part, shape in values])
        assert not parameters, f"no layer has {list(parameters)}"
        if not layers:
            _draw_kernels(model)
    return model


def _draw_kernels(model: KerasModel) -> None:
    """Gives kernels the same values on every backend."""
    rng = np.random.default_rng(0)
    for weight in model.trainable_weights:
        if weight.name == "kernel":
            deviation = math.prod(weight.shape[:-1]) ** -0.5
            weight.assign((rng.standard_normal(weight.shape) * deviation).astype(np.float32))


def fit(name: str, model: KerasModel, workload: Workload, num_steps: int) -> Peer:
    """Returns a peer whose blocks are calls of `model.fit` with one epoch each.

    Args:
        name: What the report calls it.
        model: Compiled.
        workload: What it trains on.
        num_steps: Longest epoch.
    """
    x, y = workload.examples(max(num_steps, CHECK_STEPS))
    batch_size = workload.global_batch_size

    def epoch(count: int, shuffle: bool = True) -> float:
        rows = slice(count * batch_size)
        history = model.fit(x[rows], y[rows], batch_size=batch_size, shuffle=shuffle, verbose=0)
        return history.history["loss"][-1]

    def check(num_epochs: int) -> list[float]:
        return [epoch(CHECK_STEPS, shuffle=False) for _ in range(num_epochs)]

    return timed(name, epoch, losses=check)


def first_step(name: str, model: KerasModel, workload: Workload) -> Peer:
    """Returns a peer that measures once: from the call of `fit` to the loss of its first step."""
    x, y = workload.examples(4)

    def time_block(num_steps: int) -> float:
        ended: list[float] = []

        class FirstStep(keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                float(logs["loss"])
                ended.append(time.perf_counter())
                self.model.stop_training = True

        start = time.perf_counter()
        callbacks = [FirstStep()]
        model.fit(x, y, batch_size=workload.global_batch_size, verbose=0, callbacks=callbacks)
        return ended[0] - start

    return Peer(name, time_block)


def _mlp() -> tuple[KerasModel, Layers]:
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((784,)),
            layers.Dense(128, activation="relu", name="hidden"),
            layers.Dense(10, name="output"),
        ]
    )
    return model, {name: _dense(name) for name in ("hidden", "output")}


def _cnn() -> tuple[KerasModel, Layers]:
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu", name="convolution_0"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, activation="relu", name="convolution_1"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu", name="hidden"),
            layers.Dense(10, name="output"),
        ]
    )
    return model, {
        "convolution_0": ("0/kernel", "0/bias"),
        "convolution_1": ("1/kernel", "1/bias"),
        "hidden": _dense("hidden"),
        "output": _dense("output"),
    }


def _resnet() -> tuple[KerasModel, Layers]:
    """ResNet-18 for images of 32x32, as the paper has it for CIFAR-10 in width 64."""
    layers = keras.layers

    def convolved(x: Any, filters: int, size: int, strides: int) -> Any:
        x = layers.Conv2D(filters, size, strides, padding="same", use_bias=False)(x)
        return layers.BatchNormalization()(x)

    images = layers.Input((32, 32, 3))
    x = layers.ReLU()(convolved(images, 64, 3, 1))
    for filters in (64, 128, 256, 512):
        for strides in (1 if filters == 64 else 2, 1):
            y = layers.ReLU()(convolved(x, filters, 3, strides))
            y = convolved(y, filters, 3, 1)
            if strides > 1:
                x = convolved(x, filters, 1, strides)
            x = layers.ReLU()(x + y)
    logits = layers.Dense(10)(layers.GlobalAveragePooling2D()(x))
    return keras.Model(images, logits), {}


class _Positions(keras.layers.Layer):
    """Adds a learned vector to every position."""

    def build(self, input_shape: tuple[int, ...]) -> None:
        self.vectors = self.add_weight(shape=input_shape[1:], name="vectors")

    def call(self, inputs: Any) -> Any:
        return inputs + self.vectors


def _transformer() -> tuple[KerasModel, Layers]:
    layers = keras.layers
    shapes = {name: value.shape for name, value in WORKLOADS["transformer32"].parameters().items()}
    vocabulary_size, width = shapes["tokens"]
    length, _ = shapes["positions"]
    names: dict[str, tuple[str, ...]] = {"tokens": ("tokens",), "positions": ("positions",)}

    def norm(x: Any, prefix: str) -> Any:
        name = f"{prefix}norm".replace("/", "_")
        names[name] = (f"{prefix}norm_scale", f"{prefix}norm_offset")
        return layers.LayerNormalization(epsilon=1e-5, name=name)(x)

    tokens = layers.Input((length,), dtype="int32")
    x = layers.Embedding(vocabulary_size, width, name="tokens")(tokens)
    x = _Positions(name="positions")(x)
    for layer in range(NUM_LAYERS):
        normed = norm(x, f"{layer}/attention_")
        attention = layers.MultiHeadAttention(
            NUM_HEADS, width // NUM_HEADS, name=f"{layer}_attention"
        )
        names[attention.name] = sum(
            (_dense(f"{layer}/{name}") for name in ("query", "key", "value", "projection")), ()
        )
        x = x + attention(normed, normed)
        hidden = norm(x, f"{layer}/feedforward_")
        for name, activation in (("expand", "relu"), ("contract", None)):
            units = shapes[f"{layer}/{name}_bias"][0]
            names[f"{layer}_{name}"] = _dense(f"{layer}/{name}")
            hidden = layers.Dense(units, activation=activation, name=f"{layer}_{name}")(hidden)
        x = x + hidden
    names["output"] = _dense("output")
    logits = layers.Dense(vocabulary_size, name="output")(norm(x, ""))
    model = keras.Model(tokens, logits)
    # Keras' order is query, key, value; told by name, as it is not promised.
    for layer in range(NUM_LAYERS):
        attention = model.get_layer(f"{layer}_attention")
        paths = [weight.path.split("/")[-2] for weight in attention.weights]
        parts = ("query", "key", "value", "attention_output")
        assert paths == [name for name in parts for _ in range(2)], paths
    return model, names


def _wide() -> tuple[KerasModel, Layers]:
    layers = keras.layers
    shapes = {name: value.shape for name, value in WORKLOADS["wide256"].parameters().items()}
    num_rows, width = shapes["table"]
    num_inputs, num_hidden = shapes["hidden_kernel"]
    model = keras.Sequential(
        [
            layers.Input((num_inputs // width,), dtype="int32"),
            layers.Embedding(num_rows, width, name="table"),
            layers.Flatten(),
            layers.Dense(num_hidden, activation="relu", name="hidden"),
            layers.Dense(1, name="output"),
        ]
    )
    return model, {"table": ("table",), "hidden": _dense("hidden"), "output": _dense("output")}


def _dense(name: str) -> tuple[str, ...]:
    return (f"{name}_kernel", f"{name}_bias")


_MODELS: Mapping[Model, Callable[[], tuple[KerasModel, Layers]]] = {
    "mlp": _mlp,
    "transformer": _transformer,
    "cnn": _cnn,
    "resnet": _resnet,
    "wide": _wide,
}
