"""Losses and metrics under a strategy are those of the whole batch.

`fit` traces the whole batch once, so they differ only in how XLA divides what they compute.
"""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers as kl, losses as ko, metrics as km

import distributary as dist

_ROWS = 21
# Batches of which no number of replicas gets even parts.
_UNEVEN = 7
_RANDOM = np.random.default_rng(2)
_X = _RANDOM.normal(size=(_ROWS, 4)).astype(np.float32)
_LABELS = _RANDOM.integers(0, 3, size=_ROWS).astype(np.int32)


def _weights(batch_size):
    """The first rows of a batch, which are those of replica 0, weigh most."""
    first = np.arange(_ROWS) % batch_size < batch_size / 2
    return np.where(first, 2.0, 0.3) * np.random.default_rng(3).uniform(0.5, 1.5, _ROWS)


#: Targets by the kind of a loss or metric, and the head of the model that makes predictions.
_TARGETS = {
    "positive": _RANDOM.uniform(0.2, 2.0, size=(_ROWS, 3)).astype(np.float32),
    "binary": _RANDOM.integers(0, 2, size=(_ROWS, 1)).astype(np.float32),
    "one_hot": np.eye(3, dtype=np.float32)[_LABELS],
    "label": _LABELS,
    "word": _RANDOM.integers(1, 4, size=(_ROWS, 2)).astype(np.int32),
    "unit": _LABELS,
}
_HEADS = {
    "positive": lambda x: kl.Dense(3, "softplus")(x),
    "binary": lambda x: kl.Dense(1, "sigmoid")(x),
    "one_hot": lambda x: kl.Dense(3, "softmax")(x),
    "label": lambda x: kl.Dense(3, "softmax")(x),
    "word": lambda x: kl.Reshape((5, 4))(kl.Dense(20)(x)),
    "unit": lambda x: kl.UnitNormalization()(kl.Dense(3)(x)),
}


def _many_outputs(heads, losses, **kwargs):
    """A model with one output, and weights of its own, for each loss or metric."""

    def build():
        inputs = keras.Input((4,))
        outputs = {
            name: kl.Identity(name=name)(_HEADS[kind](inputs)) for name, kind in heads.items()
        }
        model = keras.Model(inputs, outputs)
        compiled = {key: dict(value) for key, value in kwargs.items()}
        model.compile(keras.optimizers.SGD(0.05), losses, **compiled)
        return model

    return build


# Losses


class _Cubed(ko.Loss):
    def call(self, y_true, y_pred):
        return keras.ops.mean(keras.ops.abs(y_true - y_pred) ** 3, axis=-1)


#: The kind of each loss and what makes it: a mean over rows, a number of the whole batch, over
#: pairs of rows, a loop over time, functions, and every reduction.
_LOSSES = {
    "Huber": ("positive", ko.Huber),
    "CTC": ("word", ko.CTC),
    "Dice": ("one_hot", ko.Dice),
    "Circle": ("unit", ko.Circle),
    "per_row": ("positive", lambda: lambda y, p: keras.ops.mean((y - p) ** 4, axis=-1)),
    "per_entry": ("positive", lambda: lambda y, p: keras.ops.abs(y - p)),
    "number": (
        "positive",
        lambda: lambda y, p: keras.ops.mean(keras.ops.log1p(keras.ops.abs(y - p))),
    ),
    "class": ("positive", _Cubed),
    "name": ("positive", lambda: "msle"),
    "sum": ("label", lambda: ko.SparseCategoricalCrossentropy(reduction="sum")),
    "mean": ("label", lambda: ko.SparseCategoricalCrossentropy(reduction="mean")),
    "mean_with_sample_weight": (
        "label",
        lambda: ko.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight"),
    ),
}


def test_losses_and_their_gradients_equal_one_device(train_twice, assert_same_training):
    heads = {name: kind for name, (kind, _) in _LOSSES.items()}
    build = _many_outputs(heads, {name: make() for name, (_, make) in _LOSSES.items()})
    y, weights = {name: _TARGETS[kind] for name, kind in heads.items()}, _weights(_UNEVEN)
    weights = dict.fromkeys(heads, weights) | {"per_entry": weights[:, None]}

    alone, distributed = train_twice(
        build, _X, y, num_replicas=4, batch_size=_UNEVEN, sample_weight=weights
    )

    assert_same_training(alone, distributed, rtol=1e-3)
    logs = distributed.history
    assert logs["sum_loss"][0] > 4 * logs["mean_loss"][0]


# Metrics

_FLOAT = {"dtype": "float32"}  # matrices of counts are integers otherwise, and cut off weights
#: The kind of each metric and what makes it: means, moments, thresholds, counts, matrices, ranks.
_METRICS = {
    km.RootMeanSquaredError: ("positive", {}),
    km.R2Score: ("positive", {}),
    km.PearsonCorrelation: ("positive", {}),
    km.MeanMetricWrapper: ("positive", {"fn": lambda y, p: (y - p) ** 2, "name": "wrapped"}),
    km.AUC: ("binary", {"num_thresholds": 20}),
    km.Precision: ("binary", {}),
    km.F1Score: ("one_hot", {"average": "macro"}),
    km.SparseTopKCategoricalAccuracy: ("label", {"k": 2}),
    km.MeanIoU: ("label", {"num_classes": 3, "sparse_y_pred": False, **_FLOAT}),
}


