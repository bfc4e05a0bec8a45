"""Training with several replicas ends where one device on the global batch ends."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distributary as dist

_NUM_FEATURES = 6
_NUM_HIDDEN = 8
_BATCH_SIZES = [16, 5, 16, 1, 16] * 4  # uneven and tiny batches among full ones

OPTIMIZERS = {
    "sgd": optax.sgd(0.05),
    "momentum": optax.sgd(0.05, momentum=0.9),
    "adam": optax.adam(0.01),
}


def _parameters():
    random = np.random.default_rng(0)
    return {
        "hidden": random.normal(size=(_NUM_FEATURES, _NUM_HIDDEN)).astype(np.float32) * 0.3,
        "bias": np.zeros(_NUM_HIDDEN, np.float32),
        "out": random.normal(size=(_NUM_HIDDEN,)).astype(np.float32) * 0.3,
    }


def _batches():
    random = np.random.default_rng(1)
    for size in _BATCH_SIZES:
        x = random.normal(size=(size, _NUM_FEATURES)).astype(np.float32)
        yield x, np.sin(x.sum(1)).astype(np.float32)


def _squared_errors(parameters, x, y):
    hidden = jnp.tanh(x @ parameters["hidden"] + parameters["bias"])
    return (hidden @ parameters["out"] - y) ** 2


def _train_on_one_device(name):
    optimizer = OPTIMIZERS[name]
    parameters = jax.tree.map(jnp.asarray, _parameters())
    state = optimizer.init(parameters)
    losses = []

    @jax.jit
    def step(parameters, state, x, y):
        loss_fn = lambda p: jnp.mean(_squared_errors(p, x, y))
        loss, gradients = jax.value_and_grad(loss_fn)(parameters)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, loss

    for x, y in _batches():
        parameters, state, loss = step(parameters, state, x, y)
        losses.append(float(loss))
    return parameters, losses


def _values(tree):
    return jax.tree.map(lambda variable: variable.value(), tree)


def _assign(tree, values):
    jax.tree.map(lambda variable, value: variable.assign(value), tree, values)


def _train(strategy, optimizer, differentiate):
    with strategy.scope():
        variables = jax.tree.map(dist.Variable, _parameters())
        state = jax.tree.map(dist.Variable, optimizer.init(_parameters()))

    def step(x, y, global_batch_size):
        def loss_fn():
            return jnp.sum(_squared_errors(_values(variables), x, y)) / global_batch_size

        loss, gradients = differentiate(loss_fn, variables)
        gradients = dist.get_replica_context().all_reduce(dist.ReduceOp.SUM, gradients)
        updates, new_state = optimizer.update(gradients, _values(state), _values(variables))
        _assign(variables, optax.apply_updates(_values(variables), updates))
        _assign(state, new_state)
        return loss

    losses = []
    batches = list(_batches())
    dataset = strategy.experimental_distribute_dataset(batches)
    for (x, y), (rows, _) in zip(dataset, batches, strict=True):
        loss = strategy.run(step, args=(x, y, float(len(rows))))
        losses.append(float(strategy.reduce(dist.ReduceOp.SUM, loss, axis=None)))
    return jax.tree.map(lambda variable: variable.numpy(), variables), losses


def _with_value_and_grad(loss_fn, variables):
    return dist.value_and_grad(loss_fn, variables)()


def _with_tape(loss_fn, variables):
    with dist.GradientTape() as tape:
        loss = loss_fn()
    return loss, tape.gradient(loss, variables)


@pytest.mark.parametrize(
    ("name", "num_replicas", "differentiate"),
    [("sgd", 4, _with_value_and_grad), ("momentum", 2, _with_tape), ("adam", 8, _with_tape)],
)
def test_replicas_end_on_the_weights_and_losses_of_one_device(
    name, num_replicas, differentiate, strategy_of
):
    expected, expected_losses = _train_on_one_device(name)

    trained, losses = _train(strategy_of(num_replicas), OPTIMIZERS[name], differentiate)

    np.testing.assert_allclose(losses, expected_losses, rtol=2e-5)
    for key, value in expected.items():
        np.testing.assert_allclose(trained[key], value, rtol=2e-5, atol=2e-6, err_msg=key)
