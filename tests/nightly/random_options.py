"""Do models with random options train like on one device, whatever the strategy?

Every case draws a model, a loss, metrics, an optimizer, callbacks, a form of data, batches that do
not always divide, and a strategy. `fit`, `evaluate` and `predict` are compared with Keras alone,
and an own loop with one device: histories, weights, optimizer state, metrics and predictions.

    python tests/nightly/random_options.py --cases 200
    python tests/nightly/random_options.py --seed 38 --cases 1

Ends with 1 if a case differs, or fails where one device does not.
"""

import argparse
import contextlib
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

os.environ["JAX_NUM_CPU_DEVICES"] = "4"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np
from keras import layers as kl, ops

import distributary as dist

_TOLERANCE = 1e-4
_CLASSES = 3
_OPTIMIZERS = (
    *("SGD", "momentum", "RMSprop", "Adam", "AdamW", "Nadam"),
    *("Adamax", "Adagrad", "Adadelta", "Lion", "Ftrl"),
)
_STRATEGIES = ("1", "2", "2", "3", "4", "one device", "central", "sharded 2", "sharded 3")


class Options:
    """What a seed chooses.

    Args:
        seed: Number of the case.
    """

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        some = lambda share: draw.random() < share
        self.seed = seed
        self.strategy = draw.choice(_STRATEGIES)
        self.is_loop = some(0.4)
        self.model = draw.choice(["dense", "conv", "ids", "masked ids", "attention", "two", "gru"])
        self.activation = draw.choice(["tanh", "gelu", "sigmoid"])
        self.regularizer = draw.choice([None, None, "l1", "l2"])
        self.constraint = draw.choice([None, None, None, "max_norm"])
        self.normalizes, self.freezes = some(0.4), some(0.3)
        # In a loop, `compute_loss` divides the last of these twice.
        added = ["mean", "activity", "mean" if self.is_loop else "of all replicas"]
        self.adds = draw.choice([None, None, *added])
        self.num_outputs = draw.choice([1, 1, 2])
        self.loss = draw.choice(["labels", "labels", "values", "function"])
        self.reduction = draw.choice(["sum_over_batch_size", "sum", "mean_with_sample_weight"])
        self.has_metrics, self.has_weighted_metrics = some(0.7), some(0.4)
        self.weighs_losses, self.weighs_rows = some(0.6), some(0.4)
        self.optimizer = draw.choice(_OPTIMIZERS)
        self.clips = draw.choice([None, None, "clipnorm", "global_clipnorm", "clipvalue"])
        self.accumulates = draw.choice([None, None, 2, 3])
        self.has_schedule, self.scales_loss = some(0.3), some(0.2)
        self.num_rows, self.num_test_rows = draw.choice([24, 25, 29, 31]), draw.choice([9, 13, 16])
        self.batch_size, self.test_batch_size = (
            draw.choice([1, 5, 7, 8, 10]),
            draw.choice([1, 4, 7]),
        )
        self.data = draw.choice(["arrays", "arrays", "sequence", "generator", "dataset"])
        self.steps_per_execution = draw.choice([1, 1, 2, 3])
        self.epochs = draw.choice([1, 2, 3])
        self.callback = draw.choice([None, None, "early", "plateau"])
        self.validation = draw.choice([None, "rows", "split"])
        self.then = draw.choice([None, "a batch", "fewer layers", "a file", "another rate"])

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in vars(self).items() if value)


