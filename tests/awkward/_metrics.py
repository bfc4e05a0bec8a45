"""Metrics: functions of the batch, classes that keep anything, and those of Keras."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax import lax
from keras import metrics as km, ops

from tests.awkward._case import add, compiled, net


def _metric(name, make, *, y="targets", activation=None, units=3, loss="mse", weighted=False):
    def build():
        kind = "weighted_metrics" if weighted else "metrics"
        made = make()
        return compiled(net(units=units, activation=activation), loss, **{kind: [made]})

    # The weights of rows are those of the weighted metrics alone.
    fit = (lambda model, x, y: {"sample_weight": abs(x[:, 0]) + 0.1}) if weighted else {}
    add(name, "metrics", build, y=y, fit=fit)


def _named(function: Callable[..., Any], name: str) -> Callable[[], Any]:
    """Returns what makes a metric of that name: the function itself."""
    function.__name__ = name
    return lambda: function


def _correlation(y, p):
    a, b = y - jnp.mean(y, 0), p - jnp.mean(p, 0)
    return jnp.sum(a * b) / jnp.sqrt(jnp.sum(a * a) * jnp.sum(b * b))


for _name, _function in {
    "rows": lambda y, p: ops.cast(ops.shape(p)[0], p.dtype),
    "largest": lambda y, p: jnp.max(p),
    "smallest_error": lambda y, p: jnp.min(jnp.abs(y - p)),
    "root_mean_square": lambda y, p: jnp.sqrt(jnp.mean(jnp.square(y - p))),
    "correlation": _correlation,
    "median_error": lambda y, p: jnp.median(jnp.abs(y - p)),
    "upper_quantile": lambda y, p: jnp.quantile(jnp.abs(y - p), 0.9),
    "spread": lambda y, p: jnp.std(p),
    "norm": lambda y, p: jnp.linalg.norm(p),
    "sum_of_errors": lambda y, p: jnp.sum(jnp.abs(y - p)),
    "condition_number": lambda y, p: jnp.linalg.norm(p, 2),
    "recall_at_1": lambda y, p: jnp.mean(
        jnp.argmax(p @ y.T, 1) == jnp.arange(p.shape[0]), dtype=p.dtype
    ),
    "first_error": lambda y, p: jnp.mean(jnp.abs(y[0] - p[0])),
    "last_error": lambda y, p: jnp.mean(jnp.abs(y[-1] - p[-1])),
    "distinct_classes": lambda y, p: jnp.sum(jnp.any(jax.nn.one_hot(jnp.argmax(p, 1), 3), 0)) * 1.0,
    "rank_correlation": lambda y, p: _correlation(
        jnp.argsort(jnp.argsort(y, 0), 0) * 1.0, jnp.argsort(jnp.argsort(p, 0), 0) * 1.0
    ),
    "error_of_rows": lambda y, p: jnp.max(jnp.abs(y - p), -1),
}.items():
    _metric(f"function_{_name}", _named(_function, _name))
_metric("weighted_largest", _named(lambda y, p: jnp.max(p, -1), "largest"), weighted=True)


class _Keeps(keras.Metric):
    """A metric whose state `change` makes of the old one and the batch, and `read` returns."""

    def __init__(self, change, read, shape=(), initial=0.0, dtype=None):
        super().__init__(name="kept")
        self.change, self.read = change, read
        initializer = keras.initializers.Constant(initial)
        self.state = self.add_variable(shape, initializer, dtype=dtype, name="state")

    def update_state(self, y, p, sample_weight=None):
        self.state.assign(self.change(ops.convert_to_tensor(self.state), y, p))

    def result(self):
        return self.read(ops.convert_to_tensor(self.state))


def _welford(state, y, p):
    count, mean, square = state
    errors = jnp.ravel(y - p)
    n, d = errors.size, jnp.mean(errors) - mean
    total = count + n
    square = square + jnp.sum(jnp.square(errors - jnp.mean(errors))) + d**2 * count * n / total
    return jnp.stack([total, mean + d * n / total, square])


def _of_pairs(state, y, p):
    y, p = jnp.ravel(y), jnp.ravel(p)
    return state + jnp.stack(
        [jnp.sum(a) for a in (jnp.ones_like(y), y, p, y * y, p * p, y * p)]
    ).astype(state.dtype)


def _pearson(s):
    n, y, p, yy, pp, yp = s
    return (n * yp - y * p) / jnp.sqrt((n * yy - y * y) * (n * pp - p * p) + 1e-6)


_error = lambda y, p: jnp.mean(jnp.abs(y - p))
_same = lambda s: s
for _name, _change, _read, _more in [
    ("maximum", lambda s, y, p: jnp.maximum(s, jnp.max(p)), _same, {"initial": -99.0}),
    ("last_batch", lambda s, y, p: _error(y, p), _same, {}),
    ("moving_average", lambda s, y, p: 0.7 * s + 0.3 * _error(y, p), _same, {}),
    ("batches", lambda s, y, p: s + 1, _same, {}),
    ("rows_seen", lambda s, y, p: s + y.shape[0], _same, {}),
    ("welford", _welford, lambda s: s[2] / s[0], {"shape": (3,)}),
    ("pearson_of_sums", _of_pairs, _pearson, {"shape": (6,)}),
    (
        "seen_classes",
        lambda s, y, p: s | jnp.any(jax.nn.one_hot(jnp.argmax(p, 1), 3, dtype=bool), 0),
        lambda s: jnp.sum(s) / 3,
        {"shape": (3,), "initial": False, "dtype": "bool"},
    ),
    (
        "confusion",
        lambda s, y, p: (
            s + jax.nn.one_hot(jnp.argmax(y, 1), 3).T @ jax.nn.one_hot(jnp.argmax(p, 1), 3)
        ),
        lambda s: jnp.mean(jnp.diag(s) / (jnp.sum(s, 1) + 1)),
        {"shape": (3, 3)},
    ),
    (
        "queue_of_errors",
        lambda s, y, p: jnp.concatenate([jnp.mean(jnp.abs(y - p), 1), s])[:20],
        lambda s: jnp.median(s),
        {"shape": (20,)},
    ),
    (
        "branching",
        lambda s, y, p: lax.cond(jnp.mean(p) > 0, lambda: s + 1, lambda: 0.5 * s),
        _same,
        {},
    ),
    (
        "streak",
        lambda s, y, p: lax.scan(
            lambda c, e: (jnp.where(e < 1, c + 1, 0.0), None), s, jnp.mean(jnp.abs(y - p), 1)
        )[0],
        _same,
        {},
    ),
]:
    _metric(
        f"class_{_name}",
        lambda change=_change, read=_read, more=_more: _Keeps(change, read, **more),
    )


class _Several(keras.Metric):
    """Returns a dictionary of a sum, a largest and a count."""

    def __init__(self):
        super().__init__(name="several")
        self.total = self.add_variable((), "zeros", name="total")
        self.top = self.add_variable((), "zeros", name="top")
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, y, p, sample_weight=None):
        errors = ops.abs(y - p)
        self.total.assign(self.total + ops.sum(errors))
        self.top.assign(ops.maximum(self.top, ops.max(errors)))
        self.count.assign(self.count + ops.cast(ops.size(errors), self.count.dtype))

    def result(self):
        return {
            "mean": self.total / self.count,
            "top": self.top * 1.0,
            "gap": self.top - self.total,
        }


class _NotReset(keras.Metric):
    """Counts batches since it was made: `reset_state` does nothing."""

    def __init__(self):
        super().__init__(name="ever")
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, y, p, sample_weight=None):
        self.count.assign_add(ops.mean(ops.abs(p)))

    def reset_state(self):
        pass

    def result(self):
        return self.count * 1.0


class _Inner(keras.Metric):
    """Made of two metrics of Keras."""

    def __init__(self):
        super().__init__(name="ratio")
        self.a, self.b = km.Mean(name="a"), km.Sum(name="b")

    def update_state(self, y, p, sample_weight=None):
        self.a.update_state(ops.max(p))
        self.b.update_state(ops.sqrt(ops.mean(ops.square(y))))

    def reset_state(self):
        self.a.reset_state()
        self.b.reset_state()

    def result(self):
        return self.a.result() / (self.b.result() + 1.0)


class _Weighted(keras.Metric):
    """The largest error times its row's weight, and the sum of weights."""

    def __init__(self):
        super().__init__(name="weighted")
        self.top = self.add_variable((), "zeros", name="top")
        self.total = self.add_variable((), "zeros", name="total")

    def update_state(self, y, p, sample_weight=None):
        errors = ops.mean(ops.abs(y - p), -1)
        if sample_weight is not None:
            weight = ops.reshape(sample_weight, (-1,))
            errors = errors * weight
            self.total.assign_add(ops.sum(weight))
        self.top.assign(ops.maximum(self.top, ops.max(errors)))

    def result(self):
        return self.top + self.total / 100


