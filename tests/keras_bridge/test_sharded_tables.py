"""Tables of embeddings of which every device holds a part: looked-up rows travel, not the table."""

import keras
import numpy as np
import pytest
from keras import layers as kl, optimizers as ko

import distributary as dist

# Just as many elements as make a table worth its rows; a batch looks up at most 24 of them.
_ROWS, _WIDTH = 4096, 8
_TABLE_BYTES = 4 * _ROWS * _WIDTH
_RANDOM = np.random.default_rng(1)
# Ids that several examples of a batch have, and 0, which masks.
_IDS = (_RANDOM.uniform(size=(22, 3)) ** 4 * _ROWS).astype(np.int32)  # the last batch is uneven
_IDS[::3, 1] = 0
_Y = _RANDOM.normal(size=(22, 2)).astype(np.float32)


def _parts(num_replicas):
    devices = [f"CPU:{i}" for i in range(num_replicas)]
    return dist.MirroredStrategy(devices, experimental_shard_parameters=True)


def _network(table, reads=lambda table, ids: table(ids)):
    ids = keras.Input((3,), dtype="int32")
    return keras.Model(ids, kl.Dense(2, "softsign")(kl.Flatten()(reads(table, ids))))


def _read_twice(table, ids):
    return kl.Concatenate()([table(ids), table((ids * 7 + 1) % _ROWS)])


def _tied(table, ids):
    """The table also makes the logits, so that its gradient has no rows that are zero."""
    return table(kl.GlobalAveragePooling1D()(table(ids)), reverse=True)


_NETWORKS = {
    "once": lambda: _network(kl.Embedding(_ROWS, _WIDTH)),
    "twice": lambda: _network(kl.Embedding(_ROWS, _WIDTH), _read_twice),
    "rows that do not divide": lambda: _network(kl.Embedding(_ROWS + 1, 11)),
    "columns": lambda: _network(kl.Embedding(_ROWS + 1, _WIDTH)),
    "masked": lambda: _network(kl.LSTM(3), lambda lstm, ids: lstm(_masked(ids))),
    "tied": lambda: _network(kl.ReversibleEmbedding(_ROWS, _WIDTH), _tied),
    "regularized": lambda: _network(kl.Embedding(_ROWS, _WIDTH, embeddings_regularizer="l2")),
}
_OPTIMIZERS = {
    "sgd": lambda: ko.SGD(0.5),
    "momentum": lambda: ko.SGD(0.1, momentum=0.9),
    "adam": lambda: ko.Adam(0.01),
    "adagrad": lambda: ko.Adagrad(0.1, global_clipnorm=0.05),
    "accumulation": lambda: ko.SGD(0.5, gradient_accumulation_steps=2),
}


def _masked(ids):
    return kl.Embedding(_ROWS, _WIDTH, mask_zero=True)(ids)


def _model(network="once", optimizer="sgd", **kwargs):
    def build():
        model = _NETWORKS[network]()
        model.compile(_OPTIMIZERS[optimizer](), "mse", **kwargs)
        model.optimizer.build(model.trainable_variables)
        return model

    return build


def _assert_same(alone, divided, assert_same_training):
    assert_same_training(alone, divided, rtol=2e-3)
    pairs = zip(alone.model.optimizer.variables, divided.model.optimizer.variables, strict=True)
    for expected, actual in pairs:
        scale = np.max(np.abs(expected.numpy()), initial=0)
        np.testing.assert_allclose(
            actual.numpy(), expected.numpy(), rtol=1e-3, atol=1e-4 * scale + 1e-9
        )


def _bytes_per_step(strategy):
    found = strategy.step_statistics
    return found.collective_bytes / found.num_runs


@pytest.mark.parametrize("optimizer", _OPTIMIZERS)
def test_optimizers_take_the_steps_of_one_device(optimizer, train, assert_same_training):
    build = _model(optimizer=optimizer)

    alone = train(build, _IDS, _Y, epochs=2)
    divided = train(build, _IDS, _Y, strategy=_parts(4), epochs=2)

    _assert_same(alone, divided, assert_same_training)
    assert 0 < _bytes_per_step(divided.strategy) < _TABLE_BYTES / 8
    for variable in (*divided.model.variables, *divided.model.optimizer.variables):
        if variable.shape == (_ROWS, _WIDTH):
            held = {shard.data.nbytes for shard in variable._value.addressable_shards}
            assert held == {_TABLE_BYTES // 4}


@pytest.mark.parametrize("network", [name for name in _NETWORKS if name != "once"])
def test_other_networks(network, train, assert_same_training):
    build = _model(network)

    alone = train(build, _IDS, _Y)
    divided = train(build, _IDS, _Y, strategy=_parts(4))

    _assert_same(alone, divided, assert_same_training)
    reads_all = network in ("tied", "regularized")
    # A regularizer sums each part for itself.
    assert reads_all or _bytes_per_step(divided.strategy) < _TABLE_BYTES / 4
    np.testing.assert_allclose(
        divided.model.predict(_IDS, verbose=0), alone.model.predict(_IDS, verbose=0), atol=1e-5
    )


def test_several_steps_in_one_program(train, assert_same_training):
    build = _model(optimizer="adagrad", steps_per_execution=3)

    alone = train(build, _IDS, _Y, epochs=2)
    divided = train(build, _IDS, _Y, strategy=_parts(2), epochs=2)

    _assert_same(alone, divided, assert_same_training)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_loops_of_ones_own_move_rows(policy, train_in_loop):
    def make_model():
        ids = keras.Input((3,), dtype="int32")
        table = kl.Embedding(_ROWS, _WIDTH, dtype=policy)
        return keras.Model(ids, kl.Dense(2)(kl.Flatten()(table(ids))))

    labels = _RANDOM.integers(0, 2, 16)
    batches = [(_IDS[:8], labels[:8]), (_IDS[8:16], labels[8:])]
    divided = _parts(4)
    models = [
        train_in_loop(make_model, batches, s) for s in (dist.OneDeviceStrategy("CPU:0"), divided)
    ]

    expected, actual = (model.get_weights() for model in models)
    for value, whole in zip(actual, expected, strict=True):
        np.testing.assert_allclose(value, whole, atol=1e-5 if policy == "float32" else 1e-2)
    assert 0 < _bytes_per_step(divided) < _TABLE_BYTES / 8
