"""The step of a worker, split over parameter servers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from distributary.errors import UnsupportedError
from distributary.servers._split import StepInput, split_over_servers
from distributary.tracing._jaxprs import walk
from distributary.tracing._markers import push_p

RNG = np.random.default_rng(0)
W = RNG.normal(size=(3, 2)).astype(np.float32)
B = np.zeros(2, np.float32)
X = RNG.normal(size=(4, 3)).astype(np.float32)


def _primitives(closed):
    return {eqn.primitive.name for eqn in walk(closed.jaxpr.eqns)}


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

    def names_of_update(self, server):
        return _primitives(self.split.servers[server].update)


def _gradients(weights, x, marked=True):
    loss, gradients = jax.value_and_grad(lambda ws: (jnp.tanh(x @ ws[0] + ws[1]) ** 2).sum())(
        weights
    )
    return loss, [push_p.bind(g) if marked else g for g in gradients]


OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(0.01),
    "clipped": optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.01)),
    "schedule": optax.adam(optax.exponential_decay(0.1, 2, 0.5)),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_worker_and_two_servers_compute_what_one_program_computes(optimizer):
    slots, tree = jax.tree.flatten(optimizer.init([W, B]))

    def step(state, x):
        weights = state[:2]
        loss, gradients = _gradients(weights, x)
        updates, new = optimizer.update(gradients, jax.tree.unflatten(tree, state[2:]), weights)
        return [*optax.apply_updates(weights, updates), *jax.tree.leaves(new), loss]

    state = [W, B, *slots]
    # Slots lie with their variable; counters with the first.
    owners = [0, 1, *(1 if np.shape(slot) == B.shape else 0 for slot in slots)]
    cluster = Cluster(step, state, owners, [X])
    expected = state
    for i in range(3):
        *expected, loss = step(expected, X + i)
        (result,), pushes = cluster.compute(X + i)
        cluster.apply(pushes)
        np.testing.assert_allclose(result, loss, rtol=1e-6, atol=1e-6)
    for ours, theirs in zip(cluster.state, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)


def test_the_servers_update_and_the_worker_sends_each_gradient_once():
    optimizer = optax.adam(0.01)
    slots, tree = jax.tree.flatten(optimizer.init([W, B]))

    def step(state, x):
        _, gradients = _gradients(state[:2], x)
        updates, new = optimizer.update(gradients, jax.tree.unflatten(tree, state[2:]))
        return [*optax.apply_updates(state[:2], updates), *jax.tree.leaves(new)]

    owners = [0, 1, *(1 if np.shape(slot) == B.shape else 0 for slot in slots)]
    cluster = Cluster(step, [W, B, *slots], owners, [X])
    sizes = sorted(v.aval.size for v in cluster.split.worker.jaxpr.outvars)
    assert [size for size in sizes if size > 1] == [B.size, W.size]  # and counters
    assert "sqrt" in cluster.names_of_update(0)
    assert "sqrt" in cluster.names_of_update(1)
    assert "sqrt" not in _primitives(cluster.split.worker)


def test_updates_of_two_workers_add_up():
    def step(state, x):
        w, total = state
        _, (gradient, _) = _gradients([w, jnp.zeros(2)], x)
        return [w - 0.1 * gradient, total + x.sum(), x.sum()]

    cluster = Cluster(step, [W, np.float32(0)], [0, 1], [X])
    # Both have read the same weights.
    _, first = cluster.compute(X)
    _, second = cluster.compute(2 * X)
    cluster.apply(first)
    cluster.apply(second)
    gradients = [_gradients([W, B], x)[1][0] for x in (X, 2 * X)]
    np.testing.assert_allclose(cluster.state[0], W - 0.1 * sum(gradients), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(cluster.state[1], 3 * X.sum(), rtol=1e-6, atol=1e-6)


def test_an_assignment_that_was_not_pushed_adds_too():
    def step(state, x):
        _, (gradient, _) = _gradients([state[0], jnp.zeros(2)], x, marked=False)
        return [state[0] - 0.1 * gradient]

    cluster = Cluster(step, [W], [0], [X])
    _, first = cluster.compute(X)
    _, second = cluster.compute(2 * X)
    cluster.apply(first)
    cluster.apply(second)
    gradients = [_gradients([W, B], x)[1][0] for x in (X, 2 * X)]
    np.testing.assert_allclose(cluster.state[0], W - 0.1 * sum(gradients), rtol=1e-6, atol=1e-6)


def test_moving_averages_take_the_values_of_all_workers():
    cluster = Cluster(
        lambda state, x: [0.9 * state[0] + 0.1 * x.mean(0), state[1] + 1, state[0].sum()],
        [W[:, 0], np.float32(0)],
        [0, 1],
        [X],
    )
    (result,), first = cluster.compute(X)
    _, second = cluster.compute(2 * X)
    cluster.apply(second)
    cluster.apply(first)
    expected = 0.9 * (0.9 * W[:, 0] + 0.2 * X.mean(0)) + 0.1 * X.mean(0)
    np.testing.assert_allclose(cluster.state[0], expected, rtol=1e-6, atol=1e-6)
    assert cluster.state[1] == 2
    np.testing.assert_allclose(result, W[:, 0].sum(), rtol=1e-6)
    assert cluster.split.overwritten == []


@pytest.mark.parametrize("marked", [False, True])
def test_of_several_additions_that_to_the_state_is_the_last(marked):
    def step(state, x):
        new = x.sum(1) + (x[:, 0] + state[0]) + 1.0
        return [push_p.bind(new) if marked else new]

    cluster = Cluster(step, [np.ones(4, np.float32)], [0], [X])
    _, first = cluster.compute(X)
    _, second = cluster.compute(2 * X)
    cluster.apply(second)
    cluster.apply(first)
    expected = 3 + 3 * (X.sum(1) + X[:, 0])
    np.testing.assert_allclose(cluster.state[0], expected, rtol=1e-5, atol=1e-6)
    assert cluster.split.overwritten == []


def test_the_last_assignment_of_a_value_wins():
    def step(state, x):
        # No server has the state of the other.
        return [jnp.tanh(0.9 * state[0] + x.mean(0)), 0.9 * state[0] + x.mean(0)]

    cluster = Cluster(step, [W[:, 0], W[:, 1]], [0, 1], [X])
    _, first = cluster.compute(X)
    _, second = cluster.compute(2 * X)
    cluster.apply(second)
    cluster.apply(first)
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


def test_an_update_of_all_servers_at_once_is_refused():
    def step(state, x):
        _, gradients = _gradients(state, x)
        finite = jnp.isfinite(gradients[0]).all()
        new = [w - g for w, g in zip(state, gradients, strict=True)]
        return list(jax.lax.cond(finite, lambda: new, lambda: list(state)))

    with pytest.raises(UnsupportedError, match="'v0' needs variables on several servers"):
        Cluster(step, [W, B], [0, 1], [X])
