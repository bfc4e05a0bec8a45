"""What a traced step remembers, forgets and bakes in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import distributary as dist
from distributary.errors import ReplicaDivergenceError


def _replica_id():
    return dist.get_replica_context().replica_id_in_sync_group


def _all_reduce(value):
    return dist.get_replica_context().all_reduce("SUM", value)


# No assignment is lost


def _scan_of_a_python_number(assign, x):
    # JAX traces such a body twice: the carry starts weakly typed.
    return lax.scan(lambda c, _: (c + assign() * x, None), 0, None, length=3)[0]


def _vmap(assign, x):
    def row(y):
        return y + assign()

    return jax.vmap(row)(x * jnp.ones(5)) + jax.vmap(row)(jnp.ones(5)) + assign()


def _scan_of_scans(assign, x):
    def outer(carry, _):
        return lax.scan(lambda c, _: (c + assign(), None), carry, None, length=3)[0], None

    return lax.scan(outer, x, None, length=1)[0]


@pytest.mark.parametrize("program", [_scan_of_a_python_number, _vmap, _scan_of_scans])
def test_assignments_inside_take_effect_three_times(program, strategy, variable):
    count, log = variable(0.0), variable(1.0)

    def assign():
        count.assign_add(1.0)
        return log.assign(log * 2.0)

    strategy.run(lambda x: program(assign, x), (jnp.float32(1.0),))

    assert count.numpy() == 3.0
    assert log.numpy() == 8.0


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


def test_python_values_are_those_of_the_trace(strategy):
    factor = [2.0]

    def step(x):
        return x * factor[0]

    first = strategy.run(step, (1.0,))
    factor[0] = 3.0
    second = strategy.run(step, (1.0,))

    assert (first.values[0], second.values[0]) == (2.0, 2.0)


def test_python_numbers_stay_weakly_typed(strategy):
    def step(x):
        return x * jnp.bfloat16(1.5), x + jnp.int8(1) if jnp.result_type(x) == jnp.int32 else x

    product, _ = strategy.run(step, (2.0,))
    strong, _ = strategy.run(step, (jnp.float32(2.0),))
    _, small = strategy.run(step, (3,))

    assert product.values[0].dtype == jnp.bfloat16
    assert strong.values[0].dtype == jnp.float32
    assert small.values[0].dtype == jnp.int8


def test_numpy_doubles_become_floats(strategy):
    double = np.arange(3.0)

    result = strategy.run(lambda x: x + double, (double,))

    assert result.values[0].dtype == jnp.float32
    np.testing.assert_array_equal(result.values[0], [0, 2, 4])


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


def test_a_step_may_name_a_local_variable_that_gets_its_value_later(strategy):
    def step(x):
        return x * 2 if x.ndim == 0 else summed(x)

    result = strategy.run(step, args=(1.0,))
    summed = jnp.sum

    assert [float(x) for x in strategy.experimental_local_results(result)] == [2, 2]
    assert float(step(jnp.ones(3))) == 3


def test_a_step_may_use_containers_that_hold_themselves_or_keys_without_order(strategy):
    scales = {len: jnp.float32(2), max: jnp.float32(3)}
    cycle = [jnp.float32(4)]
    cycle.append(cycle)

    result = strategy.run(lambda x: x * scales[max] * cycle[1][0], args=(1.0,))

    assert [float(x) for x in strategy.experimental_local_results(result)] == [12, 12]
