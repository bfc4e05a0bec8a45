"""Losses and metrics under a strategy are those of the whole batch."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers as kl, losses as ko, metrics as km

import distributary as dist

_ROWS = 21  # batches of 8, 8 and 5, which two replicas cannot share out evenly
# Batches of which no number of replicas gets even parts: a test with these alone compiles half as
# many programs as one whose last batch is uneven.
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
    "sign": np.where(_RANDOM.uniform(size=(_ROWS, 3)) < 0.5, -1, 1).astype(np.float32),
    "binary": _RANDOM.integers(0, 2, size=(_ROWS, 1)).astype(np.float32),
    "one_hot": np.eye(3, dtype=np.float32)[_LABELS],
    "label": _LABELS,
    "word": _RANDOM.integers(1, 4, size=(_ROWS, 2)).astype(np.int32),
    "rounded": _RANDOM.integers(0, 2, size=(_ROWS, 3)).astype(np.float32),
}
_HEADS = {
    "positive": lambda x: kl.Dense(3, "softplus")(x),
    "sign": lambda x: kl.Dense(3, "tanh")(x),
    "binary": lambda x: kl.Dense(1, "sigmoid")(x),
    "one_hot": lambda x: kl.Dense(3, "softmax")(x),
    "label": lambda x: kl.Dense(3, "softmax")(x),
    "word": lambda x: kl.Reshape((5, 4))(kl.Dense(20)(x)),
    "rounded": lambda x: keras.ops.round(kl.Dense(3, "sigmoid")(x)),
}


def _many_outputs(heads, losses, learning_rate=0.05, **kwargs):
    """A model with one output, and weights of its own, for each loss or metric."""

    def build():
        inputs = keras.Input((4,))
        outputs = {
            name: kl.Identity(name=name)(_HEADS[kind](inputs)) for name, kind in heads.items()
        }
        model = keras.Model(inputs, outputs)
        compiled = {key: dict(value) for key, value in kwargs.items()}
        model.compile(keras.optimizers.SGD(learning_rate), losses, **compiled)
        return model

    return build


# Losses

#: The kind of every loss that is a mean over rows.
_LOSSES = {
    ko.MeanSquaredError: "positive",
    ko.MeanAbsoluteError: "positive",
    ko.MeanAbsolutePercentageError: "positive",
    ko.MeanSquaredLogarithmicError: "positive",
    ko.Huber: "positive",
    ko.LogCosh: "positive",
    ko.CosineSimilarity: "positive",
    ko.Poisson: "positive",
    ko.Hinge: "sign",
    ko.SquaredHinge: "sign",
    ko.BinaryCrossentropy: "binary",
    ko.BinaryFocalCrossentropy: "binary",
    ko.CategoricalCrossentropy: "one_hot",
    ko.CategoricalFocalCrossentropy: "one_hot",
    ko.CategoricalHinge: "one_hot",
    ko.KLDivergence: "one_hot",
    ko.Dice: "one_hot",
    ko.Tversky: "one_hot",
    ko.SparseCategoricalCrossentropy: "label",
    ko.CategoricalGeneralizedCrossEntropy: "label",
    ko.CTC: "word",
}
if hasattr(ko, "SparseCategoricalFocalCrossentropy"):  # from Keras 3.16 on
    _LOSSES[ko.SparseCategoricalFocalCrossentropy] = "label"
# Without an axis these two are one number for a whole batch.
_LOSS_ARGUMENTS = {ko.Dice: {"axis": 1}, ko.Tversky: {"axis": 1}}
_OVER_PAIRS_OF_ROWS = {ko.Circle}


def test_every_public_loss_is_compared(public_classes):
    assert public_classes(ko, ko.Loss) == {ko.Loss, *_LOSSES, *_OVER_PAIRS_OF_ROWS}


def _loss(kind, **kwargs):
    return kind(**_LOSS_ARGUMENTS.get(kind, {}), **kwargs)


def test_every_loss_and_its_gradient_equal_one_device(train_twice, assert_same_training):
    heads = {kind.__name__: of for kind, of in _LOSSES.items()}
    losses = {kind.__name__: _loss(kind) for kind in _LOSSES}
    rows = slice(16)  # of full batches only, to compile less
    y = {name: _TARGETS[of][rows] for name, of in heads.items()}
    weights = dict.fromkeys(heads, _weights(8)[rows])

    alone, distributed = train_twice(
        _many_outputs(heads, losses), _X[rows], y, sample_weight=weights
    )

    assert_same_training(alone, distributed)
    assert {f"{name}_loss" for name in heads} <= set(distributed.history)


_REDUCTIONS = ("sum", "sum_over_batch_size", "mean", "mean_with_sample_weight")


@pytest.mark.parametrize(
    ("weighted", "num_replicas", "rows", "batch_size"),
    [(False, 2, 16, 8), (True, 4, _ROWS, _UNEVEN)],
)
def test_every_reduction_equals_one_device(
    weighted, num_replicas, rows, batch_size, train_twice, assert_same_training
):
    heads, losses = {}, {}
    for reduction in _REDUCTIONS:
        heads[f"{reduction}_of_numbers"], heads[f"{reduction}_of_labels"] = "positive", "label"
        losses[f"{reduction}_of_numbers"] = ko.MeanSquaredError(reduction)
        losses[f"{reduction}_of_labels"] = ko.SparseCategoricalCrossentropy(reduction=reduction)
    y = {name: _TARGETS[of][:rows] for name, of in heads.items()}
    options = {"num_replicas": num_replicas, "batch_size": batch_size}
    if weighted:
        options["sample_weight"] = dict.fromkeys(heads, _weights(batch_size)[:rows])

    alone, distributed = train_twice(_many_outputs(heads, losses), _X[:rows], y, **options)

    assert_same_training(alone, distributed)
    logs = distributed.history
    assert logs["sum_of_numbers_loss"][0] > 4 * logs["mean_of_numbers_loss"][0]


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean_with_sample_weight"])
def test_class_weights_equal_one_device(reduction, train_twice, assert_same_training):
    def build():
        model = keras.Sequential([keras.Input((4,)), kl.Dense(3, "softmax")])
        loss = ko.SparseCategoricalCrossentropy(reduction=reduction)
        model.compile("sgd", loss, weighted_metrics=["accuracy"])
        return model

    alone, distributed = train_twice(
        build, _X, _LABELS, class_weight={0: 0.1, 1: 5.0, 2: 1.0}, batch_size=_UNEVEN
    )

    assert_same_training(alone, distributed)


def test_rows_without_weight_do_not_count(train_twice, assert_same_training):
    # All rows that count are on replica 1.
    weights = (np.arange(_ROWS) % 8 >= 4).astype(np.float32)
    loss = ko.MeanSquaredError("mean_with_sample_weight")
    build = _many_outputs({"a": "positive"}, {"a": loss}, weighted_metrics={"a": ["mae"]})

    alone, distributed = train_twice(
        build, _X, {"a": _TARGETS["positive"]}, sample_weight={"a": weights}
    )

    assert_same_training(alone, distributed)


def test_functions_as_losses_equal_one_device(train_twice, assert_same_training):
    class Cubed(ko.Loss):
        def call(self, y_true, y_pred):
            return keras.ops.mean(keras.ops.abs(y_true - y_pred) ** 3, axis=-1)

    losses = {
        "per_row": lambda y, p: keras.ops.mean((y - p) ** 4, axis=-1),
        "per_entry": lambda y, p: keras.ops.abs(y - p),
        "number": lambda y, p: keras.ops.mean(keras.ops.log1p(keras.ops.abs(y - p))),
        "class": Cubed(),
        "name": "msle",
    }
    y = dict.fromkeys(losses, _TARGETS["positive"])

    alone, distributed = train_twice(
        _many_outputs(dict.fromkeys(losses, "positive"), losses), _X, y, batch_size=_UNEVEN
    )

    assert_same_training(alone, distributed)


@pytest.mark.parametrize(
    ("weighted", "num_replicas", "rows", "batch_size"),
    [(False, 4, _ROWS, _UNEVEN), (True, 2, 16, 8)],
)
def test_masked_sequences_equal_one_device(
    weighted, num_replicas, rows, batch_size, train_twice, assert_same_training
):
    tokens = _RANDOM.integers(1, 6, size=(rows, 5))
    # Rows of replica 0 are short, those of the last replica long.
    is_first = np.arange(rows) % batch_size < batch_size / num_replicas
    lengths = np.where(is_first, 1, 4) + _RANDOM.integers(0, 2, size=rows)
    tokens = np.where(np.arange(5) < lengths[:, None], tokens, 0).astype(np.int32)
    names = ("sum_over_batch_size", "mean_with_sample_weight")

    def build():
        inputs = keras.Input((5,), dtype="int32")
        hidden = kl.Embedding(6, 3, mask_zero=True)(inputs)
        outputs = {name: kl.Dense(4, "softmax", name=name)(hidden) for name in names}
        model = keras.Model(inputs, outputs)
        loss = {n: ko.SparseCategoricalCrossentropy(reduction=n) for n in names}
        metrics = {n: [km.SparseCategoricalAccuracy(name="accuracy")] for n in names}
        kind = "weighted_metrics" if weighted else "metrics"
        model.compile(keras.optimizers.SGD(0.05), loss, **{kind: metrics})
        return model

    y = dict.fromkeys(names, (tokens * 7 + np.arange(5)).astype(np.int32) % 4)
    weights = {}
    if weighted:
        steps = _RANDOM.uniform(0.2, 3.0, size=(rows, 5)).astype(np.float32)
        weights["sample_weight"] = dict.fromkeys(names, steps)

    alone, distributed = train_twice(
        build, tokens, y, num_replicas=num_replicas, batch_size=batch_size, **weights
    )

    assert_same_training(alone, distributed)


@pytest.mark.parametrize(
    ("loss", "kind"),
    [(ko.Dice(), "one_hot"), (ko.Tversky(), "one_hot"), (ko.Circle(), "embedding")],
    ids=["Dice", "Tversky", "Circle"],
)
def test_losses_over_several_rows_are_those_of_the_batch(loss, kind, strategy_of, train):
    labels = np.array([0, 1, 0, 1, 1, 1, 0, 0], np.int32)
    y = labels if kind == "embedding" else np.eye(3, dtype=np.float32)[labels]

    def build():
        last = [kl.UnitNormalization()] if kind == "embedding" else [kl.Softmax()]
        model = keras.Sequential([keras.Input((4,)), kl.Dense(3), *last])
        model.compile(keras.optimizers.SGD(0.1), loss)
        return model

    alone = train(build, _X[:8], y)
    both = train(build, _X[:8], y, strategy=strategy_of(2))

    np.testing.assert_allclose(both.history["loss"], alone.history["loss"], rtol=1e-5)
    for own, expected in zip(both.model.get_weights(), alone.model.get_weights(), strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-6)


# Metrics

_FLOAT = {"dtype": "float32"}  # matrices of counts are integers otherwise, and cut off weights
#: The kind of every metric of targets and predictions, and what makes it.
_METRICS = {
    km.MeanSquaredError: ("positive", {}),
    km.RootMeanSquaredError: ("positive", {}),
    km.MeanAbsoluteError: ("positive", {}),
    km.MeanAbsolutePercentageError: ("positive", {}),
    km.MeanSquaredLogarithmicError: ("positive", {}),
    km.CosineSimilarity: ("positive", {}),
    km.LogCoshError: ("positive", {}),
    km.R2Score: ("positive", {}),
    km.Poisson: ("positive", {}),
    km.PearsonCorrelation: ("positive", {}),
    km.ConcordanceCorrelation: ("positive", {}),
    km.MeanMetricWrapper: ("positive", {"fn": lambda y, p: (y - p) ** 2, "name": "wrapped"}),
    km.Hinge: ("sign", {}),
    km.SquaredHinge: ("sign", {}),
    km.AUC: ("binary", {"num_thresholds": 20}),
    km.BinaryAccuracy: ("binary", {}),
    km.BinaryCrossentropy: ("binary", {}),
    km.BinaryIoU: ("binary", _FLOAT),
    km.Precision: ("binary", {}),
    km.Recall: ("binary", {}),
    km.TruePositives: ("binary", {}),
    km.TrueNegatives: ("binary", {}),
    km.FalsePositives: ("binary", {}),
    km.FalseNegatives: ("binary", {}),
    km.PrecisionAtRecall: ("binary", {"recall": 0.5}),
    km.RecallAtPrecision: ("binary", {"precision": 0.5}),
    km.SensitivityAtSpecificity: ("binary", {"specificity": 0.2}),
    km.SpecificityAtSensitivity: ("binary", {"sensitivity": 0.2}),
    km.CategoricalAccuracy: ("one_hot", {}),
    km.CategoricalCrossentropy: ("one_hot", {}),
    km.CategoricalHinge: ("one_hot", {}),
    km.KLDivergence: ("one_hot", {}),
    km.TopKCategoricalAccuracy: ("one_hot", {"k": 2}),
    km.F1Score: ("one_hot", {"average": "macro"}),
    km.FBetaScore: ("one_hot", {"average": "weighted", "beta": 2.0}),
    km.OneHotIoU: ("one_hot", {"num_classes": 3, "target_class_ids": [0, 2], **_FLOAT}),
    km.OneHotMeanIoU: ("one_hot", {"num_classes": 3, **_FLOAT}),
    km.SparseCategoricalAccuracy: ("label", {}),
    km.SparseCategoricalCrossentropy: ("label", {}),
    km.SparseTopKCategoricalAccuracy: ("label", {"k": 2}),
    km.IoU: (
        "label",
        {"num_classes": 3, "target_class_ids": [0, 1], "sparse_y_pred": False, **_FLOAT},
    ),
    km.MeanIoU: ("label", {"num_classes": 3, "sparse_y_pred": False, **_FLOAT}),
    km.Accuracy: ("rounded", {}),
}
_OF_VALUES = {km.Mean, km.Sum}


def test_every_public_metric_is_compared(public_classes):
    assert public_classes(km, km.Metric) == {km.Metric, *_METRICS, *_OF_VALUES}


# Keras asks for int64, which JAX has only on request.
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64")
def test_every_metric_equals_one_device(train, strategy_of):
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


def test_means_and_sums_that_a_model_keeps_itself_equal_one_device(
    train_twice, assert_same_training, assert_same_evaluation
):
    class Counting(keras.Model):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.mean = km.Mean(name="mean_output")
            self.sum = km.Sum(name="sum_of_outputs")
            self.rows = km.Sum(name="rows")

        def compute_metrics(self, x, y, y_pred, sample_weight=None):
            self.mean.update_state(y_pred, sample_weight=keras.ops.abs(y))
            self.sum.update_state(y_pred)
            self.rows.update_state(keras.ops.ones_like(y_pred[:, 0]))
            return super().compute_metrics(x, y, y_pred, sample_weight)

    def build():
        inputs = keras.Input((4,))
        model = Counting(inputs, kl.Dense(3)(inputs))
        model.compile(keras.optimizers.SGD(0.05), "mse")
        return model

    alone, distributed = train_twice(build, _X, _TARGETS["positive"], epochs=2)

    assert distributed.history["rows"] == [_ROWS, _ROWS]
    assert_same_training(alone, distributed)
    assert_same_evaluation(alone, distributed, _X, _TARGETS["positive"])


# Batches that cannot be shared out evenly


def _regression():
    model = keras.Sequential([keras.Input((4,)), kl.Dense(3)])
    metrics = ["mae", km.R2Score(), km.MeanMetricWrapper(lambda y, p: p, name="output")]
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=metrics)
    return model


@pytest.mark.parametrize("rows", [2, 11])
def test_batches_smaller_than_the_replicas_equal_one_device(
    rows, train_twice, assert_same_training, assert_same_evaluation
):
    x, y = _X[:rows], _TARGETS["positive"][:rows]

    alone, distributed = train_twice(_regression, x, y, num_replicas=4)

    assert_same_training(alone, distributed)
    if rows == 2:
        assert_same_evaluation(alone, distributed, x, y)


@pytest.mark.parametrize("batch_size", [1, 9])
def test_evaluate_and_predict_take_batches_of_any_size(batch_size, train, strategy_of):
    x, y = _X, _TARGETS["positive"]
    alone = train(_regression, x, y).model
    distributed = train(_regression, x, y, strategy=strategy_of(2)).model

    expected = alone.evaluate(x, y, batch_size=batch_size, verbose=0)
    actual = distributed.evaluate(x, y, batch_size=batch_size, verbose=0)
    predicted = distributed.predict(x, batch_size=batch_size, verbose=0)

    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    assert predicted.shape == (_ROWS, 3)
    np.testing.assert_allclose(predicted, alone.predict(x, verbose=0), rtol=1e-4, atol=1e-5)


@keras.saving.register_keras_serializable()
class StepsAndMeans(keras.metrics.Metric):
    """State that is not a sum over examples: the number of steps, and the sum of their means."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.steps = self.add_variable((), "zeros", aggregation="only_first_replica")
        self.means = self.add_variable((), "zeros", aggregation="mean")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.steps.assign_add(1.0)
        self.means.assign_add(keras.ops.mean(y_pred))

    def result(self):
        return {"steps": self.steps.value, "mean": self.means.value / self.steps.value}


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_state_of_a_metric_is_combined_as_its_variable_says(num_replicas, train, strategy_of):
    def build():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=[StepsAndMeans()])
        return model

    x = np.random.default_rng(0).normal(size=(26, 2)).astype(np.float32)
    ours = train(build, x, x[:, :1], strategy=strategy_of(num_replicas), batch_size=12, epochs=2)
    alone = train(build, x, x[:, :1], batch_size=12, epochs=2)

    assert ours.history["steps"] == [3.0, 3.0]
    np.testing.assert_allclose(ours.history["mean"], alone.history["mean"], rtol=1e-5)