# Keras asks for int64, which JAX has only on request.
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64")
def test_metrics_equal_one_device(train, strategy_of):
    kinds = dict.fromkeys(kind for kind, _ in _METRICS.values())
    y = {kind: _TARGETS[kind] for kind in kinds}

    def build():
        metrics = {kind: [] for kind in kinds}
        for metric, (kind, arguments) in _METRICS.items():
            metrics[kind].append(metric(**{"name": metric.__name__, **arguments}))
        losses = {
            kind: "sparse_categorical_crossentropy" if kind == "label" else "mse" for kind in kinds
        }
        return _many_outputs({k: k for k in kinds}, losses, weighted_metrics=metrics)()

    weights = dict.fromkeys(kinds, _weights(_UNEVEN))
    expected, actual = (
        train(build, _X, y, strategy=strategy, epochs=0).model.evaluate(
            _X, y, sample_weight=weights, batch_size=_UNEVEN, verbose=0, return_dict=True
        )
        for strategy in (None, strategy_of(2))
    )

    assert actual.keys() == expected.keys()
    assert len(expected) > len(_METRICS)
    for key, value in expected.items():
        assert np.isfinite(value), key
        assert value != 0, f"{key} is zero, so it shows nothing"
        np.testing.assert_allclose(actual[key], value, rtol=5e-6, err_msg=key)


# In loops of users, a loss may turn all rows into one number.


class _OneNumber(keras.Loss):
    def call(self, y_true, y_pred):
        return keras.ops.mean((y_true - y_pred) ** 2)


class _Largest(keras.Loss):
    def call(self, y_true, y_pred):
        return keras.ops.max(keras.ops.abs(y_true - y_pred), initial=0.0)


class _Composed(keras.Loss):
    def call(self, y_true, y_pred):
        return keras.losses.MeanSquaredError()(y_true, y_pred) + _Largest()(y_true, y_pred)


_ONE_NUMBER = {
    "rows": keras.losses.MeanSquaredError,
    "batch": keras.losses.CosineSimilarity,
    "sum": lambda: keras.losses.MeanSquaredError("sum"),
    "one number": _OneNumber,
    "largest": _Largest,
    "composed": _Composed,
}


@pytest.mark.parametrize(("weighted", "rows"), [(True, 7), (False, 1)])
def test_losses_of_vectors_in_run_equal_one_device(weighted, rows, strategy):
    random = np.random.default_rng(5)
    y, p, weights = random.uniform(0.1, 0.9, (3, rows)).astype(np.float32)
    data = (y, p, weights) if weighted else (y, p)
    losses = {name: make() for name, make in _ONE_NUMBER.items()}

    def results(y, p, *weights):
        return {
            name: jax.value_and_grad(lambda p, loss=loss: jnp.sum(loss(y, p, *weights)))(p)
            for name, loss in losses.items()
        }

    def step(*batch):
        gather = lambda gradient: dist.get_replica_context().all_gather(gradient, 0)
        return {name: (value, gather(g)) for name, (value, g) in results(*batch).items()}

    expected = results(*map(jnp.asarray, data))
    batch = next(iter(strategy.experimental_distribute_dataset([data])))
    actual = strategy.run(step, args=batch)

    for name, (value, gradient) in expected.items():
        total = strategy.reduce("SUM", actual[name][0], axis=None)
        np.testing.assert_allclose(total, value, rtol=1e-5, err_msg=name)
        gathered = strategy.experimental_local_results(actual[name][1])[0]
        np.testing.assert_allclose(gathered, gradient, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_label_without_a_class_makes_the_loss_of_a_step_nan(replicas, strategy_of):
    strategy = strategy_of(replicas)
    labels, logits = np.array([[0], [1], [3], [2]]), np.eye(4, 3, dtype=np.float32)
    rows = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    mean = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    ignoring = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=3)

    class Own(keras.losses.SparseCategoricalCrossentropy):
        def call(self, y_true, y_pred):
            return keras.ops.mean(y_pred, axis=0)

    own = Own(reduction="sum")

    def step(y, x):
        weights = jnp.where(y[:, 0] == 3, 0.0, 1.0)
        return rows(y, x), mean(y, x), mean(y, x, weights), ignoring(y, x), own(y, x)

    (batch,) = strategy.experimental_distribute_dataset([(labels, logits)])
    losses, *means = strategy.run(step, args=batch)

    losses = np.concatenate(strategy.experimental_local_results(losses))
    expected = -np.log(np.exp(logits) / np.exp(logits).sum(1, keepdims=True))
    np.testing.assert_allclose(losses[[0, 1, 3]], expected[[0, 1, 3], [0, 1, 2]], rtol=1e-6)
    assert np.isnan(losses[2])
    total, *others = (strategy.reduce("SUM", m, axis=None) for m in means)
    assert np.isnan(total)
    assert np.isfinite(others).all()
