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


# `Optimizer` is the base class, `OptimizerMap` an argument of `MultiOptimizer`.
_OPTIMIZERS = {
    ko.SGD: lambda: ko.SGD(0.1, momentum=0.9, nesterov=True),
    ko.RMSprop: lambda: ko.RMSprop(0.01, momentum=0.5, centered=True),
    ko.Adam: lambda: ko.Adam(0.01, amsgrad=True),
    ko.AdamW: lambda: ko.AdamW(0.01, weight_decay=0.1),
    ko.Adadelta: lambda: ko.Adadelta(1.0, epsilon=1e-3),
    ko.Adagrad: lambda: ko.Adagrad(0.1),
    ko.Adamax: lambda: ko.Adamax(0.01),
    ko.Adafactor: lambda: ko.Adafactor(0.5),
    ko.Nadam: lambda: ko.Nadam(0.01),
    ko.Ftrl: lambda: ko.Ftrl(0.1, l1_regularization_strength=0.01),
    ko.Lion: lambda: ko.Lion(0.01),
    ko.Lamb: lambda: ko.Lamb(0.01),
    ko.Muon: lambda: ko.Muon(0.01),
    ko.ScheduleFreeAdamW: lambda: ko.ScheduleFreeAdamW(0.01, warmup_steps=2),
    ko.LossScaleOptimizer: lambda: ko.LossScaleOptimizer(ko.SGD(0.1), 8.0, dynamic_growth_steps=2),
    ko.MultiOptimizer: lambda: ko.MultiOptimizer(
        ko.OptimizerMap(ko.SGD(0.1), {".*bias": ko.Adam(0.01)})
    ),
}


def test_every_public_optimizer_is_compared(public_classes):
    assert public_classes(ko, ko.Optimizer) == {ko.Optimizer, *_OPTIMIZERS}


