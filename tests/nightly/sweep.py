"""How do steps of models of random shapes compare with the same steps written by hand?

Every model is trained in turns by `fit`, by a loop of `strategy.run`, by a step that is written by
hand for the same devices, and, with one replica, by Keras alone. What takes more than 1.25 times as
long as the fastest of the last two is a cliff. With `--workers`, there are two processes of one
device each, whose steps are also held against those written by hand for two devices of one process.

    python tests/nightly/sweep.py --models 40 --replicas 1 2 4
    python tests/nightly/sweep.py --models 40 --workers
    python tests/nightly/sweep.py --seed 7 --models 1 --replicas 2
    python tests/nightly/sweep.py --named cnn separable_cnn

Models with a name are those that have been cliffs.
Ends with 1 if there is a cliff.
"""

import argparse
import contextlib
import math
import os
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from _workers import Peer, Process, choose_steps, interleave, start, timed

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("KERAS_BACKEND", "jax")

_CLIFF = 1.25
_NUM_CLASSES = 10
_ROUNDS = 5
_BLOCK_SECONDS = 0.5


def _layers_of(family: str, choose: random.Random) -> tuple[tuple[int, ...], list[Any]]:
    """Returns the shape of an example and layers for it."""
    from keras import layers

    activation = choose.choice(["relu", "gelu", "tanh"])
    norm = [layers.BatchNormalization()] if choose.random() < 0.4 else []
    if family == "dense":
        widths = [choose.choice([32, 128, 512]) for _ in range(choose.randint(1, 4))]
        return (choose.choice([16, 784]),), [
            *(layers.Dense(width, activation=activation) for width in widths),
            *norm,
        ]
    if family == "conv1d":
        filters, kernel = choose.choice([16, 64]), choose.choice([3, 9])
        return (choose.choice([64, 256]), 8), [
            layers.Conv1D(filters, kernel, padding="same", activation=activation),
            *norm,
            layers.MaxPooling1D(2),
            layers.Conv1D(2 * filters, kernel, strides=2, activation=activation),
            layers.GlobalAveragePooling1D(),
        ]
    if family == "conv2d":
        filters, padding = choose.choice([16, 32, 64]), choose.choice(["same", "valid"])
        pooling = [[], [layers.MaxPooling2D(2)], [layers.AveragePooling2D(2)]][choose.randint(0, 2)]
        return (*choose.choice([(28, 28), (32, 32)]), choose.choice([1, 3])), [
            layers.Conv2D(filters, 3, padding=padding, activation=activation),
            *pooling,
            *norm,
            layers.Conv2D(
                2 * filters, choose.choice([3, 5]), padding=padding, activation=activation
            ),
            layers.Flatten(),
            layers.Dense(64, activation=activation),
        ]
    if family == "depthwise":
        return (28, 28, choose.choice([1, 3])), [
            layers.Conv2D(32, 3, strides=choose.choice([1, 2]), padding="same"),
            *norm,
            layers.DepthwiseConv2D(choose.choice([3, 5]), activation=activation),
            layers.SeparableConv2D(64, choose.choice([3, 5]), activation=activation),
            layers.GlobalMaxPooling2D(),
        ]
    if family == "recurrent":
        layer = choose.choice([layers.LSTM, layers.GRU, layers.SimpleRNN])
        return (choose.choice([16, 64]), 16), [layer(choose.choice([32, 128]))]
    if family == "attention":
        features, heads = choose.choice([(32, 2), (128, 4)])

        class Block(layers.Layer):
            def __init__(self) -> None:
                super().__init__()
                self.attention = layers.MultiHeadAttention(heads, features // heads)
                self.norm = layers.LayerNormalization()
                self.dense = layers.Dense(features, activation=activation)

            def call(self, x: Any) -> Any:
                return x + self.dense(self.norm(x + self.attention(x, x)))

        return (choose.choice([16, 64]), features), [Block(), layers.GlobalAveragePooling1D()]
    words, length = choose.choice([1000, 100_000]), choose.choice([8, 26])
    return (length,), [
        layers.Embedding(words, choose.choice([16, 64])),
        layers.Flatten(),
        layers.Dense(64, activation=activation),
    ]


def _layers_named(name: str) -> tuple[tuple[int, ...], list[Any]]:
    """Returns the shape of an example and layers for it, of a model that has been a cliff."""
    from keras import layers

    if name == "cnn":
        return (28, 28, 1), [
            layers.Conv2D(32, 3, activation="relu"),
            layers.Conv2D(64, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
        ]
    if name == "separable_cnn":
        return (28, 28, 1), [
            layers.Conv2D(64, 3, padding="same", activation="gelu"),
            layers.BatchNormalization(),
            layers.SeparableConv2D(64, 5, activation="gelu"),
            layers.BatchNormalization(),
            layers.Flatten(),
            layers.Dense(128, activation="gelu"),
            layers.Dense(128, activation="gelu"),
        ]
    if name == "embedding":
        return (26,), [
            layers.Embedding(100_000, 64),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
        ]
    return (784,), [layers.Dense(128, activation="relu")]


# Size of a batch and optimizer.
_NAMED = {
    "mlp": (32, "adam"),
    "cnn": (64, "adam"),
    "separable_cnn": (32, "rmsprop"),
    "embedding": (256, "sgd"),
}
_FAMILIES = ("dense", "conv1d", "conv2d", "depthwise", "recurrent", "attention", "embedding")


class _Model:
    """A model of a name, or one whose shape a seed chooses, and data for it."""

    def __init__(self, key: str) -> None:
        self.key = key
        if key in _NAMED:
            self.family = key
            self.batch_size, self.optimizer = _NAMED[key]
        else:
            choose = random.Random(int(key))
            self.family = _FAMILIES[int(key) % len(_FAMILIES)]
            self.batch_size = choose.choice([32, 64, 128])
            self.optimizer = choose.choice(["sgd", "adam", "rmsprop", "adagrad"])
            self._state = choose.getstate()
        shape, layers = self._layers()
        rng = np.random.default_rng(0)
        num_examples = 8 * self.batch_size
        if self.family == "embedding":
            self.x = rng.integers(0, layers[0].input_dim, (num_examples, *shape)).astype(np.int32)
        else:
            self.x = rng.normal(size=(num_examples, *shape)).astype(np.float32)
        self.y = rng.integers(0, _NUM_CLASSES, num_examples)

    def _layers(self) -> tuple[tuple[int, ...], list[Any]]:
        if self.key in _NAMED:
            return _layers_named(self.key)
        choose = random.Random()
        choose.setstate(self._state)
        return _layers_of(self.family, choose)

    def build(self) -> Any:
        """Returns a new Keras model."""
        import keras

        shape, layers = self._layers()
        dtype = "int32" if self.family == "embedding" else "float32"
        model = keras.Sequential(
            [keras.Input(shape, dtype=dtype), *layers, keras.layers.Dense(_NUM_CLASSES)]
        )
        model.compile(self.optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    def batches(self, num_steps: int) -> Iterator[tuple[Any, Any]]:
        """Yields batches, from the beginning again after the last."""
        for step in range(num_steps):
            start = step % 8 * self.batch_size
            yield self.x[start : start + self.batch_size], self.y[start : start + self.batch_size]

    def __str__(self) -> str:
        shape = "x".join(map(str, self.x.shape[1:]))
        return f"{self.key}: {self.family} {shape}, {self.optimizer}, batch {self.batch_size}"


def peers(names: Sequence[str], key: str, num_replicas: int | None) -> list[Peer]:
    """Returns ways to train a model; without a number of replicas, of a worker of several."""
    import _handwritten
    import jax
    import keras

    import distributary as dist

    strategy: dist.Strategy
    if num_replicas is None:
        strategy = dist.MultiWorkerMirroredStrategy()  # before a layer makes arrays
        replicas = _handwritten.Replicas(strategy.extended.mesh)
    else:
        strategy = dist.MirroredStrategy(jax.devices()[:num_replicas])
        replicas = _handwritten.Replicas.of_this_process(num_replicas)
    keras.utils.set_random_seed(0)  # workers begin alike
    model = _Model(key)

    def way(name: str) -> Peer:
        if name == "hand":
            return _by_hand(model, replicas)
        if name == "loop":
            return _by_loop(model, strategy)
        with strategy.scope() if name == "fit" else contextlib.nullcontext():
            return _by_fit(name, model, model.build())

    return [way(name) for name in names]


def _by_fit(name: str, model: _Model, built: Any) -> Peer:
    data = {}

    def run(num_steps: int) -> None:
        if num_steps not in data:
            repeats = math.ceil(num_steps / 8)
            rows = num_steps * model.batch_size
            data[num_steps] = [
                np.concatenate([part] * repeats)[:rows] for part in (model.x, model.y)
            ]
        x, y = data[num_steps]
        built.fit(x, y, batch_size=model.batch_size, shuffle=False, verbose=0)

    return timed(name, run)


def _by_loop(model: _Model, strategy: Any) -> Peer:
    import jax
    import jax.numpy as jnp
    import keras

    import distributary as dist

    with strategy.scope():
        built = model.build()
        optimizer = keras.optimizers.get(model.optimizer)
        optimizer.build(built.trainable_variables)

    def step(x: Any, y: Any) -> Any:
        with dist.GradientTape() as tape:
            logits = built(x, training=True)
            losses = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
            loss = jnp.sum(losses) / model.batch_size
        gradients = tape.gradient(loss, built.trainable_variables)
        optimizer.apply_gradients(zip(gradients, built.trainable_variables, strict=True))
        return loss

    rows = dist.data.Dataset.from_tensor_slices((model.x, model.y)).batch(model.batch_size)
    batches = iter(strategy.experimental_distribute_dataset(rows.repeat()))

    def run(num_steps: int) -> None:
        for _ in range(num_steps):
            loss = strategy.run(step, args=next(batches))
        jax.block_until_ready(strategy.experimental_local_results(loss))

    return timed("loop", run)


def _by_hand(model: _Model, replicas: Any) -> Peer:
    import _handwritten
    import jax
    from jax.sharding import PartitionSpec

    step, state = _handwritten.step_of_keras(model.build(), replicas)
    compiled = _handwritten.compile_step(step, replicas.mesh)
    state = replicas.place(state, PartitionSpec())
    own = replicas.own_rows(model.batch_size)

    def run(num_steps: int) -> None:
        nonlocal state
        for x, y in model.batches(num_steps):
            batch = replicas.place((x[own], y[own]), PartitionSpec(_handwritten.AXIS))
            state, loss = compiled(state, *batch)
        jax.block_until_ready(loss)

    return timed("hand", run)


def _measure(key: str, num_replicas: int | None) -> dict[str, float]:
    """Returns the seconds of a step, the least of several rounds, of each way."""
    arguments = {"key": key, "num_replicas": num_replicas}
    names = ("hand", "fit", "loop", *["keras"] * (num_replicas == 1))
    process = Process(__file__, names, arguments, devices=num_replicas or 1)
    processes = {"": process}
    if num_replicas is None:
        alone = {"key": key, "num_replicas": 2}
        processes = {
            "": Process(__file__, names, arguments, workers=2),
            " in one process": Process(__file__, ("hand",), alone, devices=2),
        }
    with contextlib.ExitStack() as stack:
        ways = []
        for where, process in processes.items():
            job = stack.enter_context(contextlib.closing(start(process, {})))
            ways += [job.peer(f"{name}{where}", name) for name in process.names]
        for way in ways:
            way.time_block(8)
        num_steps = 8 * min(64, math.ceil(choose_steps(ways[0], _BLOCK_SECONDS) / 8))
        found = interleave(ways, _ROUNDS, num_steps)
    return {name: min(times) for name, times in found.items()}


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0, help="of the first model")
    parser.add_argument("--named", nargs="+", choices=_NAMED, help="instead of random shapes")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--workers", action="store_true", help="two processes, not replicas of one")
    arguments = parser.parse_args()
    cliffs = 0
    seeds = range(arguments.seed, arguments.seed + arguments.models)
    for key in arguments.named or map(str, seeds):
        model = _Model(key)
        for num_replicas in [None] if arguments.workers else arguments.replicas:
            found = _measure(key, num_replicas)
            best = min(found["hand"], found.get("keras", math.inf))
            ratios = {name: found[name] / best for name in ("fit", "loop")}
            cliffs += max(ratios.values()) > _CLIFF
            mark = "  <-- cliff" if max(ratios.values()) > _CLIFF else ""
            where = "2 workers" if num_replicas is None else f"{num_replicas} replicas"
            times = ", ".join(f"{name} {1000 * s:.2f} ms" for name, s in found.items())
            if alone := found.get("hand in one process"):
                ratios |= {f"{way} over one process": found[way] / alone for way in ("fit", "loop")}
            shown = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
            print(f"{model}; {where}: {times}; {shown}{mark}", flush=True)
    print(f"{cliffs} cliffs")
    return 1 if cliffs else 0


if __name__ == "__main__":
    sys.exit(main())