_metric("class_dictionary", _Several)
_metric("class_not_reset", _NotReset)
_metric("class_of_two", _Inner)
_metric("class_weighted", _Weighted, weighted=True)


# Metrics of Keras.

for _name, _make, _y, _activation in [
    ("mean_absolute_error", km.MeanAbsoluteError, "targets", None),
    ("mean_absolute_percentage", km.MeanAbsolutePercentageError, "positive", None),
    ("mean_squared_logarithm", km.MeanSquaredLogarithmicError, "positive", None),
    ("root_mean_squared_error", km.RootMeanSquaredError, "targets", None),
    ("log_cosh_error", km.LogCoshError, "targets", None),
    ("cosine_similarity", km.CosineSimilarity, "targets", None),
    ("r2", km.R2Score, "targets", None),
    ("pearson_correlation", km.PearsonCorrelation, "targets", None),
    ("concordance_correlation", km.ConcordanceCorrelation, "targets", None),
    ("kl", km.KLDivergence, "shares", "softmax"),
    ("poisson", km.Poisson, "positive", "softplus"),
    ("hinge", km.Hinge, "signs", None),
    ("squared_hinge", km.SquaredHinge, "signs", None),
    ("categorical_hinge", km.CategoricalHinge, "onehot", None),
    ("binary_crossentropy", km.BinaryCrossentropy, "bits", "sigmoid"),
    ("categorical_crossentropy", km.CategoricalCrossentropy, "onehot", "softmax"),
    ("accuracy", lambda: km.Accuracy(), "bits", None),
    ("binary_accuracy", km.BinaryAccuracy, "bits", "sigmoid"),
    ("categorical_accuracy", km.CategoricalAccuracy, "onehot", "softmax"),
    ("top_k_accuracy", lambda: km.TopKCategoricalAccuracy(2), "onehot", "softmax"),
    ("auc", lambda: km.AUC(num_thresholds=50), "bits", "sigmoid"),
    ("auc_of_precision", lambda: km.AUC(num_thresholds=20, curve="PR"), "bits", "sigmoid"),
    ("precision", km.Precision, "bits", "sigmoid"),
    ("precision_of_top", lambda: km.Precision(top_k=1), "onehot", "softmax"),
    ("recall", lambda: km.Recall(thresholds=[0.3, 0.6]), "bits", "sigmoid"),
    ("precision_at_recall", lambda: km.PrecisionAtRecall(0.6), "bits", "sigmoid"),
    ("recall_at_precision", lambda: km.RecallAtPrecision(0.5), "bits", "sigmoid"),
    ("sensitivity", lambda: km.SensitivityAtSpecificity(0.5), "bits", "sigmoid"),
    ("specificity", lambda: km.SpecificityAtSensitivity(0.5), "bits", "sigmoid"),
    ("true_positives", km.TruePositives, "bits", "sigmoid"),
    ("false_negatives", lambda: km.FalseNegatives(thresholds=0.4), "bits", "sigmoid"),
    ("true_negatives", km.TrueNegatives, "bits", "sigmoid"),
    ("false_positives", lambda: km.FalsePositives([0.2, 0.7]), "bits", "sigmoid"),
    ("f1", lambda: km.F1Score("macro"), "onehot", "softmax"),
    ("f1_micro", lambda: km.F1Score("micro"), "bits", "sigmoid"),
    ("f_beta", lambda: km.FBetaScore("weighted", beta=2.0, threshold=0.4), "bits", "sigmoid"),
    ("binary_iou", lambda: km.BinaryIoU([0, 1], 0.5), "bits", "sigmoid"),
    ("one_hot_iou", lambda: km.OneHotIoU(3, [0, 2]), "onehot", "softmax"),
    ("one_hot_mean_iou", lambda: km.OneHotMeanIoU(3), "onehot", "softmax"),
]:
    _metric(f"keras_{_name}_metric", _make, y=_y, activation=_activation)
