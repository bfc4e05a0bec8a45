"""The same training with Keras' `fit`, under one of several ways to use devices.

    distributary   dist.MirroredStrategy
    sharded        the same with experimental_shard_optimizer_state
    multi_worker   dist.MultiWorkerMirroredStrategy, of which this is a worker
    keras          none: Keras as it is
    data_parallel  keras.distribution.DataParallel
    tensorflow     tf.distribute.MirroredStrategy; needs KERAS_BACKEND=tensorflow

Each way belongs to the whole process. Run as a script it answers `_served.ServedPeer`.
"""

import argparse
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias, final

import keras
import numpy as np
from _served import serve
from _workloads import (
    CHECK_STEPS,
    FIT_WORKLOADS,
    NUM_HEADS,
    NUM_LAYERS,
    WORKLOADS,
    Model,
    Workload,
)

__all__ = ["WAYS", "KerasFit", "build_model"]

KerasModel: TypeAlias = Any
Layers: TypeAlias = Mapping[str, tuple[str, ...]]
"""Names of a layer's parameters, in the order of its weights."""


def build_model(
    way: str, workload: Workload, num_replicas: int, steps_per_execution: int = 1
) -> KerasModel:
    """The compiled model with the workload's parameters; at most one per process and way."""
    assert workload.optimizer == "adam"
    with WAYS[way](num_replicas):
        model, layers = _MODELS[workload.model]()
        model.compile(
            optimizer=keras.optimizers.Adam(workload.learning_rate),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            steps_per_execution=steps_per_execution,
        )
        parameters = workload.parameters()
        for name, parts in layers.items():
            layer = model.get_layer(name)
            shapes = [weight.shape for weight in layer.weights]
            layer.set_weights(
                [
                    parameters.pop(part).reshape(shape)
                    for part, shape in zip(parts, shapes, strict=True)
                ]
            )
        assert not parameters, f"no layer has {list(parameters)}"
    return model


@final
class KerasFit:
    """A `Peer` whose blocks are calls of `model.fit` with one epoch each.

    Args:
        name: What the report calls it.
        model: Compiled.
        workload: What it trains on.
        max_steps: Longest epoch.
    """

    def __init__(self, name: str, model: KerasModel, workload: Workload, max_steps: int) -> None:
        self.name = name
        self._model = model
        self._batch_size = workload.global_batch_size
        self._x, self._y = workload.examples(max_steps)

    def losses(self, num_steps: int) -> list[float]:
        """The mean losses of `num_steps` short epochs, unshuffled."""
        return [self._fit(CHECK_STEPS, shuffle=False) for _ in range(num_steps)]

    def time_block(self, num_steps: int) -> float:
        """Trains one epoch of `num_steps` steps and returns the seconds per step."""
        start = time.perf_counter()
        self._fit(num_steps, shuffle=True)
        return (time.perf_counter() - start) / num_steps

    def close(self) -> None:
        """Nothing to do."""

    def _fit(self, num_steps: int, *, shuffle: bool) -> float:
        num_examples = num_steps * self._batch_size
        history = self._model.fit(
            self._x[:num_examples],
            self._y[:num_examples],
            batch_size=self._batch_size,
            shuffle=shuffle,
            verbose=0,
        )
        return history.history["loss"][-1]


def _distributary_scope(num_replicas: int) -> AbstractContextManager[Any]:
    import jax

    import distributary as dist

    return dist.MirroredStrategy(jax.devices()[:num_replicas]).scope()


def _sharded_scope(num_replicas: int) -> AbstractContextManager[Any]:
    import distributary as dist

    return dist.MirroredStrategy(
        [f"CPU:{i}" for i in range(num_replicas)], experimental_shard_optimizer_state=True
    ).scope()


def _multi_worker_scope(num_replicas: int) -> AbstractContextManager[Any]:
    import distributary as dist

    strategy = dist.MultiWorkerMirroredStrategy()
    assert strategy.num_replicas_in_sync == num_replicas
    return strategy.scope()


def _no_scope(num_replicas: int) -> AbstractContextManager[Any]:
    assert num_replicas == 1, "Keras by itself uses one device"
    return nullcontext()


def _data_parallel_scope(num_replicas: int) -> AbstractContextManager[Any]:
    devices = keras.distribution.list_devices("cpu")[:num_replicas]
    # `fit` asks for it again, so it stays.
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
    return nullcontext()


def _tensorflow_scope(num_replicas: int) -> AbstractContextManager[Any]:
    import _tensorflow

    return _tensorflow.create_strategy(num_replicas).scope()


WAYS: Mapping[str, Callable[[int], AbstractContextManager[Any]]] = {
    "distributary": _distributary_scope,
    "sharded": _sharded_scope,
    "multi_worker": _multi_worker_scope,
    "keras": _no_scope,
    "data_parallel": _data_parallel_scope,
    "tensorflow": _tensorflow_scope,
}


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


def _dense(name: str) -> tuple[str, ...]:
    return (f"{name}_kernel", f"{name}_bias")


_MODELS: Mapping[Model, Callable[[], tuple[KerasModel, Layers]]] = {
    "mlp": _mlp,
    "transformer": _transformer,
    "cnn": _cnn,
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=list(WAYS))
    parser.add_argument("workload", choices=FIT_WORKLOADS)
    parser.add_argument("num_replicas", type=int)
    parser.add_argument("max_steps", type=int)
    parser.add_argument("steps_per_execution", type=int)
    chosen = parser.parse_args()
    np.random.seed(0)
    serve(
        lambda: KerasFit(
            chosen.way,
            build_model(
                chosen.way,
                WORKLOADS[chosen.workload],
                chosen.num_replicas,
                chosen.steps_per_execution,
            ),
            WORKLOADS[chosen.workload],
            chosen.max_steps,
        )
    )
