"""What a traced step remembers, forgets and bakes in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import distributary as dist
from distributary.errors import ReplicaDivergenceError

# Tapes


def test_a_tape_is_traced_once_where_its_gradients_are_as_expected(strategy, variable):
    v, table = variable(2.0), variable(jnp.ones((4, 2)))
    traces = []

    def step(x):
        traces.append(None)
        with dist.GradientTape() as tape:
            loss = v * x + jnp.sum(table.sparse_read(jnp.array([1])))
        return tape.gradient(loss, [v, table])

    strategy.run(step, (jnp.float32(1.0),))

    assert len(traces) == 1


# What is captured


def test_arrays_of_the_closure_are_captured_and_not_baked_in(strategy):
    large = np.random.default_rng(0).normal(size=(300, 300)).astype(np.float32)
    on_device = jnp.asarray(large)

    def step(x):
        return jnp.sum(large * x) + jnp.sum(on_device * x)

    result = strategy.run(step, (1.0,))
    text = strategy.extended.lower(step, (1.0,)).as_text()

    np.testing.assert_allclose(result.values[1], 2 * large.sum(dtype=np.float64), rtol=1e-3)
    assert len(text) < 100_000


def test_python_numbers_stay_weakly_typed_and_doubles_become_floats(strategy):
    double = np.arange(3.0)

    def step(number, integer, array):
        return (
            number * jnp.bfloat16(1.5),
            integer + jnp.int8(1),
            array * jnp.bfloat16(1),
            array + double,
        )

    results = strategy.run(step, (2.0, 3, double))

    dtypes = [result.values[0].dtype for result in results]
    assert dtypes == [jnp.bfloat16, jnp.int8, jnp.float32, jnp.float32]
    np.testing.assert_array_equal(results[-1].values[0], [0, 2, 4])


@pytest.mark.skipif(
    jax.__version__.startswith("0.11."),
    reason="XLA of JAX 0.11 crashes in a sharded program that returns an empty array and another",
)
def test_zero_and_odd_arguments(strategy):
    def step(empty, half, flag, nothing, text):
        assert nothing is None
        assert flag is True
        return empty, half + 1, len(text)

    empty, half, length = strategy.run(step, (np.zeros((0, 3)), np.float16(0.5), True, None, "abc"))

    assert empty.values[0].shape == (0, 3)
    assert half.values[0].dtype == jnp.float16
    assert length == 3


# Buffers


def test_the_buffers_of_assigned_variables_are_donated(strategy, variable):
    written, read = variable(jnp.zeros(3)), variable(jnp.ones(3))
    before, kept = written._value, read._value

    strategy.run(lambda: written.assign_add(read))

    assert before.is_deleted()
    assert not kept.is_deleted()
    np.testing.assert_array_equal(written.numpy(), np.ones(3))


# Groups of replicas


GROUPS = [[0, 1], [2, 3]]
ACROSS = [[0, 2], [1, 3]]


@pytest.mark.parametrize(
    ("groups", "agree"),
    [((GROUPS, ACROSS), True), ((GROUPS,), False), ((GROUPS, GROUPS), False)],
    ids=["inside and across", "inside", "inside twice"],
)
def test_sums_over_groups_agree_once_they_reach_everybody(groups, agree, strategy_of):
    strategy = strategy_of(4)
    with strategy.scope():
        v = dist.Variable(0.0)

    def step(x):
        for axis_index_groups in groups:
            x = lax.psum(x, "replica", axis_index_groups=axis_index_groups)
        # Also through loops, branches and nested functions.
        x = lax.fori_loop(0, 2, lambda i, a: a + x, 0.0)
        x = jax.jit(lambda a: lax.cond(True, lambda: a, lambda: a * 2.0))(x)
        v.assign(x)

    argument = (dist.PerReplica([1.0, 2.0, 3.0, 4.0]),)
    if agree:
        strategy.run(step, argument)
        assert v.numpy() == 20.0
    else:
        with pytest.raises(ReplicaDivergenceError, match="can differ between replicas"):
            strategy.run(step, argument)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_gradients_pass_arrays_that_lie_on_all_devices(num_replicas, strategy_of):
    """Such as the statistics of a Keras layer that was adapted in the scope."""
    strategy = strategy_of(num_replicas)
    with strategy.scope():
        captured = dist.Variable(np.float32([1.0, 2.0, 3.0])).value()

    def step(x):
        product = jax.jit(lambda x: jnp.sum(x * captured))
        gradient = jax.grad(lambda x: jnp.mean(jnp.square(x - captured)) + product(x))(x)
        return jnp.sum(gradient * captured)

    x = np.float32([0.5, -1.0, 2.0])
    given = strategy.experimental_distribute_values_from_function(lambda _: x)

    results = strategy.experimental_local_results(strategy.run(step, args=(given,)))

    c = np.float32([1.0, 2.0, 3.0])
    expected = np.sum((2 * (x - c) / 3 + c) * c)
    np.testing.assert_allclose(results, [expected] * num_replicas, rtol=1e-6)


def test_closures_may_have_any_content_and_python_values_are_those_of_the_trace(strategy):
    scales = {len: jnp.float32(2), max: jnp.float32(3)}  # keys without order
    cycle, factor = [jnp.float32(4)], [2.0]
    cycle.append(cycle)

    def step(x):
        return x * scales[max] * cycle[1][0] * factor[0] if x.ndim == 0 else summed(x)

    results = [strategy.run(step, args=(1.0,))]
    factor[0] = 3.0
    summed = jnp.sum  # gets its value later
    results += [strategy.run(step, args=(1.0,)), strategy.run(step, args=(jnp.ones(3),))]

    assert [float(result.values[1]) for result in results] == [24.0, 24.0, 3.0]