for _name, _make, _y in [
    ("auc", lambda: km.AUC(num_thresholds=50), "bits"),
    ("f1", lambda: km.F1Score("macro"), "onehot"),
    ("r2", km.R2Score, "targets"),
    ("pearson", km.PearsonCorrelation, "targets"),
    ("one_hot_mean_iou", lambda: km.OneHotMeanIoU(3), "onehot"),
    ("root_mean_squared_error", km.RootMeanSquaredError, "targets"),
    ("precision", km.Precision, "bits"),
]:
    _metric(f"keras_{_name}_weighted", _make, y=_y, activation="sigmoid", weighted=True)
_metric(
    "keras_sparse_accuracy",
    lambda: "accuracy",
    y="labels",
    loss="sparse_categorical_crossentropy",
    activation="softmax",
)
for _name, _make in {
    "mean_iou": lambda: km.MeanIoU(3, sparse_y_pred=False),
    "iou": lambda: km.IoU(3, [0, 1], sparse_y_pred=False),
    "sparse_crossentropy": km.SparseCategoricalCrossentropy,
}.items():
    _metric(
        f"keras_{_name}",
        _make,
        y="labels",
        loss="sparse_categorical_crossentropy",
        activation="softmax",
    )
# Every part of a batch has rows of one class only.
for _name, _make in [
    ("auc", lambda: km.AUC(num_thresholds=50)),
    ("precision", km.Precision),
    ("sensitivity", lambda: km.SensitivityAtSpecificity(0.5)),
    ("f1", lambda: km.F1Score(threshold=0.5)),
]:
    _metric(
        f"sorted_classes_{_name}",
        _make,
        y="sorted binary",
        units=1,
        activation="sigmoid",
        loss="binary_crossentropy",
    )
