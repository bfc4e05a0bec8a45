"""Optimizers under a strategy take the steps they take on one device."""

import keras
import numpy as np
import pytest
from keras import layers as kl, optimizers as ko

_RANDOM = np.random.default_rng(1)
_X = _RANDOM.normal(size=(24, 3)).astype(np.float32)
_Y = _RANDOM.normal(size=(24, 2)).astype(np.float32) * 3


def _model_with(make_optimizer, loss="mse", **kwargs):
    """Three steps of 8 rows each make one epoch."""

    def build():
        model = keras.Sequential([keras.Input((3,)), kl.Dense(2, "softsign")])
        model.compile(make_optimizer(), loss, **kwargs)
        model.optimizer.build(model.trainable_variables)
        return model

    return build


def _slots(model):
    return {v.path: np.array(v.value) for v in model.optimizer.variables}


def _assert_same_slots(alone, distributed, rtol=1e-4):
    expected, actual = _slots(alone.model), _slots(distributed.model)
    assert actual.keys() == expected.keys()
    num_replicas = distributed.strategy.num_replicas_in_sync
    for variable in distributed.model.optimizer.variables:
        assert len(variable.value.sharding.device_set) == num_replicas, variable.path
    for path in expected:
        scale = float(np.max(np.abs(expected[path]), initial=0))
        np.testing.assert_allclose(
            actual[path], expected[path], rtol=rtol, atol=1e-5 * scale + 1e-9, err_msg=path
        )


_OPTIMIZERS = {
    "norms of rows and columns": lambda: ko.Adafactor(0.5),
    "products of matrices": lambda: ko.Muon(0.01),
    "a norm of all, and averages": lambda: ko.AdamW(
        0.01, weight_decay=0.1, global_clipnorm=0.3, use_ema=True, ema_overwrite_frequency=2
    ),
    "variables of its own": lambda: ko.ScheduleFreeAdamW(0.01, warmup_steps=2),
    "a branch": lambda: ko.LossScaleOptimizer(ko.Lamb(0.1), 8.0, dynamic_growth_steps=2),
    "several": lambda: ko.MultiOptimizer(
        ko.OptimizerMap(ko.SGD(0.1, momentum=0.9), {".*bias": ko.Adam(0.01)})
    ),
}


@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_optimizers_take_the_steps_of_one_device(name, train_twice, assert_same_training):
    alone, distributed = train_twice(_model_with(_OPTIMIZERS[name]), _X, _Y)

    assert_same_training(alone, distributed, rtol=1e-3)
    _assert_same_slots(alone, distributed)
    assert int(distributed.model.optimizer.iterations) == 3


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


# Schedules

_SCHEDULES = [
    ko.schedules.CosineDecay(0.01, 4, warmup_target=0.1, warmup_steps=2),
    ko.schedules.PiecewiseConstantDecay([1], [0.1, 0.01]),
]


def test_schedules_advance_as_on_one_device(train_twice, assert_same_training):
    names = [type(schedule).__name__ for schedule in _SCHEDULES]

    def build():
        inputs = keras.Input((3,))
        optimizers = {
            f"{name}/.*": ko.SGD(schedule) for name, schedule in zip(names, _SCHEDULES, strict=True)
        }
        model = keras.Model(inputs, {name: kl.Dense(2, name=name)(inputs) for name in names})
        model.compile(ko.MultiOptimizer(ko.OptimizerMap(ko.SGD(0.0), optimizers)), "mse")
        return model

    alone, distributed = train_twice(build, _X, dict.fromkeys(names, _Y))

    assert_same_training(alone, distributed)


# Mixed precision


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


def test_a_loss_scale_that_suits_one_device_suits_several_replicas(train_twice):
    def build():
        keras.config.set_dtype_policy("mixed_float16")
        return _model_with(lambda: ko.SGD(0.05))()

    alone, distributed = train_twice(build, _X, _Y, num_replicas=4)

    assert isinstance(distributed.model.optimizer, ko.LossScaleOptimizer)
    assert [int(t.model.optimizer.iterations) for t in (alone, distributed)] == [3, 3]
    for trained in (alone, distributed):
        assert float(trained.model.optimizer.dynamic_scale.value) == 2**15