# In own loops, a loss may turn all rows into one number.


def _of_all(y_true, y_pred):
    return keras.ops.mean((y_true - y_pred) ** 2)


class _OneNumber(keras.Loss):
    def call(self, y_true, y_pred):
        return _of_all(y_true, y_pred)


class _Largest(keras.Loss):
    def call(self, y_true, y_pred):
        return keras.ops.max(keras.ops.abs(y_true - y_pred), initial=0.0)


class _Composed(keras.Loss):
    def call(self, y_true, y_pred):
        return keras.losses.MeanSquaredError()(y_true, y_pred) + _Largest()(y_true, y_pred)


_ONE_NUMBER = {
    **{
        name: getattr(keras.losses, name)
        for name in (
            *("MeanSquaredError", "Huber", "BinaryCrossentropy", "CosineSimilarity", "Dice"),
        )
    },
    "sum": lambda: keras.losses.MeanSquaredError("sum"),
    "own": _OneNumber,
    "largest": _Largest,
    "composed": _Composed,
}


@pytest.mark.parametrize(("weighted", "rows"), [(True, 8), (False, 7), (True, 1)])
@pytest.mark.parametrize("loss", _ONE_NUMBER)
def test_losses_of_vectors_in_own_loops_equal_one_device(loss, weighted, rows, strategy_of):
    random = np.random.default_rng(5)
    y, p, weights = random.uniform(0.1, 0.9, (3, rows)).astype(np.float32)
    weights = weights if weighted else None
    expected, wanted = jax.value_and_grad(
        lambda p: jnp.sum(_ONE_NUMBER[loss]()(y, p, weights)), argnums=0
    )(jnp.asarray(p))
    strategy = strategy_of(2)
    of_replica = _ONE_NUMBER[loss]()

    def step(*batch):
        y, p, *weights = batch
        value, gradient = jax.value_and_grad(lambda p: of_replica(y, p, *weights))(p)
        return value, dist.get_replica_context().all_gather(gradient, 0)

    data = [(y, p, weights) if weighted else (y, p)]
    batch = next(iter(strategy.experimental_distribute_dataset(data)))
    values, gradients = strategy.run(step, args=batch)

    np.testing.assert_allclose(strategy.reduce("SUM", values, axis=None), expected, rtol=1e-5)
    gradient = strategy.experimental_local_results(gradients)[0]
    np.testing.assert_allclose(gradient, wanted, rtol=1e-4, atol=1e-6)
