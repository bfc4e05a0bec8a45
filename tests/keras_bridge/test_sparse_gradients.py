"""Gradients of `Embedding` layers travel by rows, of whole tables and of tables in parts."""

import itertools

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from keras import layers as kl, optimizers as ko

import distributary as dist
from tests.keras_bridge import small

# Just as many elements as make a table worth its rows; a batch looks up at most 24 of them.
_ROWS, _WIDTH = 4096, 8
_TABLE_BYTES = 4 * _ROWS * _WIDTH
_RANDOM = np.random.default_rng(1)
# Ids that several examples of a batch have, and 0, which masks.
_IDS = (_RANDOM.uniform(size=(24, 3)) ** 4 * _ROWS).astype(np.int32)
_IDS[::3, 1] = 0
_Y = _RANDOM.normal(size=(24, 2)).astype(np.float32)

_OPTIMIZERS = {
    "nesterov": lambda: ko.SGD(0.1, momentum=0.9, nesterov=True),
    "global_clipnorm": lambda: ko.Adagrad(0.1, global_clipnorm=0.05),
    "ema": lambda: ko.SGD(0.5, use_ema=True, ema_overwrite_frequency=2),
    "adam": lambda: ko.Adam(0.01, amsgrad=True, weight_decay=0.1),
    "muon": lambda: ko.Muon(0.01),
    "accumulation": lambda: ko.SGD(0.5, gradient_accumulation_steps=2),
}


def _strategy(layout, num_replicas=None):
    """By layout, every replica has the whole table, or a part of it."""
    devices = [f"CPU:{i}" for i in range(num_replicas or (2 if layout == "whole" else 4))]
    return dist.MirroredStrategy(devices, experimental_shard_parameters=layout == "in parts")


def _layers():
    ids, table = keras.Input((3,), dtype="int32"), kl.Embedding(_ROWS, _WIDTH)
    return [ids, table, kl.Flatten(), kl.Dense(2, "softsign")]


def _model(optimizer, **kwargs):
    return small.builder(lambda: keras.Sequential(_layers()), optimizer, **kwargs)


def _bytes_per_step(strategy):
    found = strategy.step_statistics
    return found.collective_bytes / found.num_runs


@pytest.fixture
def train_both(train_twice, assert_same_training):
    """A function that trains alone and in a layout, and compares weights, state and logs."""

    def train_both(build, layout, rows=22, num_replicas=None, **fit):
        x, y = _IDS[:rows], _Y[:rows]  # the last batch is uneven
        strategy = _strategy(layout, num_replicas)
        alone, distributed = train_twice(build, x, y, strategy=strategy, **fit)
        assert_same_training(alone, distributed, rtol=2e-3 if layout == "in parts" else 1e-3)
        variables = alone.model.optimizer.variables, distributed.model.optimizer.variables
        for expected, actual in zip(*variables, strict=True):
            expected, actual = expected.numpy().astype(np.float64), actual.numpy()
            scale = np.max(np.abs(expected), initial=0)
            rtol, atol = (1e-3, 1e-4) if layout == "in parts" else (1e-4, 1e-5)
            np.testing.assert_allclose(actual, expected, rtol=rtol, atol=atol * scale + 1e-9)
        return alone, distributed

    return train_both


@pytest.mark.parametrize("optimizer", _OPTIMIZERS)
def test_optimizers_take_the_steps_of_one_device(optimizer, train_both):
    _, trained = train_both(_model(_OPTIMIZERS[optimizer]), "whole", 24, epochs=2)

    assert 0 < _bytes_per_step(trained.strategy) < _TABLE_BYTES / 8


