"""Optimizer state of which every device holds a part: the same numbers, less memory."""

import re

import jax
import keras
import numpy as np
import pytest
from keras import layers as kl, optimizers as ko

import distributary as dist

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


def _build(make_optimizer, **kwargs):
    def build():
        # Of these dims some divide by 4 and some do not.
        model = keras.Sequential([keras.Input((3,)), kl.Dense(8, "tanh"), kl.Dense(2)])
        model.compile(make_optimizer(), "mse", **kwargs)
        return model

    return build


def _slots(model):
    return [np.array(variable.value) for variable in model.optimizer.variables]


def _assert_close(got, expected, **tolerance):
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, **(tolerance or _CLOSE))


def _assert_in_parts(optimizer, num_replicas):
    """Every device holds, of every variable that is no scalar, one part of a dim."""
    for variable in optimizer.variables:
        shards = variable._value.addressable_shards
        assert len(shards) == num_replicas
        sizes = {shard.data.size for shard in shards}
        whole = int(np.prod(variable.shape))
        expected = [whole // n * -(-n // num_replicas) for n in variable.shape]
        assert sizes == {min(expected, default=1)}, variable.path


_OPTIMIZERS = {
    "momentum and averages": lambda: ko.SGD(
        0.1, momentum=0.9, nesterov=True, use_ema=True, ema_momentum=0.6, ema_overwrite_frequency=2
    ),
    "global norm": lambda: ko.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.3),
    "products of matrices": lambda: ko.Muon(0.01),
    "several steps at once": lambda: ko.Adam(0.01),
    "single operations": lambda: ko.Adam(0.01),
    "other shapes, scaled loss": lambda: ko.LossScaleOptimizer(
        ko.Adafactor(0.1), 8.0, dynamic_growth_steps=2
    ),
}


_OPTIONS = {
    "several steps at once": {"steps_per_execution": 2},
    "single operations": {"run_eagerly": True},
}


@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_training_ends_where_it_does_on_one_device(name, train, sharded, assert_same_training):
    alone = train(_build(_OPTIMIZERS[name]), _X, _Y)
    build = _build(_OPTIMIZERS[name], **_OPTIONS.get(name, {}))
    divided = train(build, _X, _Y, strategy=sharded(4))

    assert_same_training(alone, divided, rtol=1e-3)
    _assert_close(_slots(divided.model), _slots(alone.model), rtol=1e-3, atol=1e-6)
    _assert_in_parts(divided.model.optimizer, 4)


def test_the_cores_of_a_replica_hold_the_same_part(train):
    experimental = dist.tpu.experimental
    topology = experimental.Topology.of_devices(jax.devices()[:8], [4, 1, 1, 2])
    assignment = experimental.DeviceAssignment.build(topology, [1, 1, 1, 2], num_replicas=4)
    strategy = dist.TPUStrategy(
        experimental_device_assignment=assignment, experimental_shard_optimizer_state=True
    )

    alone = train(_build(lambda: ko.Adam(0.01)), _X, _Y)
    divided = train(_build(lambda: ko.Adam(0.01)), _X, _Y, strategy=strategy)

    _assert_close(divided.model.get_weights(), alone.model.get_weights())
    _assert_close(_slots(divided.model), _slots(alone.model), rtol=1e-3, atol=1e-6)
    kernel = next(v for v in divided.model.optimizer.variables if tuple(v.shape) == (3, 8))
    shards = sorted(kernel._value.addressable_shards, key=lambda s: s.device.id)
    assert [shard.data.shape for shard in shards] == [(3, 2)] * 8
    assert [shard.index[1].start or 0 for shard in shards] == [0, 0, 2, 2, 4, 4, 6, 6]


@pytest.fixture
def loop(quick_initializers):
    """A function that trains a table and a layer; returns model, step and optimizer."""

    def loop(strategy, batches):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = keras.Sequential([keras.Input((2,)), kl.Embedding(1003, 6), kl.Dense(3)])
            optimizer = ko.Adam(0.01, global_clipnorm=0.5)

        def step(ids):
            with dist.GradientTape() as tape:
                loss = keras.ops.sum(model(ids) ** 2) / 8
            variables = model.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)
            return loss

        for batch in strategy.experimental_distribute_dataset(batches):
            strategy.run(step, args=(batch,))
        return model, step, optimizer

    return loop


def test_loops_scatter_gradients_and_gather_weights(loop, sharded, strategy_of):
    ids = _RANDOM.integers(0, 1003, (14, 2))
    batches = [ids[:8], ids[8:]]  # the second one does not divide by 4
    divided = sharded(4)
    model, step, optimizer = loop(divided, batches)
    expected, _, mirrored = loop(strategy_of(4), batches)

    _assert_close(model.get_weights(), expected.get_weights())
    _assert_close(*([np.array(v.value) for v in o.variables] for o in (optimizer, mirrored)))
    _assert_in_parts(optimizer, 4)
    (batch,) = divided.experimental_distribute_dataset([ids[:8]])
    hlo = divided.extended.lower(step, (batch,)).compile().as_text()
    assert len(re.findall(r" reduce-scatter\(", hlo)) == 3
    assert len(re.findall(r" all-gather\(", hlo)) >= 2
    # What is left are numbers, such as the norm of the gradients, and the 3 entries of the bias.
    for result in re.findall(r"= (\S+|\([^)]*\)) all-reduce\(", hlo):
        shapes = [s.split(",") if s else [] for s in re.findall(r"\[([\d,]*)\]", result)]
        assert max(np.prod([int(n) for n in shape]) for shape in shapes) <= 3, result


def test_a_whole_function_and_single_operations_update_parts(loop, sharded):
    ids = _RANDOM.integers(0, 1003, (8, 2))
    strategy = sharded(4)
    model, step, optimizer = loop(strategy, [ids])
    (batch,) = strategy.experimental_distribute_dataset([ids])
    dist.function(lambda batch: [strategy.run(step, args=(batch,)) for _ in range(2)])(batch)
    gradients = [np.ones(v.shape, np.float32) for v in model.trainable_variables]
    optimizer.apply(gradients)

    expected, _, mirrored = loop(dist.OneDeviceStrategy("CPU:0"), [ids] * 3)
    mirrored.apply(gradients)

    _assert_close(model.get_weights(), expected.get_weights())
    _assert_close(*([np.array(v.value) for v in o.variables] for o in (optimizer, mirrored)))
    _assert_in_parts(optimizer, 4)


def test_optimizers_built_elsewhere_are_divided_by_fit(sharded):
    with sharded(4).scope():
        model = _build(lambda: ko.Adam(0.01))()
    model.optimizer.build(model.trainable_variables)
    assert model.optimizer.variables[2]._value.is_fully_replicated

    model.fit(_X[:8], _Y[:8], batch_size=8, verbose=0)

    _assert_in_parts(model.optimizer, 4)


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
