"""Gradients taken in `distributary.function`, outside of the `Strategy.run` they go through."""

import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist

EVEN = dist.PerReplica([np.array([1.0, 2.0], np.float32), np.array([3.0, 4.0], np.float32)])
UNEVEN = dist.PerReplica([np.array([1.0, 2.0], np.float32), np.array([3.0], np.float32)])


@pytest.fixture
def variables(strategy):
    with strategy.scope():
        return dist.Variable(2.0), dist.Variable(3.0)


def _replica_loss(v):
    return lambda x: jnp.sum(v * v * x)


def _reduced_replica_loss(v):
    def loss(x):
        return dist.get_replica_context().all_reduce("SUM", jnp.sum(v * v * x))

    return loss


@pytest.mark.parametrize(("batch", "total"), [(EVEN, 10.0), (UNEVEN, 6.0)], ids=["even", "uneven"])
@pytest.mark.parametrize(
    ("make_loss", "op", "scale"),
    [
        (_replica_loss, "SUM", 1.0),
        (_replica_loss, "MEAN", 0.5),
        (_reduced_replica_loss, "MEAN", 1.0),
    ],
    ids=["sum", "mean", "all_reduce"],
)
def test_gradient_of_the_reduced_loss(make_loss, op, scale, batch, total, strategy, variables):
    v, unused = variables
    replica_loss = make_loss(v)

    @dist.function
    def step(batch):
        with dist.GradientTape() as tape:
            loss = strategy.reduce(op, strategy.run(replica_loss, (batch,)), axis=None)
        return loss, tape.gradient(loss, [v, unused])

    loss, gradients = step(batch)

    assert loss == 4.0 * total * scale
    assert gradients == [4.0 * total * scale, None]


def test_value_and_grad_around_run(strategy, variables):
    v, w = variables

    def loss(batch):
        per_replica = strategy.run(lambda x: v * jnp.mean(x) * w, (batch,))
        return strategy.reduce("MEAN", per_replica, axis=None)

    value, gradients = dist.value_and_grad(loss, [v, w])(EVEN)

    assert value == 2.0 * 2.5 * 3.0
    assert gradients == [7.5, 5.0]


def test_assignments_of_the_replicas_under_the_outer_tape(strategy, variables):
    v, _ = variables
    with strategy.scope():
        mean = dist.Variable(0.0, trainable=False, aggregation=dist.VariableAggregation.MEAN)

    def replica_step(x):
        mean.assign(jnp.mean(v * x))
        return jnp.sum(v * x)

    @dist.function
    def step(batch):
        with dist.GradientTape() as tape:
            loss = strategy.reduce("SUM", strategy.run(replica_step, (batch,)), axis=None)
        return tape.gradient(loss, v)

    assert step(UNEVEN) == 6.0
    assert mean.numpy() == (3.0 + 6.0) / 2