@pytest.mark.parametrize("kind", _OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_every_optimizer_takes_the_steps_of_one_device(kind, train_twice, assert_same_training):
    alone, distributed = train_twice(_model_with(_OPTIMIZERS[kind]), _X, _Y)

    assert_same_training(alone, distributed, rtol=1e-3)
    _assert_same_slots(alone, distributed)
    assert int(distributed.model.optimizer.iterations) == 3


_OPTIONS = {
    # The gradients' norms are above 1, so all limits are reached.
    "clipnorm": lambda: ko.SGD(0.1, clipnorm=0.3),
    "global_clipnorm": lambda: ko.SGD(0.1, global_clipnorm=0.3),
    "clipvalue": lambda: ko.SGD(0.1, clipvalue=0.1),
    "weight_decay": lambda: ko.SGD(0.1, weight_decay=0.2),
    "use_ema": lambda: ko.SGD(0.1, use_ema=True, ema_momentum=0.6),
    "ema_overwrite": lambda: ko.SGD(0.1, use_ema=True, ema_momentum=0.6, ema_overwrite_frequency=2),
    "gradient_accumulation": lambda: ko.Adam(0.01, gradient_accumulation_steps=2),
    "loss_scale_factor": lambda: ko.SGD(0.1, loss_scale_factor=16.0),
}


@pytest.mark.parametrize("name", _OPTIONS)
def test_options_of_optimizers_see_the_whole_batch(name, train_twice, assert_same_training):
    alone, distributed = train_twice(
        _model_with(_OPTIONS[name]), _X, _Y, num_replicas=4 if "clip" in name else 2
    )

    assert_same_training(alone, distributed)
    _assert_same_slots(alone, distributed)


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


def test_accumulated_gradients_are_applied_every_second_step(strategy_of, train):
    build = _model_with(lambda: ko.SGD(0.1, gradient_accumulation_steps=2))

    one_step = train(build, _X[:8], _Y[:8], strategy=strategy_of(2))
    both_steps = train(build, _X[:16], _Y[:16], strategy=strategy_of(2))
    at_once = train(
        _model_with(lambda: ko.SGD(0.1)), _X[:16], _Y[:16], strategy=strategy_of(2), batch_size=16
    )

    for before, variable in zip(one_step.initial, one_step.model.variables, strict=True):
        np.testing.assert_array_equal(variable.value, before)
    for expected, actual in zip(at_once.model.variables, both_steps.model.variables, strict=True):
        np.testing.assert_allclose(actual.value, expected.value, rtol=1e-5, atol=1e-6)


# Schedules

_SCHEDULES = [
    ko.schedules.CosineDecay(0.01, 4, warmup_target=0.1, warmup_steps=2),
    ko.schedules.CosineDecayRestarts(0.1, 2),
    ko.schedules.ExponentialDecay(0.1, 1, 0.5),
    ko.schedules.InverseTimeDecay(0.1, 1, 0.5),
    ko.schedules.PiecewiseConstantDecay([1], [0.1, 0.01]),
    ko.schedules.PolynomialDecay(0.1, 2),
]


def test_every_public_schedule_is_compared(public_classes):
    base = ko.schedules.LearningRateSchedule

    assert public_classes(ko.schedules, base) == {base, *map(type, _SCHEDULES)}


def test_every_schedule_advances_as_on_one_device(train_twice, assert_same_training):
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


def _overflowing(bad_row):
    """Two steps of 8 rows; one row of the first is not finite."""
    x = _X[:16].copy()
    x[bad_row] = np.inf
    return x, _Y[:16]


@pytest.mark.parametrize("bad_row", [0, 7], ids=["on replica 0", "on replica 1"])
def test_a_step_that_overflows_on_one_replica_is_skipped_on_all(bad_row, strategy_of, train):
    def build():
        keras.config.set_dtype_policy("mixed_float16")
        model = keras.Sequential([keras.Input((3,)), kl.Dense(2)])
        model.compile(ko.LossScaleOptimizer(ko.SGD(0.05), initial_scale=64.0), "mse")
        return model

    x, y = _overflowing(bad_row)

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


def test_the_loss_scale_grows_after_finite_steps_as_on_one_device(train_twice):
    make = lambda: ko.LossScaleOptimizer(ko.SGD(0.1), 4.0, dynamic_growth_steps=2)

    alone, distributed = train_twice(_model_with(make), _X, _Y, epochs=2)

    for trained in (alone, distributed):
        assert float(trained.model.optimizer.dynamic_scale.value) == 32.0
        assert int(trained.model.optimizer.step_counter.value) == 0


@pytest.mark.parametrize("num_replicas", [2, 4])
def test_a_loss_scale_that_suits_one_device_suits_several_replicas(num_replicas, train_twice):
    def build():
        keras.config.set_dtype_policy("mixed_float16")
        return _model_with(lambda: ko.SGD(0.05))()

    alone, distributed = train_twice(build, _X, _Y, num_replicas=num_replicas)

    assert isinstance(distributed.model.optimizer, ko.LossScaleOptimizer)
    assert [int(t.model.optimizer.iterations) for t in (alone, distributed)] == [3, 3]
    for trained in (alone, distributed):
        assert float(trained.model.optimizer.dynamic_scale.value) == 2**15


# Rounding of half precision depends on how a batch is summed.
@pytest.mark.parametrize(("policy", "rtol"), [("mixed_float16", 2e-3), ("mixed_bfloat16", 2e-2)])
def test_mixed_precision_equals_one_device_up_to_its_rounding(policy, rtol, strategy_of, train):
    def make_optimizer():
        if policy == "mixed_bfloat16":
            return ko.SGD(0.05)
        return ko.LossScaleOptimizer(ko.SGD(0.05), initial_scale=256.0)

    def build():
        keras.config.set_dtype_policy(policy)
        return _model_with(make_optimizer)()

    alone = train(build, _X, _Y)
    distributed = train(build, _X, _Y, strategy=strategy_of(2))

    assert distributed.model.layers[0].compute_dtype == policy.removeprefix("mixed_")
    np.testing.assert_allclose(distributed.history["loss"], alone.history["loss"], rtol=rtol)
    for before, expected, actual in zip(
        alone.initial, alone.model.variables, distributed.model.variables, strict=True
    ):
        assert actual.dtype == "float32"
        change = np.max(np.abs(expected.value - before))
        assert change > 0.01
        np.testing.assert_allclose(
            actual.value, expected.value, rtol=0, atol=5 * rtol * change, err_msg=actual.path
        )
