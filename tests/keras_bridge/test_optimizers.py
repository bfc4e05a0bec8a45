"""Optimizers under a strategy see the gradient of the whole batch.

That they take the steps of one device, tests/awkward and `test_sharded_state` hold.
"""

import keras
import numpy as np
from keras import layers as kl, optimizers as ko

_RANDOM = np.random.default_rng(1)
_X = _RANDOM.normal(size=(24, 3)).astype(np.float32)
_Y = _RANDOM.normal(size=(24, 2)).astype(np.float32) * 3


def test_clipping_applies_to_the_gradient_of_the_whole_batch(strategy_of, train):
    # Rows of replica 0 have a large gradient, those of replica 1 the opposite one.
    x = np.ones((8, 1), np.float32)
    y = np.repeat([10.0, -10.2], 4)[:, None].astype(np.float32)

    def build():
        model = keras.Sequential([keras.Input((1,)), kl.Dense(1, kernel_initializer="zeros")])
        model.compile(ko.SGD(1.0, clipvalue=1.0), "mse")
        return model

    model = train(build, x, y, strategy=strategy_of(2)).model

    # The mean of (pred - y) * 2 is 0.2, below the limit; those of the replicas are 20 above it.
    np.testing.assert_allclose(model.layers[0].kernel.value, [[-0.2]], rtol=1e-4)


def test_gradients_and_variables_may_be_iterators():
    model = keras.Sequential([keras.Input((3,)), kl.Dense(2)])
    optimizer = ko.SGD(0.5)
    before = model.get_weights()

    optimizer.apply((np.ones(v.shape) for v in model.weights), iter(model.trainable_variables))

    for weight, old in zip(model.get_weights(), before, strict=True):
        np.testing.assert_allclose(weight, old - 0.5, rtol=1e-6)


def test_a_step_that_overflows_on_one_replica_is_skipped_on_all(strategy_of, train):
    def build():
        keras.config.set_dtype_policy("mixed_float16")
        model = keras.Sequential([keras.Input((3,)), kl.Dense(2)])
        model.compile(ko.LossScaleOptimizer(ko.SGD(0.05), initial_scale=64.0), "mse")
        return model

    x, y = _X[:16].copy(), _Y[:16]  # two steps of 8 rows
    x[7] = np.inf  # on replica 1

    skipped = train(build, x[:8], y[:8], strategy=strategy_of(2))
    optimizer = skipped.model.optimizer
    for before, variable in zip(skipped.initial, skipped.model.variables, strict=True):
        np.testing.assert_array_equal(variable.value, before, err_msg=variable.path)
        assert len(variable.value.addressable_shards) == 2
        for shard in variable.value.addressable_shards:
            np.testing.assert_array_equal(shard.data, before, err_msg=variable.path)
    assert int(optimizer.iterations) == 0
    assert [float(s.data) for s in optimizer.dynamic_scale.value.addressable_shards] == [32] * 2

    skipped.model.fit(x[8:], y[8:], batch_size=8, shuffle=False, verbose=0)
    assert int(optimizer.iterations) == 1
    alone = train(build, x, y)
    assert float(alone.model.optimizer.dynamic_scale.value) == 32
    for expected, actual in zip(alone.model.variables, skipped.model.variables, strict=True):
        assert np.all(np.isfinite(actual.value))
        np.testing.assert_allclose(actual.value, expected.value, rtol=2e-3, atol=2e-4)
