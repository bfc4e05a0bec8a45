"""What layers keep besides weights: that of one device in `fit`, combined by `run`."""

import warnings

import keras
import numpy as np
import pytest
from keras import layers as kl, ops

import distributary as dist
from distributary.errors import DistributaryWarning, InvalidValueError

_RANDOM = np.random.default_rng(0)
_X = _RANDOM.normal(size=(8, 6)).astype(np.float32)
_Y = _RANDOM.normal(size=(8, 3)).astype(np.float32)


@keras.saving.register_keras_serializable("tests")
class Keeping(kl.Layer):
    """Keeps what `update` makes of its state and its input."""

    def __init__(self, update, shape=(6,), dtype_of_state="float32"):
        super().__init__()
        self._update = update
        self._shape = shape
        self._dtype_of_state = dtype_of_state

    def build(self, input_shape):
        self.state = self.add_weight(
            shape=self._shape, initializer="zeros", trainable=False, dtype=self._dtype_of_state
        )

    def call(self, x):
        self.state.assign(self._update(self.state.value, ops.stop_gradient(x)))
        return x


def _nearest(x):
    """Returns which of three fixed codes is the nearest to each row, as one-hot rows."""
    codes = np.linspace(-1, 1, 18, dtype=np.float32).reshape(3, 6)
    distances = ops.sum(ops.square(x[:, None] - codes), -1)
    return ops.one_hot(ops.argmin(distances, -1), 3)


def _over_all_replicas(x):
    context = dist.get_replica_context()
    return x if context is None else context.all_reduce("SUM", x)


# By name: the update, the shape and the dtype of the state.
_STATES = {
    "a sum": (lambda s, x: s + ops.sum(x, 0), (6,), "float32"),
    "a moving average of counts": (
        lambda s, x: 0.99 * s + 0.01 * ops.sum(_nearest(x), 0),
        (3,),
        "float32",
    ),
    "a moving average of sums": (
        lambda s, x: 0.9 * s + (1 - 0.9) * ops.matmul(ops.transpose(_nearest(x)), x),
        (3, 6),
        "float32",
    ),
    "a histogram of integers": (
        lambda s, x: s + ops.sum(ops.cast(_nearest(x), "int32"), 0),
        (3,),
        "int32",
    ),
    "sums of segments": (
        lambda s, x: s + ops.segment_sum(x, ops.argmax(_nearest(x), -1), 3),
        (3, 6),
        "float32",
    ),
    "a sum of squares": (lambda s, x: s + ops.sum(x * x), (), "float32"),
    "a sum of the rows' means": (lambda s, x: s + ops.sum(ops.mean(x, 1)), (), "float32"),
    "a mean": (lambda s, x: 0.9 * s + 0.1 * ops.mean(x, 0), (6,), "float32"),
    "the mean of everything": (lambda s, x: s + ops.mean(x), (), "float32"),
    "a sum, divided": (lambda s, x: ops.sum(x, 0) / ops.shape(x)[0], (6,), "float32"),
    "a sum, times an inverse": (
        lambda s, x: ops.sum(x, 0) * (1 / ops.shape(x)[0]),
        (6,),
        "float32",
    ),
    "a sum of divided rows": (lambda s, x: ops.sum(x / ops.shape(x)[0], 0), (6,), "float32"),
    "second moments": (
        lambda s, x: ops.matmul(ops.transpose(x), x) / (ops.shape(x)[0] - 1),
        (6, 6),
        "float32",
    ),
    "shares of codes": (lambda s, x: s + ops.mean(_nearest(x), 0), (3,), "float32"),
    "the sum over all replicas": (
        lambda s, x: s + _over_all_replicas(ops.sum(x, 0)),
        (6,),
        "float32",
    ),
    "a count of steps": (lambda s, x: s + 1, (), "float32"),
}


def _fitted(strategy, update, shape, dtype, num_rows=8):
    """Returns what a layer keeps on each device after two steps of `fit`."""
    with strategy.scope():
        layer = Keeping(update, shape, dtype)
        model = keras.Sequential([keras.Input((6,)), layer, kl.Dense(3)], name="keeper")
        model.compile(keras.optimizers.SGD(0.05), "mse")
    x, y = _X[:num_rows], _Y[:num_rows]
    model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return [np.asarray(shard.data) for shard in layer.state.value.addressable_shards]


@pytest.mark.parametrize("num_rows", [8, 7])
@pytest.mark.parametrize("case", _STATES)
def test_fit_keeps_what_one_device_keeps(case, num_rows, strategy_of):
    (expected,) = _fitted(strategy_of(1), *_STATES[case], num_rows)

    copies = _fitted(strategy_of(2), *_STATES[case], num_rows)

    assert len(copies) == 2
    for copy in copies:
        np.testing.assert_allclose(copy, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layer", [
    lambda: kl.BatchNormalization(),
    lambda: kl.BatchNormalization(synchronized=True),
    lambda: kl.SpectralNormalization(kl.Dense(6)),
    lambda: kl.Dropout(0.5),
    lambda: kl.LayerNormalization(),
    lambda: kl.UnitNormalization(),
], ids=["bn", "synchronized bn", "spectral", "dropout", "layer norm", "unit"])  # fmt: skip
def test_layers_of_keras_say_nothing(layer, strategy_of):
    with strategy_of(2).scope():
        model = keras.Sequential([keras.Input((6,)), kl.Dense(6), layer(), kl.Dense(3)])
        model.compile("adam", "mse", metrics=["mae"])

    with warnings.catch_warnings():
        warnings.simplefilter("error", DistributaryWarning)
        model.fit(_X, _Y, batch_size=8, shuffle=False, verbose=0)


@pytest.mark.parametrize("aggregation", ["only_first_replica", "mean", "sum"])
def test_an_aggregation_of_state_counts_for_run_and_not_for_fit(aggregation, strategy_of):
    strategy = strategy_of(2)

    def step(method):
        with strategy.scope():
            layer = Keeping(lambda s, x: s + ops.mean(x, 0))
            model = keras.Sequential([keras.Input((6,)), layer, kl.Dense(3)])
            layer.state._aggregation = aggregation
            model.compile("sgd", "mse")
        if method == "fit":
            model.fit(_X, _Y, batch_size=8, shuffle=False, verbose=0)
        else:
            data = dist.data.Dataset.from_tensor_slices(_X).batch(8)
            strategy.run(layer, args=(next(iter(strategy.experimental_distribute_dataset(data))),))
        return np.asarray(layer.state.value)

    np.testing.assert_allclose(step("fit"), _X.mean(0), rtol=1e-5, atol=1e-7)
    if aggregation == "sum":
        with pytest.raises(
            InvalidValueError, match=r"has aggregation 'sum'.*all_reduce\('SUM', value\)"
        ):
            step("run")
    else:
        rows = _X if aggregation == "mean" else _X[:4]
        np.testing.assert_allclose(step("run"), rows.mean(0), rtol=1e-5, atol=1e-7)
