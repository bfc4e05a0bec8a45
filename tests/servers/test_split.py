"""The step of a worker, split over parameter servers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from distributary.servers._split import StepInput, split_over_servers
from distributary.tracing import push

RNG = np.random.default_rng(0)
W = RNG.normal(size=(3, 2)).astype(np.float32)
B = np.zeros(2, np.float32)
X = RNG.normal(size=(4, 3)).astype(np.float32)


class Cluster:
    """Servers with state, and workers that run one step on what they have pulled."""

    def __init__(self, step, state, owners, data):
        self.state = list(map(jnp.asarray, state))
        closed = jax.make_jaxpr(lambda state, data: step(state, *data))(self.state, list(data))
        assert not closed.consts
        num_state, num_data = len(state), len(data)
        num_results = len(closed.jaxpr.outvars) - num_state
        self.split = split_over_servers(
            closed.jaxpr,
            [
                *(StepInput("state", i, f"v{i}", owner) for i, owner in enumerate(owners)),
                *(StepInput("data", i) for i in range(num_data)),
            ],
            [*range(num_state), *[None] * num_results],
        )

    def compute(self, *data):
        """What a worker makes of the present state: results and pushes."""
        inputs = [*self.state, *data]
        worker = self.split.worker
        outs = jax.core.eval_jaxpr(
            worker.jaxpr, worker.consts, *(inputs[i] for i in self.split.inputs)
        )
        num_results = len(outs) - self.split.num_pushes
        return outs[:num_results], outs[num_results:]

    def run_at_once(self, *data):
        """Applies the steps of workers that have all read the present state, one per data."""
        for pushes in [self.compute(own)[1] for own in data]:
            self.apply(pushes)

    def apply(self, pushes):
        """What the servers do with them."""
        old = list(self.state)
        for part in self.split.servers.values():
            new = jax.core.eval_jaxpr(
                part.update.jaxpr,
                part.update.consts,
                *(old[i] for i in part.states),
                *(pushes[i] for i in part.pushes),
            )
            for i, value in zip(part.outputs, new, strict=True):
                self.state[i] = value


def _gradients(weights, x, marked=True):
    loss, gradients = jax.value_and_grad(lambda ws: (jnp.tanh(x @ ws[0] + ws[1]) ** 2).sum())(
        weights
    )
    return loss, [push(g) if marked else g for g in gradients]


def test_updates_of_two_workers_add_up():
    def step(state, x):
        w, total = state
        _, (gradient, _) = _gradients([w, jnp.zeros(2)], x)
        return [w - 0.1 * gradient, total + x.sum(), x.sum()]

    cluster = Cluster(step, [W, np.float32(0)], [0, 1], [X])
    cluster.run_at_once(X, 2 * X)
    gradients = [_gradients([W, B], x)[1][0] for x in (X, 2 * X)]
    np.testing.assert_allclose(cluster.state[0], W - 0.1 * sum(gradients), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(cluster.state[1], 3 * X.sum(), rtol=1e-6, atol=1e-6)


def test_an_assignment_that_was_not_pushed_adds_too():
    def step(state, x):
        _, (gradient, _) = _gradients([state[0], jnp.zeros(2)], x, marked=False)
        return [state[0] - 0.1 * gradient]

    cluster = Cluster(step, [W], [0], [X])
    cluster.run_at_once(X, 2 * X)
    gradients = [_gradients([W, B], x)[1][0] for x in (X, 2 * X)]
    np.testing.assert_allclose(cluster.state[0], W - 0.1 * sum(gradients), rtol=1e-6, atol=1e-6)


def test_moving_averages_take_the_values_of_all_workers():
    cluster = Cluster(
        lambda state, x: [0.9 * state[0] + 0.1 * x.mean(0), state[1] + 1, state[0].sum()],
        [W[:, 0], np.float32(0)],
        [0, 1],
        [X],
    )
    (result,), _ = cluster.compute(X)
    cluster.run_at_once(2 * X, X)
    expected = 0.9 * (0.9 * W[:, 0] + 0.2 * X.mean(0)) + 0.1 * X.mean(0)
    np.testing.assert_allclose(cluster.state[0], expected, rtol=1e-6, atol=1e-6)
    assert cluster.state[1] == 2
    np.testing.assert_allclose(result, W[:, 0].sum(), rtol=1e-6)
    assert cluster.split.overwritten == []


@pytest.mark.parametrize("marked", [False, True])
def test_of_several_additions_that_to_the_state_is_the_last(marked):
    def step(state, x):
        new = x.sum(1) + (x[:, 0] + state[0]) + 1.0
        return [push(new) if marked else new]

    cluster = Cluster(step, [np.ones(4, np.float32)], [0], [X])
    cluster.run_at_once(2 * X, X)
    expected = 3 + 3 * (X.sum(1) + X[:, 0])
    np.testing.assert_allclose(cluster.state[0], expected, rtol=1e-5, atol=1e-6)
    assert cluster.split.overwritten == []


def test_the_last_assignment_of_a_value_wins():
    def step(state, x):
        # No server has the state of the other.
        return [jnp.tanh(0.9 * state[0] + x.mean(0)), 0.9 * state[0] + x.mean(0)]

    cluster = Cluster(step, [W[:, 0], W[:, 1]], [0, 1], [X])
    cluster.run_at_once(2 * X, X)
    average = 0.9 * W[:, 0] + X.mean(0)
    np.testing.assert_allclose(cluster.state[0], np.tanh(average), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(cluster.state[1], average, rtol=1e-6, atol=1e-6)
    assert sorted(cluster.split.overwritten) == [0, 1]


def test_a_step_that_counts_needs_no_data():
    cluster = Cluster(lambda state, x: [state[0] + 1, x.sum()], [np.int32(5)], [1], [X])
    _, pushes = cluster.compute(X)
    assert pushes == []
    cluster.apply(pushes)
    cluster.apply(pushes)
    assert int(cluster.state[0]) == 7
