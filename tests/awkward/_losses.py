"""Losses of any shape: functions of the targets and the predictions of the whole batch."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax import lax
from keras import layers as kl, losses as kls, ops

from tests.awkward._case import add, compiled, net


def _loss(y: str = "targets", units: int = 3) -> Any:
    """A decorator for a function `(y, p) -> loss` that makes a case of it."""

    def register(function: Callable[[Any, Any], Any]) -> None:
        add(function.__name__, "losses", lambda: compiled(net(units=units), function), y=y)

    return register


def _losses(functions: dict[str, Callable[[Any, Any], Any]], y: str = "targets") -> None:
    """Makes cases of losses by name."""
    for name, function in functions.items():
        function.__name__ = name
        _loss(y)(function)


def _rows(y: Any, p: Any) -> Any:
    return jnp.mean(jnp.square(y - p), -1)


def _distances(a: Any, b: Any) -> Any:
    return jnp.sum(jnp.square(a[:, None] - b[None]), -1)


def _unit(z: Any) -> Any:
    return z / jnp.sqrt(jnp.sum(z * z, -1, keepdims=True) + 1e-6)


def _standardized(z: Any) -> Any:
    return (z - jnp.mean(z, 0)) / jnp.sqrt(jnp.var(z, 0) + 1e-3)


# Rows against rows.


@_loss(units=6)
def clip(y, p):
    logits = _unit(p[:, :3]) @ _unit(p[:, 3:]).T / 0.5
    labels = jnp.eye(logits.shape[0])
    one = kls.categorical_crossentropy(labels, logits, from_logits=True)
    other = kls.categorical_crossentropy(labels, logits.T, from_logits=True)
    return (one + other) / 2


@_loss("onehot")
def supervised_contrastive(y, p):
    z = _unit(p)
    logits = z @ z.T / 0.5 - 1e9 * jnp.eye(p.shape[0])
    same = y @ y.T * (1 - jnp.eye(p.shape[0]))
    log_share = logits - jax.nn.logsumexp(logits, 1, keepdims=True)
    return -jnp.mean(jnp.sum(same * log_share, 1) / jnp.maximum(jnp.sum(same, 1), 1))


@_loss("onehot")
def triplet_hard(y, p):
    d = _distances(p, p)
    same = y @ y.T
    hardest = jnp.max(jnp.where(same > 0, d, -1.0), 1)
    nearest = jnp.min(jnp.where(same > 0, 1e9, d), 1)
    return jnp.mean(jax.nn.relu(hardest - jnp.minimum(nearest, 50.0) + 0.5))


@_loss(units=6)
def barlow_twins(y, p):
    a, b = _standardized(p[:, :3]), _standardized(p[:, 3:])
    c = a.T @ b / p.shape[0]
    return jnp.sum(jnp.square(jnp.diag(c) - 1)) + 0.1 * jnp.sum(
        jnp.square(c - jnp.diag(jnp.diag(c)))
    )


@_loss()
def maximum_mean_discrepancy(y, p):
    k = lambda a, b: jnp.mean(jnp.exp(-0.5 * _distances(a, b)))
    return k(p, p) + k(y, y) - 2 * k(p, y)


@_loss()
def sliced_wasserstein(y, p):
    directions = jax.random.normal(jax.random.key(5), (3, 4), p.dtype)
    return jnp.mean(jnp.square(jnp.sort(p @ directions, 0) - jnp.sort(y @ directions, 0)))


@_loss()
def nearest_neighbours(y, p):
    d = _distances(p, p) + 1e3 * jnp.eye(p.shape[0])
    near, index = lax.top_k(-d, 2)
    return jnp.mean(-near) + jnp.mean(jnp.square(p[:, None] - y[index]))


@_loss("binary", 1)
def area_under_the_curve(y, p):
    gaps = p - p.T
    pairs = y * (1 - y.T)
    return jnp.sum(pairs * jnp.square(jax.nn.relu(1 - gaps))) / (jnp.sum(pairs) + 1)


@_loss()
def soft_ranks(y, p):
    rank = lambda z: jnp.sum(jax.nn.sigmoid((z[:, None] - z[None]) / 0.5), 1)
    return jnp.mean(jnp.square(rank(p) - rank(y))) / p.shape[0] ** 2


@_loss("positive", 1)
def cox_partial_likelihood(y, p):
    order = jnp.argsort(-y[:, 0])
    risk = p[order, 0]
    return -jnp.mean(risk - lax.cumlogsumexp(risk))


_losses(
    {
        "list_net": lambda y, p: -jnp.sum(jax.nn.softmax(y, 0) * jax.nn.log_softmax(p, 0)),
        "rows_in_vmap": lambda y, p: jnp.mean(
            jax.vmap(lambda one: jnp.mean(jnp.tanh(p @ one)))(p) - jnp.mean(p * y)
        ),
    }
)

# Statistics of all rows.


@_loss()
def trimmed(y, p):
    rows = jnp.sort(_rows(y, p))
    return jnp.mean(rows[: (3 * rows.shape[0]) // 4])


@_loss()
def mean_and_spread(y, p):
    rows = _rows(y, p)
    return jnp.mean(rows) + jnp.std(rows)


@_loss("bits")
def dice(y, p):
    p = jax.nn.sigmoid(p)
    return 1 - (2 * jnp.sum(y * p) + 1) / (jnp.sum(y) + jnp.sum(p) + 1)


@_loss("onehot")
def balanced_by_batch(y, p):
    weights = y.shape[0] / (3 * jnp.sum(y, 0) + 1)
    return kls.categorical_crossentropy(y, p, from_logits=True) * jnp.sum(y * weights, -1)


@_loss("onehot")
def load_balance(y, p):
    gates = ops.softmax(p)
    share = ops.mean(ops.one_hot(ops.argmax(gates, -1), 3), 0)
    return ops.sum(share * ops.mean(gates, 0)) * 3


@_loss("onehot")
def mutual_information(y, p):
    q = jax.nn.softmax(p)
    mean = jnp.mean(q, 0)
    return jnp.sum(mean * jnp.log(mean)) - jnp.mean(jnp.sum(q * jnp.log(q + 1e-9), -1))


@_loss()
def missing_targets(y, p):
    y = jnp.where(jnp.abs(y) > 1.2, jnp.nan, y)
    errors = jnp.where(jnp.isnan(y), 0.0, jnp.square(jnp.nan_to_num(y) - p))
    return jnp.sum(errors) / jnp.sum(~jnp.isnan(y))


_losses(
    {
        "median": lambda y, p: jnp.median(_rows(y, p)),
        "quantile": lambda y, p: jnp.quantile(_rows(y, p), 0.8),
        # XLA's partitioner computes with the ids in the gradients of these.
        "sorted_outputs": lambda y, p: jnp.mean(jnp.square(jnp.sort(p, -1) - y)),
        "median_of_outputs": lambda y, p: jnp.mean(
            jnp.square(y - jnp.median(p, -1, keepdims=True))
        ),
        "bytes_as_ids": lambda y, p: jnp.mean(
            jnp.square(y - jnp.take_along_axis(p, jnp.argsort(y, -1).astype(jnp.uint8), -1))
        ),
        "hardest_rows": lambda y, p: jnp.mean(lax.top_k(_rows(y, p), 4)[0]),
        "worst_row": lambda y, p: jnp.max(_rows(y, p)),
        "smooth_worst_row": lambda y, p: jax.nn.logsumexp(_rows(y, p)),
        "sum_of_all": lambda y, p: 0.05 * jnp.sum(jnp.square(y - p)),
        "sum_of_roots": lambda y, p: 0.1 * jnp.sqrt(jnp.sum(jnp.square(y - p))),
        "root_of_mean": lambda y, p: jnp.sqrt(jnp.mean(jnp.square(y - p))),
        "logarithm_of_mean": lambda y, p: jnp.log(jnp.mean(jnp.square(y - p))),
        "geometric_mean": lambda y, p: jnp.exp(jnp.mean(jnp.log(_rows(y, p) + 1e-2))),
        "harmonic_mean": lambda y, p: 1 / jnp.mean(1 / (_rows(y, p) + 0.1)),
        "power_mean": lambda y, p: jnp.mean(_rows(y, p) ** 3) ** (1 / 3),
        "tilted": lambda y, p: jnp.log(jnp.mean(jnp.exp(0.5 * _rows(y, p)))) / 0.5,
        "explained_variance": lambda y, p: (
            jnp.sum(jnp.square(y - p)) / jnp.sum(jnp.square(y - jnp.mean(y, 0)))
        ),
        "pearson": lambda y, p: -jnp.mean(_standardized(y) * _standardized(p)),
        "moments": lambda y, p: sum(
            jnp.sum(jnp.square(jnp.mean(p**k, 0) - jnp.mean(y**k, 0))) for k in (1, 2, 3)
        ),
        "range_of_predictions": lambda y, p: (
            jnp.mean(_rows(y, p)) + 0.1 * jnp.sum(jnp.max(p, 0) - jnp.min(p, 0))
        ),
        "scaled_by_largest": lambda y, p: jnp.mean(_rows(y, p)) / jnp.max(jnp.abs(y - p)),
    }
)

_losses(
    {
        "mean_of_shares": lambda y, p: jnp.sum(
            jnp.square(jnp.mean(jax.nn.softmax(p), 0) - jnp.mean(y, 0))
        )
    },
    y="onehot",
)

# Linear algebra of the batch.


@_loss()
def covariance_of_outputs(y, p):
    z = p - jnp.mean(p, 0)
    return jnp.mean(_rows(y, p)) + jnp.sum((z.T @ z / p.shape[0]) ** 2)


@_loss()
def whitened_by_eigenvectors(y, p):
    z = p - jnp.mean(p, 0)
    values, vectors = jnp.linalg.eigh(z.T @ z / p.shape[0] + jnp.diag(jnp.arange(3.0) + 0.1))
    return jnp.mean(jnp.square(z @ (vectors / jnp.sqrt(values)) @ vectors.T - y))


@_loss()
def log_determinant(y, p):
    z = p - jnp.mean(p, 0)
    return jnp.mean(_rows(y, p)) - 0.1 * jnp.linalg.slogdet(z.T @ z + jnp.eye(3))[1]


@_loss()
def solved_head(y, p):
    head = jnp.linalg.solve(p.T @ p + 0.1 * jnp.eye(3, dtype=p.dtype), p.T @ y)
    return jnp.mean(jnp.square(p @ head - y))


@_loss()
def mahalanobis(y, p):
    z = p - y
    inverse = jnp.linalg.inv(y.T @ y / y.shape[0] + 0.1 * jnp.eye(3, dtype=p.dtype))
    return jnp.mean(jnp.sum(z @ inverse * z, -1))


@_loss()
def centred_kernel_alignment(y, p):
    a, b = p - jnp.mean(p, 0), y - jnp.mean(y, 0)
    norm = lambda m: jnp.sqrt(jnp.sum(jnp.square(m)) + 1e-6)
    return 1 - norm(a.T @ b) ** 2 / (norm(a.T @ a) * norm(b.T @ b))


@_loss()
def orthogonal_triangular(y, p):
    r = jnp.linalg.qr(p, mode="r")
    return jnp.mean(_rows(y, p)) + 0.1 * jnp.sum(jnp.abs(jnp.diag(r)))


_losses(
    {
        "nuclear_norm": lambda y, p: (
            jnp.mean(_rows(y, p)) + 0.05 * jnp.sum(jnp.linalg.svd(p, compute_uv=False))
        )
    }
)

# The order of rows.


@_loss()
def scan_over_rows(y, p):
    def step(state, row):
        state = 0.8 * state + 0.2 * jnp.tanh(row)
        return state, jnp.sum(jnp.square(state - row))

    return jnp.mean(lax.scan(step, jnp.zeros(3, p.dtype), p - y)[1])


@_loss()
def associative_scan(y, p):
    combine = lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1])
    decay = jnp.full_like(p, 0.7)
    return jnp.mean(jnp.square(lax.associative_scan(combine, (decay, p - y))[1]))


@_loss()
def convolved_over_rows(y, p):
    smooth = jax.vmap(lambda c: jnp.convolve(c, jnp.array([0.25, 0.5, 0.25]), "same"), 1, 1)
    return jnp.mean(jnp.square(smooth(p) - y))


@_loss()
def reshaped_rows(y, p):
    n = p.shape[0]
    return jnp.mean(jnp.square(p.reshape(3, n).T - y)) + jnp.mean(_rows(y, p))


@_loss()
def sorted_by_targets(y, p):
    ordered = p[jnp.argsort(y[:, 0])]
    return jnp.mean(jax.nn.relu(ordered[:-1] - ordered[1:] + 0.5))


@_loss()
def one_hot_positions(y, p):
    n = p.shape[0]
    return jnp.mean(jnp.square(jnp.eye(n, dtype=p.dtype)[::-1] @ p - y))


_losses(
    {
        "weighted_by_position": lambda y, p: jnp.mean(_rows(y, p) * jnp.arange(p.shape[0])),
        "first_rows": lambda y, p: jnp.mean(_rows(y, p)[:4]),
        "last_row": lambda y, p: jnp.mean(_rows(y, p)) + _rows(y, p)[-1],
        "every_second_row": lambda y, p: jnp.mean(_rows(y, p)[::2]),
        "neighbours": lambda y, p: jnp.mean(_rows(y, p)) + jnp.mean(jnp.square(p[1:] - p[:-1])),
        "reversed_rows": lambda y, p: jnp.mean(jnp.square(p - y[::-1])),
        "rolled_rows": lambda y, p: jnp.mean(jnp.square(p - jnp.roll(y, 1, 0))),
        "cumulative_sum": lambda y, p: (
            jnp.mean(jnp.square(jnp.cumsum(p, 0) - jnp.cumsum(y, 0))) / 20
        ),
        "cumulative_maximum": lambda y, p: jnp.mean(
            jnp.square(lax.cummax(p, 0) - lax.cummax(y, 0))
        ),
        "cumulative_product": lambda y, p: jnp.mean(jnp.cumprod(1 + 0.1 * jnp.tanh(p - y), 0)),
        "fourier": lambda y, p: jnp.mean(
            jnp.square(jnp.abs(jnp.fft.rfft(p, axis=0)) - jnp.abs(jnp.fft.rfft(y, axis=0)))
        ),
        "flattened_softmax": lambda y, p: (
            -jnp.sum(jax.nn.softmax(y.reshape(-1)) * jax.nn.log_softmax(p.reshape(-1)))
        ),
        "replaced_row": lambda y, p: jnp.mean(_rows(y, p.at[0].set(1.0).at[-1].add(y[0]))),
    }
)

# Control flow, random numbers, callbacks, rules of differentiation.


@_loss()
def fixed_key(y, p):
    noise = jax.random.normal(jax.random.key(0), p.shape, p.dtype)
    return jnp.mean(jnp.square(y - p - 0.5 * noise))


@_loss()
def fixed_key_of_rows(y, p):
    keep = jax.random.bernoulli(jax.random.key(1), 0.6, (p.shape[0],))
    return jnp.sum(keep * _rows(y, p)) / jnp.sum(keep)


@_loss()
def ranks_by_callback(y, p):
    rows = lax.stop_gradient(_rows(y, p))
    shape = jax.ShapeDtypeStruct(rows.shape, rows.dtype)
    ranks = lambda r: np.argsort(np.argsort(np.asarray(r))).astype(r.dtype) / len(r)
    return jnp.mean(_rows(y, p) * jax.pure_callback(ranks, shape, rows))


@jax.custom_vjp
def _of_one_norm(z):
    return z


def _forward(z):
    return z, None


def _backward(_, g):
    return (g / (jnp.sqrt(jnp.sum(g * g)) + 1e-6),)


_of_one_norm.defvjp(_forward, _backward)


@_loss()
def gradient_inside(y, p):
    inner = jax.grad(lambda q: jnp.mean(jnp.exp(-_distances(q, y))))(p)
    return jnp.mean(_rows(y, p)) + 10 * jnp.sum(jnp.square(inner))


@_loss()
def straight_through(y, p):
    hard = (p > jnp.mean(p, 0)).astype(p.dtype)
    return jnp.mean(jnp.square(p + lax.stop_gradient(hard - p) - y))


@_loss()
def half_precision(y, p):
    low = (y - p).astype(jnp.bfloat16).astype(p.dtype)
    return jnp.max(jnp.abs(low)) + jnp.mean(jnp.square(y - p))


_losses(
    {
        "branch_on_mean": lambda y, p: lax.cond(
            jnp.mean(p) > jnp.mean(y),
            lambda: jnp.mean(jnp.abs(y - p)),
            lambda: 3 * jnp.mean(jnp.square(y - p)),
        ),
        "branch_on_rows": lambda y, p: (
            _rows(y, p) if p.shape[0] > 8 else 5 * jnp.abs(y - p).mean(-1)
        ),
        "scaled_by_rows": lambda y, p: _rows(y, p) * ops.cast(ops.shape(p)[0], p.dtype) / 10,
        "gradient_of_one_norm": lambda y, p: jnp.mean(_rows(y, _of_one_norm(p))),
    }
)

# Losses of Keras, whose divisors are those of the batch.


@_loss("labels")
def ignored_class(y, p):
    return kls.sparse_categorical_crossentropy(y, p, from_logits=True, ignore_class=1)


class _SumOverCount(kls.Loss):
    """Divides by the number of targets that are not zero."""

    def __init__(self):
        super().__init__(reduction=None)

    def call(self, y, p):
        return ops.sum(ops.square(y - p)) / ops.maximum(ops.sum(ops.cast(y > 0, p.dtype)), 1)


class _OwnCall(kls.Loss):
    """Computes all in `__call__`, and has no rows."""

    def __call__(self, y, p, sample_weight=None):
        return ops.sqrt(ops.mean(ops.square(y - p))) + 0.1 * ops.max(ops.abs(p))


_logits = functools.partial(functools.partial, from_logits=True)
_BUILT_IN: dict[str, tuple[Callable[..., Any], str, str | None]] = {
    "mse": (kls.MeanSquaredError, "targets", None),
    "mae": (kls.MeanAbsoluteError, "targets", None),
    "mape": (kls.MeanAbsolutePercentageError, "positive", None),
    "msle": (kls.MeanSquaredLogarithmicError, "positive", None),
    "huber": (functools.partial(kls.Huber, 0.7), "targets", None),
    "log_cosh": (kls.LogCosh, "targets", None),
    "cosine": (kls.CosineSimilarity, "targets", None),
    "hinge": (kls.Hinge, "signs", None),
    "squared_hinge": (kls.SquaredHinge, "signs", None),
    "categorical_hinge": (kls.CategoricalHinge, "onehot", None),
    "binary": (_logits(kls.BinaryCrossentropy), "bits", None),
    "binary_focal": (_logits(kls.BinaryFocalCrossentropy), "bits", None),
    "categorical": (_logits(kls.CategoricalCrossentropy, label_smoothing=0.1), "onehot", None),
    "categorical_focal": (_logits(kls.CategoricalFocalCrossentropy), "onehot", None),
    "sparse": (_logits(kls.SparseCategoricalCrossentropy), "labels", None),
    "sum_over_count": (_SumOverCount, "targets", None),
    "own_call": (_OwnCall, "targets", None),
    "kl_divergence": (kls.KLDivergence, "shares", "softmax"),
    "poisson": (kls.Poisson, "positive", "softplus"),
    "dice_loss": (kls.Dice, "bits", "sigmoid"),
    "dice_by_row": (functools.partial(kls.Dice, axis=-1), "bits", "sigmoid"),
    "tversky_loss": (kls.Tversky, "bits", "sigmoid"),
    "generalized_crossentropy": (kls.CategoricalGeneralizedCrossEntropy, "labels", "softmax"),
}


def _built_in(make: Callable[..., Any], activation: str | None = None, **reduction: Any) -> Any:
    return lambda: compiled(net(activation=activation), make(**reduction))


for _name, (_make, _y, _activation) in _BUILT_IN.items():
    add(f"keras_{_name}", "losses", _built_in(_make, _activation), y=_y)
for _reduction in ("sum", "mean", "mean_with_sample_weight"):
    for _name in ("mse", "sparse"):
        _make, _y, _ = _BUILT_IN[_name]
        add(
            f"keras_{_name}_{_reduction}",
            "losses",
            _built_in(_make, reduction=_reduction),
            y=_y,
            fit=lambda model, x, y: {"sample_weight": (np.arange(len(x)) % 4).astype("float32")},
        )


def _ctc() -> Any:
    model = keras.Sequential([keras.Input((6, 4)), kl.Dense(8, "tanh"), kl.Dense(5)])
    return compiled(model, kls.CTC())


add("keras_ctc", "losses", _ctc, x="series", y="sequence labels")
