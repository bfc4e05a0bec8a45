"""Steps of two workers at once: both have read the state before either changes it."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist
from distributary.coordinator import ClusterCoordinator, ParameterServerStrategy, local_cluster

_SECONDS = 60.0  # more than anything takes
RNG = np.random.default_rng(0)
W = RNG.normal(size=(3, 2)).astype(np.float32)
X = RNG.normal(size=(4, 3)).astype(np.float32)
ONES = np.ones(4, np.float32)


def _run_at_once(step, state):
    """Runs a step with X and with 2 X; the variables are on two servers in turn."""
    cluster = local_cluster(workers=2, ps=2)
    both, pushes = {f"ps {i}": threading.Barrier(2) for i in range(2)}, threading.Event()
    strategy = ParameterServerStrategy(cluster)
    with strategy.scope():
        variables = [dist.Variable(value) for value in state]
    coordinator = ClusterCoordinator(strategy)

    def closure(x):
        for variable, value in zip(variables, step([v.value() for v in variables], x), strict=True):
            variable.assign(value)

    def hold(source, target, message, deliver):
        if message.kind == "push":
            pushes.set()
            both[target].wait(_SECONDS)
        return deliver(message)

    cluster.fault = hold
    for x in (X, 2 * X):
        coordinator.schedule(closure, args=(x,))
        pushes.wait(_SECONDS)  # else one worker may take both steps
    coordinator.join()
    return [variable.numpy() for variable in variables]


def _gradient(w, x):
    return jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).sum())(w)


def _descend(state, x):
    return [state[0] - 0.1 * _gradient(state[0], x), state[1] + x.sum()]


def _add_several(state, x):
    return [x.sum(1) + (x[:, 0] + state[0]) + 1.0]


_SUMS = [W - 0.1 * (_gradient(W, X) + _gradient(W, 2 * X)), 3 * X.sum()]
_MEAN = X.mean(0)
_ADDED = ONES + 2 + 3 * (X.sum(1) + X[:, 0])


@pytest.mark.parametrize(
    ("step", "state", "expected"),
    [
        (_descend, [W, np.float32(0)], _SUMS),
        (_add_several, [ONES], [_ADDED]),
        # A step that counts needs no data.
        (lambda state, x: [state[0] + 1], [np.int32(5)], [7]),
    ],
)
def test_what_both_add_adds_up(step, state, expected):
    found = _run_at_once(step, state)

    for value, own in zip(found, expected, strict=True):
        np.testing.assert_allclose(value, own, rtol=1e-5, atol=1e-6)


def test_moving_averages_take_the_values_of_both():
    state = [W[:, 0], W[:, 1]]

    found = _run_at_once(lambda state, x: [0.9 * v + 0.1 * x.mean(0) for v in state], state)

    for value, old in zip(found, state, strict=True):
        orders = [
            0.9 * (0.9 * old + 0.1 * first) + 0.1 * last
            for first, last in ((_MEAN, 2 * _MEAN), (2 * _MEAN, _MEAN))
        ]
        assert any(np.allclose(value, order, rtol=1e-5, atol=1e-6) for order in orders)


def test_the_last_assignment_of_a_value_wins():
    def step(state, x):
        average = 0.9 * state[0] + x.mean(0)
        return [jnp.tanh(average), average]  # the second server does not have the first state

    found = _run_at_once(step, [W[:, 0], W[:, 1]])

    averages = [0.9 * W[:, 0] + mean for mean in (_MEAN, 2 * _MEAN)]
    assert any(np.allclose(found[0], np.tanh(own), rtol=1e-5, atol=1e-6) for own in averages)
    assert any(np.allclose(found[1], own, rtol=1e-5, atol=1e-6) for own in averages)


def test_a_value_without_data_is_assigned_on_all_servers_and_returned():
    strategy = ParameterServerStrategy(local_cluster(workers=1, ps=2))
    with strategy.scope():
        first, second = dist.Variable(np.ones(3, np.float32)), dist.Variable(np.zeros(3, np.int32))
    coordinator = ClusterCoordinator(strategy)

    def closure():
        values = jnp.arange(3)
        first.assign(values + 0.5)
        second.assign(values)
        return values, first.value()

    values, new = coordinator.schedule(closure).fetch()

    np.testing.assert_array_equal(values, [0, 1, 2])
    np.testing.assert_array_equal(new, [0.5, 1.5, 2.5])
    np.testing.assert_array_equal(first.numpy(), [0.5, 1.5, 2.5])
    np.testing.assert_array_equal(second.numpy(), [0, 1, 2])
