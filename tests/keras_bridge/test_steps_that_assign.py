"""Models whose `train_step` takes only the batch and assigns variables itself, as in TensorFlow."""

import contextlib
import functools

import keras
import numpy as np
import pytest

import distributary as dist
import distributary.compat.tensorflow as tf
from tests.keras_bridge import small

_RANDOM = np.random.default_rng(0)
_X = _RANDOM.normal(size=(22, 3)).astype(np.float32)
_Y = (_X.sum(1, keepdims=True) > 0).astype(np.float32)
_WEIGHTS = [_RANDOM.normal(size=shape).astype(np.float32) for shape in ((3, 4), (4,), (4, 1), (1,))]


class Stateful(keras.Sequential):
    """Does by hand what `fit` does, with the metrics of `compile` and one of its own."""

    def train_step(self, data):
        x, y = data
        with dist.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred)
        variables = self.trainable_variables
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return self._updated(y, y_pred)

    def test_step(self, data):
        x, y = data
        return self._updated(y, self(x, training=False))

    def predict_step(self, data):
        return 2 * self(keras.utils.unpack_x_y_sample_weight(data)[0], training=False)

    def _updated(self, y, y_pred):
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(keras.ops.mean((y - y_pred) ** 2))
            else:
                metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


def _trained(kind, strategy=None, rows=22, regularizers=(), **options):
    hidden = keras.layers.Dense(4, "tanh", **dict.fromkeys(regularizers, "l2"))
    layers = [keras.Input((3,)), hidden, keras.layers.Dense(1)]
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = kind(layers)
        model.set_weights(_WEIGHTS)
        model.compile(
            keras.optimizers.Adam(0.05), "mse", metrics=["mae"], weighted_metrics=[], **options
        )
    history = model.fit(
        _X[:rows], _Y[:rows], batch_size=8, epochs=2, shuffle=False, verbose=0
    ).history
    results = model.evaluate(_X, _Y, batch_size=8, verbose=0, return_dict=True)
    return model.get_weights(), history["mae"], results["mae"], model.predict(_X, verbose=0)


@functools.cache
def _by_keras(rows=22, regularizers=()):
    return _trained(keras.Sequential, rows=rows, regularizers=regularizers)


def test_what_layers_add_to_the_loss_counts_once(strategy):
    regularizers = "kernel_regularizer", "activity_regularizer"

    found = _trained(Stateful, strategy, rows=16, regularizers=regularizers)

    small.assert_equal_weights(found[0], _by_keras(16, regularizers)[0])


# Without a strategy, and in the scope of `strategy = tf.distribute.get_strategy()` where there is
# no TPU, one device runs the steps.
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        (lambda of: None, {}),
        (lambda of: dist.get_strategy(), {}),
        (lambda of: of(3), {}),
        (lambda of: of(2), {"steps_per_execution": 2}),
        (lambda of: of(2), {"run_eagerly": True}),
    ],
    ids=["none", "default", "3 replicas", "several steps", "eager"],
)
def test_fit_gives_the_same_as_the_steps_of_keras(strategy, options, strategy_of):
    found = _trained(Stateful, strategy(strategy_of), **options)

    weights, mae, evaluated, predicted = _by_keras()
    small.assert_equal_weights(found[0], weights)
    np.testing.assert_allclose([*found[1], found[2]], [*mae, evaluated], rtol=1e-4)
    np.testing.assert_allclose(found[3], 2 * predicted, rtol=1e-4, atol=1e-5)


def _wrapped(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize(
    "decorate",
    [tf.function, tf.function(jit_compile=True), lambda f: dist.function(_wrapped(f))],
    ids=["tf.function", "with arguments", "another decorator"],
)
def test_what_is_behind_a_decorator_says_what_the_step_takes(decorate, strategy_of):
    steps = {name: decorate(getattr(Stateful, name)) for name in ("train_step", "test_step")}
    decorated = type("Decorated", (Stateful,), steps)

    found = _trained(decorated, strategy_of(2), rows=16)

    small.assert_equal_weights(found[0], _by_keras(16)[0])


class Pair(keras.Model):
    """Two models with a step, and no result of its own, as a GAN."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def train_step(self, data):
        loss_of = lambda: keras.ops.mean(self.second(self.first(data)) ** 2)
        return {"norm": small.descend(self.optimizer, self.first.trainable_variables, loss_of)}


@pytest.mark.parametrize("num_replicas", [None, 2])
def test_a_model_without_a_call_trains_by_its_own_step(num_replicas):
    devices = [f"cpu:{i}" for i in range(num_replicas or 0)]

    with dist.MirroredStrategy(devices).scope() if devices else contextlib.nullcontext():
        parts = [keras.Sequential([keras.Input((3,)), keras.layers.Dense(3)]) for _ in "ab"]
        model = Pair(*parts)
        model.compile(keras.optimizers.SGD(0.1))
    losses = model.fit(_X, batch_size=22, epochs=3, verbose=0).history["norm"]

    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]
