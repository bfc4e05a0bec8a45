"""Nested jits, whose traces JAX caches, mean each time what they mean where they are called."""

import jax
import jax.numpy as jnp
import pytest

import distributary as dist

SUM = dist.VariableAggregation.SUM
ON_READ = dist.VariableSynchronization.ON_READ


def test_an_assignment_in_a_cached_helper_is_not_lost_under_grad(strategy, variable):
    v = variable(1.0, name="w")

    @jax.jit
    def helper(x):
        v.assign_add(1.0)
        return x * x

    strategy.run(lambda: helper(2.0))  # JAX keeps the trace.
    with pytest.raises(NotImplementedError, match="'w'"):
        strategy.run(lambda: jax.grad(helper)(2.0))
    assert v.numpy() == 2.0


def test_a_cached_helper_reads_by_the_context_it_is_called_in(strategy, variable):
    local = variable(1.0, synchronization=ON_READ, aggregation=SUM)
    helper = jax.jit(lambda: local.value() * 1)

    def step():
        return helper(), dist.get_replica_context().merge_call(lambda _: helper())

    own, total = strategy.run(step)

    assert [float(x) for x in own.values] == [1.0, 1.0]
    assert [float(x) for x in total.values] == [2.0, 2.0]


def test_a_cached_helper_assigns_by_the_context_it_is_called_in(strategy, variable):
    v = variable(0.0, aggregation=SUM)
    helper = jax.jit(lambda x: v.assign_add(x))

    def step(x):
        helper(x)  # a sum over two replicas
        dist.get_replica_context().merge_call(lambda _: helper(jnp.sqrt(1.0)))  # once

    strategy.run(step, (jnp.float32(1.0),))

    assert v.numpy() == 3.0