@pytest.mark.parametrize(
    ("layout", "optimizer", "num_replicas"),
    [("whole", "adam", 4), ("in parts", "global_clipnorm", 2)],
)
def test_several_steps_of_uneven_batches_in_one_program(
    layout, optimizer, num_replicas, train_both
):
    build = _model(_OPTIMIZERS[optimizer], steps_per_execution=3)

    _, trained = train_both(build, layout, 23, num_replicas, epochs=2)

    if layout == "whole":
        assert 0 < _bytes_per_step(trained.strategy) < _TABLE_BYTES / 2
        return
    for variable in (*trained.model.variables, *trained.model.optimizer.variables):
        if variable.shape == (_ROWS, _WIDTH):
            held = {shard.data.nbytes for shard in variable._value.addressable_shards}
            assert held == {_TABLE_BYTES // num_replicas}


def _network(table, reads=lambda table, ids: table(ids)):
    ids = keras.Input((3,), dtype="int32")
    return keras.Model(ids, kl.Dense(2, "softsign")(kl.Flatten()(reads(table, ids))))


def _two_tables(wide, ids):
    deep = kl.Embedding(_ROWS, _WIDTH)
    return kl.Concatenate()([kl.Flatten()(table(ids)) for table in (wide, deep)])


def _read_twice(table, ids):
    return kl.Concatenate()([table(ids), table((ids * 7 + 1) % _ROWS)])


def _masked(lstm, ids):
    return lstm(kl.Embedding(_ROWS, _WIDTH, mask_zero=True)(ids))


def _tied(table, ids):
    """The table also makes the logits, so that its gradient has no rows that are zero."""
    return table(kl.GlobalAveragePooling1D()(table(ids)), reverse=True)


_NETWORKS = {
    "two tables": lambda: _network(kl.Embedding(_ROWS * 8, 1), _two_tables),
    "twice": lambda: _network(kl.Embedding(_ROWS, _WIDTH), _read_twice),
    "masked": lambda: _network(kl.LSTM(3), _masked),
    "tied": lambda: _network(kl.ReversibleEmbedding(_ROWS, _WIDTH), _tied),
    "rows that do not divide": lambda: _network(kl.Embedding(_ROWS + 1, 11)),
    "columns": lambda: _network(kl.Embedding(_ROWS + 1, _WIDTH)),
    "regularized": lambda: _network(kl.Embedding(_ROWS, _WIDTH, embeddings_regularizer="l2")),
}


@pytest.mark.parametrize(
    ("layout", "network"),
    [("whole", name) for name in list(_NETWORKS)[:4]]
    + [("in parts", name) for name in _NETWORKS if name not in ("two tables", "masked")],
)
def test_other_networks(layout, network, train_both):
    optimizer = (lambda: ko.Adagrad(0.1)) if layout == "whole" else (lambda: ko.SGD(0.5))

    alone, distributed = train_both(small.builder(_NETWORKS[network], optimizer), layout)

    by_rows = _bytes_per_step(distributed.strategy) < _TABLE_BYTES / 4
    if layout == "whole":
        assert by_rows == (network != "tied")
    else:  # a regularizer sums each part for itself
        assert by_rows or network in ("tied", "regularized")
    np.testing.assert_allclose(
        distributed.model.predict(_IDS, verbose=0), alone.model.predict(_IDS, verbose=0), atol=1e-5
    )


def test_own_loops_with_optax(strategy):
    transformation = optax.chain(optax.clip_by_global_norm(0.05), optax.adam(0.01))
    start = np.random.default_rng(3).normal(size=(_ROWS, _WIDTH)).astype(np.float32)
    with strategy.scope():
        table = dist.Variable(start)
        state = jax.tree.map(dist.Variable, transformation.init(start))

    def loss_of(table, ids, y):
        rows = jnp.take(table, ids, axis=0)
        return jnp.sum((rows.sum((1, 2))[:, None] - y) ** 2) / 8

    def step(batch):
        gradient = jax.grad(loss_of)(table.value(), *batch)
        gradient = dist.get_replica_context().all_reduce("SUM", gradient)
        values = jax.tree.map(lambda variable: variable.value(), state)
        updates, new = transformation.update(gradient, values, table.value())
        table.assign(optax.apply_updates(table.value(), updates))
        jax.tree.map(lambda variable, value: variable.assign(value), state, new)

    # 9, 9, 5 and 1 rows
    batches = [(_IDS[a:b], _Y[a:b]) for a, b in itertools.pairwise((0, 9, 18, 23, 24))]
    for batch in strategy.experimental_distribute_dataset(batches):
        strategy.run(step, args=(batch,))

    expected, values = jnp.asarray(start), transformation.init(start)
    for batch in batches:
        gradient = jax.grad(loss_of)(expected, *batch)
        updates, values = transformation.update(gradient, values, expected)
        expected = optax.apply_updates(expected, updates)
    np.testing.assert_allclose(table.numpy(), expected, rtol=1e-4, atol=1e-5)
    assert _bytes_per_step(strategy) < _TABLE_BYTES / 8


def test_own_loops_with_a_tape_and_several_steps(strategy):
    batches = [(_IDS[i : i + 8], _Y[i : i + 8]) for i in range(0, 24, 8)]
    keras.utils.set_random_seed(0)
    alone = keras.Sequential(_layers())
    alone.compile(ko.Adagrad(0.1), "mse")
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model, updates = keras.Sequential(_layers()), ko.Adagrad(0.1)
        updates.build(model.trainable_variables)

    def step(batch):
        ids, y = batch
        loss_of = lambda: jnp.sum((model(ids) - y) ** 2) / (8 * 2)
        small.descend(updates, model.trainable_variables, loss_of)

    iterator = iter(strategy.experimental_distribute_dataset(batches))
    strategy.extended.run_steps(step, iterator, 3)

    for batch in batches:
        alone.train_on_batch(*batch)
    small.assert_equal_weights(model, alone, rtol=1e-4, atol=1e-6)
    assert _bytes_per_step(strategy) < _TABLE_BYTES / 2
