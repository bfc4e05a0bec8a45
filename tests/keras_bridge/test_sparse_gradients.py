"""Gradients of `Embedding` layers travel by rows, and trainings end as they do on one device."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from keras import layers as kl, optimizers as ko

import distributary as dist

# Just as many elements as make a table worth its rows; a batch looks up at most 24 of them.
_ROWS, _WIDTH = 4096, 8
_TABLE_BYTES = 4 * _ROWS * _WIDTH
_RANDOM = np.random.default_rng(1)
# Ids that several examples of a batch have, and 0, which masks.
_IDS = (_RANDOM.uniform(size=(24, 3)) ** 4 * _ROWS).astype(np.int32)
_IDS[::3, 1] = 0
_Y = _RANDOM.normal(size=(24, 2)).astype(np.float32)

_BY_ROWS = {
    "nesterov": lambda: ko.SGD(0.1, momentum=0.9, nesterov=True),
    "clipvalue": lambda: ko.SGD(0.5, clipvalue=0.01),
    "global_clipnorm": lambda: ko.Adagrad(0.1, global_clipnorm=0.05),
    "ema": lambda: ko.SGD(0.5, use_ema=True, ema_overwrite_frequency=2),
    "adam": lambda: ko.Adam(0.01, amsgrad=True, weight_decay=0.1),
    "adafactor": lambda: ko.Adafactor(0.5),
    "muon": lambda: ko.Muon(0.01),
    "accumulation": lambda: ko.SGD(0.5, gradient_accumulation_steps=2),
    "loss_scale": lambda: ko.LossScaleOptimizer(ko.SGD(0.5), 8.0, dynamic_growth_steps=2),
}


def _layers(**embedding):
    return [
        keras.Input((3,), dtype="int32"),
        kl.Embedding(_ROWS, _WIDTH, **embedding),
        kl.Flatten(),
        kl.Dense(2, "softsign"),
    ]


def _model(optimizer, layers=_layers, **kwargs):
    def build():
        model = keras.Sequential(layers())
        model.compile(optimizer(), "mse", **kwargs)
        model.optimizer.build(model.trainable_variables)
        return model

    return build


def _bytes_per_step(strategy):
    found = strategy.step_statistics
    return found.collective_bytes / found.num_runs


def _assert_same_optimizer_state(alone, distributed):
    variables = alone.model.optimizer.variables, distributed.model.optimizer.variables
    for expected, actual in zip(*variables, strict=True):
        expected = np.asarray(expected.value, np.float64)
        scale = np.max(np.abs(expected), initial=0)
        np.testing.assert_allclose(
            actual.value, expected, rtol=1e-4, atol=1e-5 * scale + 1e-9, err_msg=actual.path
        )


@pytest.mark.parametrize("optimizer", _BY_ROWS)
def test_optimizers_take_the_steps_of_one_device(optimizer, train_twice, assert_same_training):
    alone, distributed = train_twice(_model(_BY_ROWS[optimizer]), _IDS, _Y, epochs=2)

    assert_same_training(alone, distributed, rtol=1e-3)
    _assert_same_optimizer_state(alone, distributed)
    assert 0 < _bytes_per_step(distributed.strategy) < _TABLE_BYTES / 8


def test_several_steps_of_uneven_batches_in_one_program(train_twice, assert_same_training):
    model = _model(_BY_ROWS["adam"], steps_per_execution=3)

    alone, distributed = train_twice(model, _IDS[:23], _Y[:23], num_replicas=4, epochs=2)

    assert_same_training(alone, distributed, rtol=1e-3)
    _assert_same_optimizer_state(alone, distributed)
    assert 0 < _bytes_per_step(distributed.strategy) < _TABLE_BYTES / 2


def _two_tables():
    ids = keras.Input((3,), dtype="int32")
    wide = kl.Flatten()(kl.Embedding(_ROWS * 8, 1)(ids))
    deep = kl.Flatten()(kl.Embedding(_ROWS, _WIDTH)(ids))
    return keras.Model(ids, kl.Dense(2)(kl.Concatenate()([wide, deep])))


def _table_read_twice():
    ids = keras.Input((3,), dtype="int32")
    table = kl.Embedding(_ROWS, _WIDTH)
    parts = [table(ids), table((ids * 7 + 1) % _ROWS)]
    return keras.Model(ids, kl.Dense(2)(kl.Flatten()(kl.Concatenate()(parts))))


def _masked():
    ids = keras.Input((3,), dtype="int32")
    x = kl.Embedding(_ROWS, _WIDTH, mask_zero=True)(ids)
    return keras.Model(ids, kl.Dense(2)(kl.LSTM(3)(x)))


def _tied():
    """The table also makes the logits, so that its gradient has no rows that are zero."""
    ids = keras.Input((3,), dtype="int32")
    table = kl.ReversibleEmbedding(_ROWS, _WIDTH)
    logits = table(kl.GlobalAveragePooling1D()(table(ids)), reverse=True)
    return keras.Model(ids, kl.Dense(2)(logits))


@pytest.mark.parametrize("network", [_two_tables, _table_read_twice, _masked, _tied])
def test_other_networks(network, train_twice, assert_same_training):
    def build():
        model = network()
        model.compile(ko.Adagrad(0.1), "mse")
        return model

    alone, distributed = train_twice(build, _IDS, _Y)

    assert_same_training(alone, distributed, rtol=2e-3)
    by_rows = _bytes_per_step(distributed.strategy) < _TABLE_BYTES / 4
    assert by_rows == (network is not _tied)


def test_half_precision_computes_what_it_computes_on_one_device(train_twice):
    keras.config.set_dtype_policy("mixed_bfloat16")

    alone, distributed = train_twice(_model(lambda: ko.SGD(0.5)), _IDS, _Y)

    for expected, actual in zip(
        alone.model.get_weights(), distributed.model.get_weights(), strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=0.02, atol=2e-3)


def test_adapters_of_low_rank_train_as_on_one_device(train_twice, assert_same_training):
    alone, distributed = train_twice(
        _model(_BY_ROWS["adam"], lambda: _layers(lora_rank=2)), _IDS, _Y, epochs=2
    )

    assert_same_training(alone, distributed, rtol=2e-3)


_OF_OPTAX = {
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adam": lambda: optax.adam(0.01),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(0.5)),
}


@pytest.mark.parametrize("optimizer", _OF_OPTAX)
def test_own_loops_with_optax(optimizer, strategy_of):
    strategy, transformation = strategy_of(2), _OF_OPTAX[optimizer]()
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

    batches = [(_IDS[i : i + 8], _Y[i : i + 8]) for i in range(0, 24, 8)]
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
        with dist.GradientTape() as tape:
            loss = jnp.sum((model(ids) - y) ** 2) / (8 * 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        updates.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    iterator = iter(strategy.experimental_distribute_dataset(batches))
    strategy.extended.run_steps(step, iterator, 3)

    for batch in batches:
        alone.train_on_batch(*batch)
    for actual, expected in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6)
    assert _bytes_per_step(strategy) < _TABLE_BYTES / 2
