"""What layers keep besides weights: that of one device in `fit`, combined by `run`."""

import keras
import numpy as np
import pytest

from distributary.errors import InvalidValueError

_X = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)


class _Sums(keras.layers.Layer):
    """Adds up the means of its inputs."""

    def __init__(self, aggregation):
        super().__init__()
        given = {"initializer": "zeros", "trainable": False, "aggregation": aggregation}
        self.sums = self.add_weight(shape=(6,), **given)

    def call(self, x):
        self.sums.assign(self.sums + keras.ops.stop_gradient(keras.ops.mean(x, 0)))
        return x


@pytest.mark.parametrize("aggregation", ["only_first_replica", "mean", "sum"])
def test_an_aggregation_of_state_counts_for_run_and_not_for_fit(aggregation, strategy):
    def step(method):
        with strategy.scope():
            layer = _Sums(aggregation)
            model = keras.Sequential([keras.Input((6,)), layer, keras.layers.Dense(3)])
            model.compile("sgd", "mse")
        if method == "fit":
            model.fit(_X, _X[:, :3], batch_size=8, verbose=0)
        else:
            (batch,) = strategy.experimental_distribute_dataset([_X])
            strategy.run(layer, args=(batch,))
        return np.asarray(layer.sums.value)

    np.testing.assert_allclose(step("fit"), _X.mean(0), rtol=1e-5, atol=1e-7)
    if aggregation == "sum":
        with pytest.raises(
            InvalidValueError, match=r"has aggregation 'sum'.*all_reduce\('SUM', value\)"
        ):
            step("run")
    else:
        rows = _X if aggregation == "mean" else _X[:4]
        np.testing.assert_allclose(step("run"), rows.mean(0), rtol=1e-5, atol=1e-7)


def test_a_metric_of_a_layer_that_nothing_updates_stays_zero(strategy):
    class Counts(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.metric = keras.metrics.Mean(name="counted")

        def call(self, x):
            return x

    x = np.ones((8, 3), np.float32)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), Counts(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")

    assert model.fit(x, x[:, :1], verbose=0).history["counted"] == [0.0]
