"""What must not grow and what must go away."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

import distributary as dist


def _measure() -> tuple[int, int]:
    gc.collect()
    return len(jax.live_arrays()), len(gc.get_objects())


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_thousands_of_steps_leave_nothing_behind(num_replicas, strategy_of):
    strategy = strategy_of(num_replicas)
    with strategy.scope():
        w = dist.Variable(jnp.ones(16_384), name="w")

    def step(x):
        w.assign_add(dist.get_replica_context().all_reduce(dist.ReduceOp.SUM, x))
        return x.sum()

    x = strategy.experimental_distribute_values_from_function(lambda _: np.ones(16_384, np.float32))

    def take(num_steps: int) -> None:
        for _ in range(num_steps):
            total = strategy.run(step, args=(x,))
            w.value()  # makes the next step copy what it would donate
        strategy.reduce(dist.ReduceOp.SUM, total, axis=None).block_until_ready()

    take(100)
    num_programs = len(strategy.extended.engine.cache)
    arrays, objects = _measure()
    memory = psutil.Process().memory_info().rss
    take(3_000)

    arrays_after, objects_after = _measure()
    grown_bytes = psutil.Process().memory_info().rss - memory
    assert len(strategy.extended.engine.cache) == num_programs
    assert arrays_after <= arrays + 4
    assert objects_after <= objects + 300  # of 3,000 steps
    # 3,000 steps that kept one of their arrays would hold 190 MB and more.
    assert grown_bytes < 50_000_000
    np.testing.assert_array_equal(w.numpy(), 1.0 + 3_100 * num_replicas)


def test_a_dropped_strategy_is_collected_with_its_variables_and_programs(strategy_of):
    strategy = strategy_of(2)
    with strategy.scope():
        w = dist.Variable(jnp.ones(3))
    strategy.run(lambda: w.assign_add(jnp.ones(3)))  # noqa: F821  (deleted below)
    references = [weakref.ref(strategy), weakref.ref(w), weakref.ref(strategy.extended.engine)]

    del strategy, w
    gc.collect()

    assert [reference() for reference in references] == [None, None, None]


def test_dropped_steps_and_functions_are_collected_with_what_they_hold(strategy_of):
    strategy = strategy_of(2)

    class Model:
        def __init__(self):
            with strategy.scope():
                self.w = dist.Variable(jnp.ones(3))

        def step(self, x):
            with dist.GradientTape() as tape:
                loss = jnp.sum(self.w * x)
            self.w.assign_sub(tape.gradient(loss, self.w))
            return loss

    model = Model()

    def step(x):
        return model.step(x)  # noqa: F821  (deleted below)

    @dist.function
    def train(x):
        return strategy.reduce("sum", strategy.run(step, args=(x,)), axis=None)  # noqa: F821

    strategy.run(model.step, args=(jnp.ones(3),))
    strategy.run(step, args=(jnp.ones(3),))
    train(jnp.ones(3))
    assert len(strategy.extended.engine.cache) == 2
    references = [weakref.ref(one) for one in (step, model, train)]

    del step, model, train
    gc.collect()

    assert [reference() for reference in references] == [None, None, None]
    assert len(strategy.extended.engine.cache) == 0
