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
from pathlib import Path
from typing import Any

os.environ["JAX_NUM_CPU_DEVICES"] = "4"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["KERAS_BACKEND"] = "jax"
sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import keras
import numpy as np
from keras import layers as kl

import distributary as dist
from tests.awkward._case import BATCH, Case, data, net
from tests.awkward._run import Results, difference, train

_TOLERANCE = 1e-4
_OPTIMIZERS = (
    *("SGD", "momentum", "RMSprop", "Adam", "AdamW", "Nadam"),
    *("Adamax", "Adagrad", "Adadelta", "Lion", "Ftrl"),
)
_STRATEGIES = ("1", "2", "2", "3", "4", "one device", "central", "sharded 2", "sharded 3")


class Options:
    """What a seed, the number of a case, chooses."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        some = lambda share: draw.random() < share
        self.seed = seed
        self.strategy = draw.choice(_STRATEGIES)
        self.is_loop = some(0.4)
        self.inputs = draw.choice(["vectors", "images", "tokens", "series"])
        self.activation = draw.choice(["tanh", "gelu", "sigmoid"])
        self.regularizer = draw.choice([None, None, "l1", "l2"])
        self.constraint = draw.choice([None, None, None, "max_norm"])
        self.normalizes, self.freezes, self.adds = some(0.4), some(0.3), some(0.2)
        self.loss = draw.choice(["labels", "labels", "values", "function"])
        self.reduction = draw.choice(["sum_over_batch_size", "sum", "mean_with_sample_weight"])
        self.has_metrics, self.has_weighted_metrics = some(0.7), some(0.4)
        self.weighs_rows = some(0.4)
        self.optimizer = draw.choice(_OPTIMIZERS)
        self.clips = draw.choice([None, None, "clipnorm", "global_clipnorm", "clipvalue"])
        self.accumulates = draw.choice([None, None, 2, 3])
        self.has_schedule, self.scales_loss = some(0.3), some(0.2)
        self.num_rows = draw.choice([24, 25, 29, 31])
        self.batch_size = draw.choice([1, 5, 7, 8, 10])
        self.data = draw.choice(["arrays", "arrays", "sequence", "generator", "dataset"])
        self.steps_per_execution = draw.choice([1, 1, 2, 3])
        self.epochs = draw.choice([1, 2, 3])
        self.callback = draw.choice([None, None, "early", "plateau"])
        self.validates = some(0.5)
        self.then = draw.choice([None, "a batch", "fewer layers", "a file", "another rate"])

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in vars(self).items() if value)

    @property
    def targets(self) -> str:
        return "labels" if self.loss == "labels" else "targets"


def _built(o: Options) -> Any:
    """Returns a model with weights that the seed chooses."""
    given = {"kernel_regularizer": o.regularizer, "kernel_constraint": o.constraint}
    layers = {
        "vectors": [kl.Dense(8, o.activation, **given)],
        "images": [kl.MaxPooling2D(), kl.Conv2D(6, 2, activation=o.activation, **given)],
        "tokens": [kl.LSTM(6, return_sequences=True)],
        "series": [kl.Bidirectional(kl.GRU(5, return_sequences=True)), kl.LayerNormalization()],
    }[o.inputs]
    if o.normalizes:
        layers.append(kl.BatchNormalization(synchronized=True, momentum=0.8))
    if o.adds:
        layers.append(kl.ActivityRegularization(l2=0.01))
    layers.append(kl.Dense(7, "tanh", name="hidden"))
    if o.freezes:
        layers.append(kl.Dense(7))
        layers[-1].trainable = False
    model = net(*layers, x=o.inputs)
    rng = np.random.default_rng(o.seed)
    drawn = [rng.normal(0, 0.4, w.shape).astype(np.float32) for w in model.get_weights()]
    pairs = zip(drawn, ["variance" in variable.path for variable in model.weights], strict=True)
    model.set_weights([np.abs(value) + 0.5 if positive else value for value, positive in pairs])
    return _compiled(model, o)


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


def _compiled(model: Any, o: Options) -> Any:
    loss: Any = keras.losses.MeanSquaredError(reduction=o.reduction)
    if o.loss == "labels":
        loss = keras.losses.SparseCategoricalCrossentropy(True, reduction=o.reduction)
    elif o.loss == "function":
        loss = "mae"
    metrics = ["accuracy" if o.loss == "labels" else "mae"] * o.has_metrics
    weighted = ["sparse_categorical_accuracy" if o.loss == "labels" else "mse"]
    model.compile(
        _optimizer(o),
        loss,
        metrics=metrics,
        weighted_metrics=weighted * o.has_weighted_metrics,
        steps_per_execution=o.steps_per_execution,
    )
    return model


class _Sequence(keras.utils.PyDataset):
    def __init__(self, batches: list[Any]) -> None:
        super().__init__()
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Any:
        return self._batches[index]


def _given(o: Options, rows: tuple[np.ndarray, ...]) -> dict[str, Any]:
    """Returns the arguments of `fit` that are its data."""
    starts = range(0, len(rows[0]), o.batch_size)
    batches = [tuple(array[i : i + o.batch_size] for array in rows) for i in starts]
    if o.data == "arrays":
        names = zip(("x", "y", "sample_weight"), rows, strict=False)
        return {**dict(names), "batch_size": o.batch_size, "shuffle": False}
    if o.data == "sequence":
        return {"x": _Sequence(batches), "shuffle": False}
    if o.data == "dataset":
        return {"x": dist.data.Dataset.from_tensor_slices(rows).batch(o.batch_size)}
    return {"x": (batch for _ in range(100) for batch in batches), "steps_per_epoch": 4}


def _rows(o: Options) -> tuple[np.ndarray, ...]:
    names = (o.inputs, o.targets, *["weights"] * o.weighs_rows)
    return tuple(data(name, o.num_rows) for name in names)


def _case(o: Options, strategy: Any) -> Case:
    """Returns the case whose `fit`, `evaluate` and `predict` `train` compares."""
    scope = strategy.scope if strategy else contextlib.nullcontext

    def fit(model: Any, x: np.ndarray, y: np.ndarray) -> dict[str, Any]:
        options: dict[str, Any] = {"epochs": o.epochs, "verbose": 0, "callbacks": []}
        if o.validates or o.callback == "early":
            options |= {"validation_data": (x[:13], y[:13]), "validation_batch_size": 4}
        if o.callback == "early":
            stop = keras.callbacks.EarlyStopping(patience=0, restore_best_weights=True)
            options["callbacks"] = [stop]
        elif o.callback == "plateau" and not o.has_schedule:
            options["callbacks"] = [
                keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=10.0)
            ]
        history = model.fit(**_given(o, _rows(o)), **options).history
        if o.then == "a batch":
            history |= model.train_on_batch(x[:9], y[:9], return_dict=True)
        elif o.then == "fewer layers":
            for layer in model.layers[:-2]:
                layer.trainable = False
            with scope():
                _compiled(model, o)
        elif o.then == "a file":
            with tempfile.TemporaryDirectory() as folder, scope():
                model.save(os.path.join(folder, "model.keras"))
                model.load_weights(os.path.join(folder, "model.keras"))
        elif o.then == "another rate" and not o.has_schedule:
            model.optimizer.learning_rate = 0.01
        if o.then not in (None, "a batch"):
            model.fit(**_given(o, _rows(o)), verbose=0)
        return history

    return Case(str(o.seed), "random", lambda: _built(o), o.inputs, o.targets, train=fit)


def _looped(o: Options, strategy: Any) -> Results:
    """Returns all that an own loop gives."""
    with strategy.scope():
        model, optimizer, metric = _built(o), _optimizer(o), keras.metrics.Mean()
        optimizer.build(model.trainable_variables)

    def step(batch: tuple[Any, ...]) -> Any:
        with dist.GradientTape() as tape:
            predicted = model(batch[0], training=True)
            loss = model.compute_loss(batch[0], batch[1], predicted, *batch[2:])
            scaled = optimizer.scale_loss(loss) if o.scales_loss else loss
        gradients = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        metric.update_state(predicted)
        return loss

    # What layers add is not weighted with the rows of a replica here, as in TensorFlow.
    rows, size = (_rows(o), o.batch_size) if not o.adds else ([a[:24] for a in _rows(o)], BATCH)
    dataset = dist.data.Dataset.from_tensor_slices(tuple(rows)).batch(size)
    losses = []
    for _ in range(o.epochs):
        for batch in strategy.experimental_distribute_dataset(dataset):
            loss = strategy.run(step, args=(batch,))
            losses.append(strategy.reduce("SUM", loss, axis=None))
    variables = [*model.weights, *optimizer.variables]
    found = {f"variable {i}": np.asarray(v, float) for i, v in enumerate(variables)}
    return {**found, "losses": np.array(losses), "metric": np.asarray(metric.result())}


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


def _outcome(o: Options) -> tuple[str, str]:
    """Returns "equal", "skipped", "differs" or "fails", and more about it."""

    def results(strategy: Any) -> Results:
        if o.is_loop:
            return _looped(o, strategy or _strategy("one device"))
        return train(_case(o, strategy), strategy)

    try:
        alone = results(None)
    except Exception as error:
        return "skipped", f"one device fails: {type(error).__name__}: {error}"[:200]
    try:
        found = difference(alone, results(_strategy(o.strategy)))
    except Exception as error:
        return "fails", f"{type(error).__name__}: {error}"[:400]
    outcome = "equal" if found.relative < _TOLERANCE else "differs"
    return outcome, f"{found.relative:.0e} at {found.where}"


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
            result, more = _outcome(options)
        bad += result in ("differs", "fails")
        skipped += result == "skipped"
        shown = f"; {options}" if result in ("differs", "fails") else ""
        print(f"{seed}: {options.strategy}: {result}: {more}{shown}", flush=True)
        keras.backend.clear_session(free_memory=False)
    print(f"{bad} of {arguments.cases} differ or fail, {skipped} are skipped")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
