"""Optimizer state of which every device holds a part: the same numbers, less memory."""

import functools
import re

import keras
import numpy as np
import pytest
from keras import layers as kl, optimizers as ko

import distributary as dist
from tests.keras_bridge import small
from tests.strategies.tpu import tpu_strategy

_RANDOM = np.random.default_rng(2)
_X = _RANDOM.normal(size=(22, 3)).astype(np.float32)  # with batches of 8, the last one is uneven
_Y = _RANDOM.normal(size=(22, 2)).astype(np.float32) * 3
_CLOSE = {"rtol": 1e-4, "atol": 1e-6}


@pytest.fixture
def sharded():
    """A function that returns a strategy with sharded optimizer state on so many devices."""
    return lambda num_replicas: dist.MirroredStrategy(
        [f"CPU:{i}" for i in range(num_replicas)], experimental_shard_optimizer_state=True
    )


def _model():
    # Of these dims some divide by 4 and some do not.
    return keras.Sequential([keras.Input((3,)), kl.Dense(8, "tanh"), kl.Dense(2)])


_build = functools.partial(small.builder, _model)


def _slots(model):
    return [np.array(variable.value) for variable in model.optimizer.variables]


def _assert_close(got, expected, **tolerance):
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, **(tolerance or _CLOSE))


_OPTIMIZERS = {
    "momentum and averages": lambda: ko.SGD(
        0.1, momentum=0.9, nesterov=True, use_ema=True, ema_momentum=0.6, ema_overwrite_frequency=2
    ),
    "products of matrices": lambda: ko.Muon(0.01),
    "several steps at once": lambda: ko.Adam(0.01),
    "other shapes, scaled loss": lambda: ko.LossScaleOptimizer(
        ko.Adafactor(0.1), 8.0, dynamic_growth_steps=2
    ),
}


@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_training_ends_where_it_does_on_one_device(
    name, train_twice, sharded, assert_same_training
):
    build = _build(_OPTIMIZERS[name], steps_per_execution=1 + (name == "several steps at once"))
    alone, divided = train_twice(build, _X, _Y, strategy=sharded(4))

    assert_same_training(alone, divided, rtol=1e-3)
    _assert_close(_slots(divided.model), _slots(alone.model), rtol=1e-3, atol=1e-6)
    small.assert_in_parts(divided.model.optimizer.variables, 4)


def test_the_cores_of_a_replica_hold_the_same_part(train_twice):
    strategy = tpu_strategy(4, 2, experimental_shard_optimizer_state=True)

    alone, divided = train_twice(_build(lambda: ko.Adam(0.01)), _X, _Y, strategy=strategy)

    _assert_close(divided.model.get_weights(), alone.model.get_weights())
    _assert_close(_slots(divided.model), _slots(alone.model), rtol=1e-3, atol=1e-6)
    kernel = next(v for v in divided.model.optimizer.variables if tuple(v.shape) == (3, 8))
    shards = sorted(kernel._value.addressable_shards, key=lambda s: s.device.id)
    assert [shard.data.shape for shard in shards] == [(3, 2)] * 8
    assert [shard.index[1].start or 0 for shard in shards] == [0, 0, 2, 2, 4, 4, 6, 6]


_IDS, _LABELS = _RANDOM.integers(0, 1003, (14, 2)), _RANDOM.integers(0, 3, (14, 2))
_BATCHES = [(_IDS[:8], _LABELS[:8]), (_IDS[8:], _LABELS[8:])]  # the second one is uneven


@pytest.fixture
def loop(train_in_loop):
    """A function that trains a table and a layer with some batches and a strategy."""
    layers = lambda: [keras.Input((2,)), kl.Embedding(1003, 6), kl.Dense(3)]
    optimizer = lambda: ko.Adam(0.01, global_clipnorm=0.5)
    make_model = lambda: keras.Sequential(layers())
    return functools.partial(train_in_loop, make_model, make_optimizer=optimizer)


def test_loops_scatter_gradients_and_gather_weights(loop, sharded, strategy_of):
    divided = sharded(4)
    model, expected = loop(_BATCHES, divided), loop(_BATCHES, strategy_of(4))

    _assert_close(model.get_weights(), expected.get_weights())
    _assert_close(_slots(model), _slots(expected))
    small.assert_in_parts(model.optimizer.variables, 4)
    (batch,) = divided.experimental_distribute_dataset(_BATCHES[:1])
    hlo = divided.extended.lower(model.step, batch).compile().as_text()
    assert len(re.findall(r" reduce-scatter\(", hlo)) == 3
    assert len(re.findall(r" all-gather\(", hlo)) >= 2
    # What is left are numbers, such as the norm of the gradients, and the 3 entries of the bias.
    for result in re.findall(r"= (\S+|\([^)]*\)) all-reduce\(", hlo):
        shapes = [s.split(",") if s else [] for s in re.findall(r"\[([\d,]*)\]", result)]
        assert max(np.prod([int(n) for n in shape]) for shape in shapes) <= 3, result


def test_a_whole_function_and_single_operations_update_parts(loop, sharded):
    strategy = sharded(4)
    model = loop(_BATCHES[:1], strategy)
    (batch,) = strategy.experimental_distribute_dataset(_BATCHES[:1])
    dist.function(lambda batch: [strategy.run(model.step, args=batch) for _ in range(2)])(batch)
    gradients = [np.ones(v.shape, np.float32) for v in model.trainable_variables]
    model.optimizer.apply(gradients)

    expected = loop(_BATCHES[:1] * 3, dist.OneDeviceStrategy("CPU:0"))
    expected.optimizer.apply(gradients)

    _assert_close(model.get_weights(), expected.get_weights())
    _assert_close(_slots(model), _slots(expected))
    small.assert_in_parts(model.optimizer.variables, 4)


def test_optimizers_built_elsewhere_are_divided_by_fit(sharded):
    with sharded(4).scope():
        model = _build(lambda: ko.Adam(0.01))()
    model.optimizer.build(model.trainable_variables)
    assert model.optimizer.variables[2]._value.is_fully_replicated

    model.fit(_X[:8], _Y[:8], batch_size=8, verbose=0)

    small.assert_in_parts(model.optimizer.variables, 4)


def test_one_replica_keeps_its_state_whole(train, sharded):
    trained = train(_build(lambda: ko.Adam(0.01)), _X, _Y, strategy=sharded(1))

    assert all(v.value.shape == v.shape for v in trained.model.optimizer.variables)


def test_variables_of_ones_own_are_said_to_be_whole(sharded, caplog):
    strategy = sharded(2)
    with strategy.scope():
        keras.Variable(1.0)
        assert not caplog.records
        state = [dist.Variable(np.zeros(8, np.float32), name="mu") for _ in range(2)]

    (record,) = caplog.records
    assert "test_sharded_state.py:" in record.getMessage()
    assert "variable 'mu' is whole on every device" in record.getMessage()
    assert "Keras optimizer state sharded" in repr(strategy)
    assert all(variable.value().is_fully_replicated for variable in state)
