"""What layers keep besides weights: means over rows are combined, sums over rows are warned of."""

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
_SUMS = {
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
}
_MEANS = {
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


def _fitted(strategy, update, shape, dtype, x=_X, y=_Y, batch_size=8):
    """Returns what a layer keeps after a step of `fit`, and the warnings."""
    with strategy.scope():
        layer = Keeping(update, shape, dtype)
        model = keras.Sequential([keras.Input((6,)), layer, kl.Dense(3)], name="keeper")
        model.compile(keras.optimizers.SGD(0.05), "mse")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(x, y, batch_size=batch_size, verbose=0)
    found = [str(w.message) for w in caught if issubclass(w.category, DistributaryWarning)]
    return np.asarray(layer.state.value), found


@pytest.mark.parametrize("case", _SUMS)
def test_a_sum_over_rows_is_warned_of(case, strategy_of):
    state, found = _fitted(strategy_of(2), *_SUMS[case])

    assert len(found) == 1
    assert found[0].startswith("keeper: a layer keeps a sum over rows of the batch, by ")
    assert f" at {__file__}:" in found[0]
    assert "all_reduce('SUM', value)" in found[0]
    expected, quiet = _fitted(strategy_of(1), *_SUMS[case])
    assert quiet == []
    assert not np.allclose(state, expected, rtol=1e-3)


@pytest.mark.parametrize("case", _MEANS)
def test_a_mean_over_rows_is_that_of_one_device_and_says_nothing(case, strategy_of):
    state, found = _fitted(strategy_of(2), *_MEANS[case])

    assert found == []
    if case != "second moments":  # whose divisor is one less than the number of a replica's rows
        np.testing.assert_allclose(
            state, _fitted(strategy_of(1), *_MEANS[case])[0], rtol=1e-5, atol=1e-6
        )


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


def test_an_uneven_batch_is_warned_of_too(strategy_of):
    found = _fitted(strategy_of(2), *_SUMS["a sum"], _X[:7], _Y[:7])[1]

    assert len(found) == 1
    assert "about 1/2 of the sum on one device" in found[0]


def test_own_loops_are_warned_of_too(strategy_of):
    strategy = strategy_of(2)
    with strategy.scope():
        layer = Keeping(*_SUMS["a sum"])
        layer.build((None, 6))
    data = strategy.experimental_distribute_dataset(
        dist.data.Dataset.from_tensor_slices(_X).batch(8)
    )

    with pytest.warns(DistributaryWarning, match="a layer keeps a sum over rows"):
        strategy.run(layer, args=(next(iter(data)),))


@pytest.mark.parametrize("method", ["fit", "run"])
def test_an_aggregation_of_state_is_followed_or_refused(method, strategy_of):
    strategy = strategy_of(2)

    def step(aggregation):
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

    np.testing.assert_allclose(step("only_first_replica"), _X[:4].mean(0), rtol=1e-5)
    np.testing.assert_allclose(step("mean"), _X.mean(0), rtol=1e-5, atol=1e-7)
    with pytest.raises(
        InvalidValueError, match=r"has aggregation 'sum'.*all_reduce\('SUM', value\)"
    ):
        step("sum")
