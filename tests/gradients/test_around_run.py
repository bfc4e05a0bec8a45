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
def test_gradient_of_the_reduced_loss(batch, total, strategy, variables):
    v, unused = variables
    losses = [
        (_replica_loss(v), "SUM"),
        (_replica_loss(v), "MEAN"),
        (_reduced_replica_loss(v), "MEAN"),
    ]

    @dist.function
    def step(batch):
        results = []
        for replica_loss, op in losses:
            with dist.GradientTape() as tape:
                loss = strategy.reduce(op, strategy.run(replica_loss, (batch,)), axis=None)
            results.append((loss, *tape.gradient(loss, [v, unused])))
        return results

    whole, half = (4.0 * total, 4.0 * total, None), (2.0 * total, 2.0 * total, None)
    assert step(batch) == [whole, half, whole]


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