@keras.saving.register_keras_serializable("nightly")
class _MeanOfOutputs(keras.metrics.Metric):
    """A metric of one's own, whose states are sums over rows."""

    def __init__(self, name: str = "own", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self.sum = self.add_weight(shape=(), initializer="zeros", name="sum")
        self.count = self.add_weight(shape=(), initializer="zeros", name="count")

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.sum.assign_add(ops.sum(p))
        self.count.assign_add(ops.cast(ops.size(p), "float32"))

    def result(self) -> Any:
        return self.sum / self.count


@keras.saving.register_keras_serializable("nightly")
class _Adding(kl.Layer):
    """Adds to the loss."""

    def __init__(self, kind: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.kind = kind

    def call(self, x: Any) -> Any:
        mean = lambda x: 0.1 * ops.mean(ops.sum(x**2, -1))
        self.add_loss((dist.global_batch_loss(mean) if self.kind == "of all replicas" else mean)(x))
        return x

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "kind": self.kind}


def _built(o: Options) -> Any:
    """Returns a model with weights that the seed chooses."""
    given = {"kernel_regularizer": o.regularizer, "kernel_constraint": o.constraint}
    inputs: Any = keras.Input((6,))
    match o.model:
        case "dense":
            x = kl.Dense(8, o.activation, **given)(inputs)
        case "conv":
            inputs = keras.Input((8, 8, 2))
            x = kl.MaxPooling2D()(kl.Conv2D(4, 3, padding="same", activation=o.activation)(inputs))
            x = kl.Flatten()(kl.Conv2D(6, 3, **given)(x))
        case "ids" | "masked ids":
            inputs = keras.Input((5,), dtype="int32")
            rows = kl.Embedding(30, 6, mask_zero=o.model == "masked ids")(inputs)
            x = kl.GlobalAveragePooling1D()(rows) if o.model == "ids" else kl.LSTM(6)(rows)
        case "attention":
            inputs = keras.Input((5, 8))
            x = kl.LayerNormalization()(inputs + kl.MultiHeadAttention(2, 4)(inputs, inputs))
            x = kl.GlobalAveragePooling1D()(x)
        case "two":
            inputs = {
                "a": keras.Input((6,), name="a"),
                "b": keras.Input((5,), dtype="int32", name="b"),
            }
            table = kl.Embedding(30, 6)
            x = [kl.Dense(6, o.activation)(inputs["a"]), *(kl.Flatten()(table(inputs["b"])),) * 2]
            x = kl.Concatenate()(x)
        case _:
            inputs = keras.Input((6, 4))
            x = kl.Bidirectional(kl.GRU(5))(inputs)
    if o.normalizes:
        x = kl.BatchNormalization(synchronized=True, momentum=0.8)(x)
    if o.adds:
        is_activity = o.adds == "activity"
        x = (kl.ActivityRegularization(l2=0.01) if is_activity else _Adding(o.adds))(x)
    x = kl.Dense(7, "tanh", name="hidden")(x)
    if o.freezes:
        frozen = kl.Dense(7)
        x = frozen(x)
        frozen.trainable = False
    outputs: Any = kl.Dense(_CLASSES, name="p")(x)
    if o.num_outputs == 2:
        outputs = {"p": outputs, "q": kl.Dense(1, name="q")(x)}
    model = keras.Model(inputs, outputs)
    rng = np.random.default_rng(o.seed)
    drawn = [rng.normal(0, 0.4, w.shape).astype(np.float32) for w in model.get_weights()]
    is_variance = ["variance" in variable.path for variable in model.weights]
    pairs = zip(drawn, is_variance, strict=True)
    model.set_weights([np.abs(value) + 0.5 if positive else value for value, positive in pairs])
    return model


def _optimizer(o: Options) -> Any:
    rate: Any = 0.05
    if o.has_schedule:
        rate = keras.optimizers.schedules.ExponentialDecay(0.05, 3, 0.7)
    given: dict[str, Any] = {o.clips: 0.5} if o.clips else {}
    given |= {"gradient_accumulation_steps": o.accumulates}
    name = o.optimizer
    if name == "momentum":
        name, given = "SGD", given | {"momentum": 0.9, "nesterov": True}
    if name in ("Adam", "AdamW", "Nadam", "Adamax"):  # else, rounding decides steps from zero
        given["epsilon"] = 1e-2
    optimizer = getattr(keras.optimizers, name)(rate, **given)
    if o.scales_loss:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, 8.0, dynamic_growth_steps=3)
    return optimizer


def _compile(model: Any, o: Options) -> Any:
    loss: Any = keras.losses.MeanSquaredError(reduction=o.reduction)
    if o.loss == "labels":
        loss = keras.losses.SparseCategoricalCrossentropy(True, reduction=o.reduction)
    elif o.loss == "function":
        loss = "mae"
    metrics = ["accuracy" if o.loss == "labels" else "mae", _MeanOfOutputs()] * o.has_metrics
    of_labels = "sparse_categorical_accuracy" if o.loss == "labels" else "mse"
    weighted = [of_labels] * o.has_weighted_metrics
    if o.num_outputs == 1:
        given = {"loss": loss, "metrics": metrics, "weighted_metrics": weighted}
    else:
        given = {
            "loss": {"p": loss, "q": keras.losses.Huber(reduction=o.reduction)},
            "loss_weights": {"p": 0.7, "q": 1.3} if o.weighs_losses else None,
            "metrics": {"p": metrics, "q": ["mse"]},
            "weighted_metrics": {"p": weighted, "q": ["mae"]},
        }
    model.compile(_optimizer(o), steps_per_execution=o.steps_per_execution, **given)
    return model


