"""Optimizers of Keras on `distributary.Variable`, against the same on Keras variables."""

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import distributary as dist
from distributary.errors import UnsupportedError
from tests.keras_bridge import small

_OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, clipnorm=0.5),
    "adam": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.01),
    "ema": lambda: keras.optimizers.RMSprop(0.1, use_ema=True, ema_overwrite_frequency=2),
    "accumulating": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
}
_X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
_W = np.ones((3, 2), np.float32)


def _loss(x, w, b):
    return jnp.sum(jnp.tanh(x @ w + b)) / len(_X)


def _on_one_device(make, steps):
    optimizer = make()
    w, b = keras.Variable(_W), keras.Variable(np.zeros(2, np.float32))
    for _ in range(steps):
        small.descend(optimizer, [w, b], lambda: _loss(_X, w.value, b.value))
    return [np.array(w), np.array(b)]


@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_replicas_together_take_the_steps_of_one_device(name, strategy):
    with strategy.scope():
        w, b = dist.Variable(_W, name="w"), dist.Variable(jnp.zeros(2), name="b")
        optimizer = _OPTIMIZERS[name]()
        mean = keras.metrics.Mean()

    @dist.function
    def step(x):
        def replica_step(x):
            loss_of = lambda: _loss(x, w.value(), b.value())
            mean.update_state(small.descend(optimizer, [w, b], loss_of))

        strategy.run(replica_step, args=(x,))

    data = dist.PerReplica(np.split(_X, 2))
    for _ in range(4):  # arrays of both kinds of variables go in and out of one program
        step(data)

    for own, expected in zip((w, b), _on_one_device(_OPTIMIZERS[name], 4), strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-6)


def test_rows_of_a_table_and_steps_outside_of_functions(strategy_of):
    table = np.arange(8, dtype=np.float32).reshape(4, 2)
    with strategy_of(2).scope():
        variable = dist.Variable(table)
        optimizer = keras.optimizers.SGD(1.0)

    def step():
        small.descend(optimizer, [variable], lambda: jnp.sum(variable.sparse_read([1, 3, 1])))

    variable.distribute_strategy.run(step)
    np.testing.assert_array_equal(variable, table - 2 * np.array([[0], [2], [0], [1]]))

    plain = dist.Variable(table)
    optimizer = keras.optimizers.SGD(1.0, momentum=0.5)
    for _ in range(2):
        optimizer.apply_gradients([(jnp.ones((4, 2)), plain)])
    np.testing.assert_array_equal(plain, table - 2.5)


def test_an_aggregation_that_would_add_up_the_new_values_is_refused(strategy):
    with strategy.scope():
        variable = dist.Variable(1.0, name="w", aggregation=dist.VariableAggregation.SUM)
        optimizer = keras.optimizers.SGD(0.1)

    with pytest.raises(UnsupportedError, match="'w' has aggregation SUM"):
        strategy.run(lambda: optimizer.apply_gradients([(jnp.float32(1.0), variable)]))

    assert float(variable) == 1.0