def _rows(o: Options, num_rows: int, seed: int) -> tuple[Any, ...]:
    """Returns inputs and targets, with weights if there are some."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.normal(size=(num_rows, *shape)).astype(np.float32)
    ids = rng.integers(0, 30, (num_rows, 5)).astype(np.int32)
    ids[:, 3:] *= rng.random((num_rows, 2)) < 0.5
    shapes = {"dense": (6,), "conv": (8, 8, 2), "attention": (5, 8), "gru": (6, 4)}
    x: Any = ids
    if o.model == "two":
        x = {"a": normal(6), "b": ids}
    elif o.model in shapes:
        x = normal(*shapes[o.model])
    y: Any = rng.integers(0, _CLASSES, num_rows).astype(np.int32)
    y = y if o.loss == "labels" else normal(_CLASSES)
    weights: Any = rng.random(num_rows).astype(np.float32) + 0.2
    if o.num_outputs == 2:
        y, weights = {"p": y, "q": normal(1)}, {"p": weights, "q": weights[::-1].copy()}
    return (x, y, weights) if o.weighs_rows else (x, y)


def _batches(rows: tuple[Any, ...], size: int) -> list[tuple[Any, ...]]:
    starts = range(0, len(jax.tree.leaves(rows)[0]), size)
    return [jax.tree.map(lambda a, k=k: a[k : k + size], rows) for k in starts]


class _Sequence(keras.utils.PyDataset):
    def __init__(self, batches: list[Any]) -> None:
        super().__init__()
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Any:
        return self._batches[index]


def _given(o: Options) -> dict[str, Any]:
    """Returns the arguments of `fit` that are its data."""
    rows = _rows(o, o.num_rows, 1)
    batches = _batches(rows, o.batch_size)
    if o.data == "arrays":
        names = zip(("x", "y", "sample_weight"), rows, strict=False)
        return {**dict(names), "batch_size": o.batch_size, "shuffle": False}
    if o.data == "sequence":
        return {"x": _Sequence(batches), "shuffle": False}
    if o.data == "dataset":
        return {"x": dist.data.Dataset.from_tensor_slices(rows).batch(o.batch_size)}

    def forever() -> Iterator[Any]:
        while True:
            yield from batches

    return {"x": forever(), "steps_per_epoch": 4}


def _scope(strategy: Any) -> Any:
    return strategy.scope() if strategy else contextlib.nullcontext()


def _fitted(o: Options, strategy: Any) -> dict[str, Any]:
    """Returns all that `fit`, `evaluate` and `predict` give."""
    with _scope(strategy):
        model = _compile(_built(o), o)
    test = _rows(o, o.num_test_rows, 2)
    given = _given(o)
    if o.validation == "rows" or o.callback == "early":
        given |= {"validation_data": test, "validation_batch_size": o.test_batch_size}
    elif o.validation == "split" and o.data == "arrays":
        given["validation_split"] = 0.3
    callbacks: list[Any] = []
    if o.callback == "early":
        callbacks = [keras.callbacks.EarlyStopping(patience=0, restore_best_weights=True)]
    elif o.callback == "plateau" and not o.has_schedule:
        callbacks = [keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=10.0)]
    history = model.fit(**given, epochs=o.epochs, callbacks=callbacks, verbose=0).history
    found: dict[str, Any] = {"history": history, "weights": model.get_weights()}
    if o.then == "a batch":
        found["batch"] = model.train_on_batch(*test, return_dict=True)
    elif o.then == "fewer layers":
        for layer in model.layers:
            layer.trainable = layer.name in ("hidden", "p", "q")
        with _scope(strategy):
            _compile(model, o)
    elif o.then == "a file":
        with tempfile.TemporaryDirectory() as folder, _scope(strategy):
            model.save(os.path.join(folder, "model.keras"))
            model = keras.models.load_model(os.path.join(folder, "model.keras"))
    elif o.then == "another rate" and not o.has_schedule:
        model.optimizer.learning_rate = 0.01
    if o.then not in (None, "a batch"):
        model.fit(**_given(o), verbose=0)
    size = {"batch_size": o.test_batch_size, "verbose": 0}
    weights = dict(zip(["sample_weight"], test[2:], strict=False))
    found["evaluate"] = model.evaluate(*test[:2], **weights, **size, return_dict=True)
    return found | {
        "predict": model.predict(test[0], **size),
        "weights at the end": model.get_weights(),
        "optimizer": [np.asarray(variable) for variable in model.optimizer.variables],
    }


def _looped(o: Options, strategy: Any) -> dict[str, Any]:
    """Returns all that an own loop gives."""
    with strategy.scope():
        model = _compile(_built(o), o)
        optimizer = _optimizer(o)
        optimizer.build(model.trainable_variables)
        metrics = [_MeanOfOutputs(), keras.metrics.Mean(name="mean")]
    first = lambda nest: nest["p"] if isinstance(nest, dict) else nest

    def step(batch: tuple[Any, ...]) -> Any:
        with dist.GradientTape() as tape:
            predicted = model(batch[0], training=True)
            loss = model.compute_loss(batch[0], batch[1], predicted, *batch[2:])
            scaled = optimizer.scale_loss(loss) if o.scales_loss else loss
        gradients = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        metrics[0].update_state(first(batch[1]), first(predicted))
        metrics[1].update_state(first(predicted))
        return loss

    # What layers add is not weighted with the rows of a replica here, as in TensorFlow.
    size = 12 if o.adds else o.batch_size
    rows = jax.tree.map(lambda a: a[:24] if o.adds else a, _rows(o, o.num_rows, 1))
    dataset = dist.data.Dataset.from_tensor_slices(rows).batch(size)
    losses = []
    for _ in range(o.epochs):
        for batch in strategy.experimental_distribute_dataset(dataset):
            loss = strategy.run(step, args=(batch,))
            losses.append(strategy.reduce("SUM", loss, axis=None))
    return {
        "losses": losses,
        "metrics": [metric.result() for metric in metrics],
        "weights": model.get_weights(),
        "optimizer": [np.asarray(variable) for variable in optimizer.variables],
    }


def _strategy(name: str) -> Any:
    devices = jax.devices()
    match name.split():
        case ["one", _]:
            return dist.OneDeviceStrategy(devices[0])
        case ["central"]:
            return dist.CentralStorageStrategy(devices[:2])
        case ["sharded", number]:
            sharded = {"experimental_shard_optimizer_state": True}
            return dist.MirroredStrategy(devices[: int(number)], **sharded)
    return dist.MirroredStrategy(devices[: int(name)])


def _difference(one: Any, other: Any) -> tuple[float, str]:
    """Returns the largest difference, relative to values above 1, and where it is."""
    found, tree = jax.tree_util.tree_flatten_with_path(one)
    leaves, other_tree = jax.tree.flatten(other)
    if tree != other_tree:
        return np.inf, f"structure: {tree} and {other_tree}"
    worst = (0.0, "")
    for (path, expected), actual in zip(found, leaves, strict=True):
        a, b = (np.asarray(value, np.float64) for value in (expected, actual))
        where = jax.tree_util.keystr(path)
        if a.shape != b.shape or not np.array_equal(np.isnan(a), np.isnan(b)):
            return np.inf, where
        apart = np.abs(a - b) / np.maximum(1, np.abs(a))
        worst = max(worst, (float(np.nanmax(apart, initial=0)), where))
    return worst


def _case(o: Options) -> tuple[str, str]:
    """Returns "equal", "skipped", "differs" or "fails", and more about it."""
    try:
        alone = _looped(o, _strategy("one device")) if o.is_loop else _fitted(o, None)
    except Exception as error:
        return "skipped", f"one device fails: {type(error).__name__}: {error}"[:200]
    strategy = _strategy(o.strategy)
    try:
        found = _looped(o, strategy) if o.is_loop else _fitted(o, strategy)
    except Exception as error:
        return "fails", f"{type(error).__name__}: {error}"[:400]
    worst, where = _difference(alone, found)
    return "equal" if worst < _TOLERANCE else "differs", f"{worst:.0e} at {where}"


def main() -> int:
    """Runs the cases and prints a line for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    arguments = parser.parse_args()
    bad = skipped = 0
    with _strategy("one device").scope():  # Keras alone can synchronize batch normalization then
        pass
    for seed in range(arguments.seed, arguments.seed + arguments.cases):
        options = Options(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result, more = _case(options)
        bad += result in ("differs", "fails")
        skipped += result == "skipped"
        shown = f"; {options}" if result in ("differs", "fails") else ""
        print(f"{seed}: {options.strategy}: {result}: {more}{shown}", flush=True)
        keras.backend.clear_session(free_memory=False)
    print(f"{bad} of {arguments.cases} differ or fail, {skipped} are skipped")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
