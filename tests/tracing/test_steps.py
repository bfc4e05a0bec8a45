"""What a traced step remembers, forgets and bakes in."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import distributary as dist
from distributary.errors import (
    ContextError,
    DistributaryWarning,
    ReplicaDivergenceError,
    UnsupportedError,
)


def _replica_id():
    return dist.get_replica_context().replica_id_in_sync_group


def _all_reduce(value):
    return dist.get_replica_context().all_reduce("SUM", value)


@pytest.fixture
def strategy(strategy_of):
    return strategy_of(2)


@pytest.fixture
def variable(strategy):
    def create(value=0.0, **kwargs):
        with strategy.scope():
            return dist.Variable(value, **kwargs)

    return create


# No assignment is lost


def _scan(assign, x):
    return lax.scan(lambda c, _: (c + assign(), None), x, None, length=3)[0]


def _scan_of_a_python_number(assign, x):
    # JAX traces such a body twice: the carry starts weakly typed.
    return lax.scan(lambda c, _: (c + assign() * x, None), 0, None, length=3)[0]


def _fori_loop(assign, x):
    return lax.fori_loop(0, 3, lambda i, c: c + assign() * x, 0)


def _while_loop(assign, x):
    return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] + assign()), (0, 1.0))[1]


def _cond_of_both(assign, x):
    return lax.cond(x > 0, lambda: assign() + assign() + assign(), lambda: assign())


def _nested_jit(assign, x):
    inner = jax.jit(lambda y: y + assign())
    return inner(inner(inner(x)))


def _vmap(assign, x):
    def row(y):
        return y + assign()

    return jax.vmap(row)(x * jnp.ones(5)) + jax.vmap(row)(jnp.ones(5)) + assign()


def _map(assign, x):
    return lax.map(lambda y: y + assign(), x * jnp.ones(3))


def _checkpoint(assign, x):
    inner = jax.checkpoint(lambda y: y + assign())
    return inner(inner(inner(x)))


def _scan_of_scans(assign, x):
    def outer(carry, _):
        return lax.scan(lambda c, _: (c + assign(), None), carry, None, length=3)[0], None

    return lax.scan(outer, x, None, length=1)[0]


@pytest.mark.parametrize(
    "program",
    [
        _scan,
        _scan_of_a_python_number,
        _fori_loop,
        _while_loop,
        _cond_of_both,
        _nested_jit,
        _vmap,
        _map,
        _checkpoint,
        _scan_of_scans,
    ],
)
def test_assignments_inside_take_effect_three_times(program, strategy, variable):
    count, log = variable(0.0), variable(1.0)

    def assign():
        count.assign_add(1.0)
        return log.assign(log * 2.0)

    strategy.run(lambda x: program(assign, x), (jnp.float32(1.0),))

    assert count.numpy() == 3.0
    assert log.numpy() == 8.0


def test_the_branch_that_is_not_taken_assigns_nothing(strategy, variable):
    v, w = variable(0.0), variable(0.0)

    def step(x):
        lax.cond(x > 0, lambda: v.assign(1.0), lambda: w.assign(2.0))

    strategy.run(step, (jnp.float32(-1.0),))

    assert (v.numpy(), w.numpy()) == (0.0, 2.0)


def test_values_read_back_follow_the_program(strategy, variable):
    v = variable(1.0)

    def step(x):
        first = v.value()
        v.assign_add(x)
        second = v * 10.0
        v.assign(v * v)
        return first, second, v.value()

    results = strategy.run(step, (jnp.float32(2.0),))

    assert [r.values[1] for r in results] == [1.0, 30.0, 9.0]
    assert v.numpy() == 9.0


@pytest.mark.parametrize(
    "transformed",
    [
        lambda f: jax.grad(lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0]),
        lambda f: jax.grad(jax.jit(f)),
        lambda f: jax.grad(jax.checkpoint(f)),
    ],
    ids=["grad of scan", "grad of jit", "grad of checkpoint"],
)
def test_an_assignment_that_jax_would_drop_is_an_error(transformed, strategy, variable):
    v = variable(0.0, name="counter")

    def inner(x):
        v.assign_add(1.0)
        return jnp.sin(x)

    with pytest.raises(
        UnsupportedError, match=r"variable 'counter' at .*test_steps\.py:\d+ is inside .* be lost"
    ):
        strategy.run(lambda x: transformed(inner)(x), (jnp.float32(1.0),))
    assert v.numpy() == 0.0


def test_an_assignment_under_plain_grad_takes_effect(strategy, variable):
    v = variable(0.0)

    def inner(x):
        v.assign_add(x)
        return x * x

    gradient = strategy.run(lambda x: jax.grad(inner)(x), (jnp.float32(3.0),))

    assert gradient.values[0] == 6.0
    assert v.numpy() == 3.0


def test_an_assignment_under_vmap_with_a_mapped_value_is_an_error(strategy, variable):
    v = variable(0.0, name="v")

    with pytest.raises(UnsupportedError, match=r"'v' is assigned inside .*jax\.vmap"):
        strategy.run(lambda x: jax.vmap(lambda a: v.assign(a))(x), (jnp.ones(3),))


def test_an_assignment_in_the_condition_of_a_loop_is_an_error(strategy, variable):
    v = variable(0.0, name="v")

    with pytest.raises(UnsupportedError, match="'v' is assigned in the condition"):
        strategy.run(
            lambda x: lax.while_loop(lambda c: v.assign_add(1.0) < 3, lambda c: c + 1, x),
            (jnp.float32(0.0),),
        )


# How often a step is traced


@pytest.fixture
def counted():
    """A step that notes every trace."""
    traces = []

    def step(x, *args, **kwargs):
        traces.append((jax.tree.map(jnp.shape, x), args, kwargs))
        return jax.tree.map(lambda leaf: leaf * 2, x)

    step.traces = traces
    return step


def test_shapes_dtypes_and_structures_are_traced_once(counted, strategy):
    for _ in range(2):
        for x in (1.0, 2.0, jnp.ones(2), np.ones(2, np.float32), jnp.ones(3), [1.0], {"a": 1.0}):
            strategy.run(counted, (x,))

    shapes = [shape for shape, *_ in counted.traces]
    assert [shapes.count(s) for s in [(), (3,), [()], {"a": ()}]] == [1] * 4
    # A NumPy array and a JAX array of one shape may count as two signatures.
    assert shapes.count((2,)) <= 2


def test_static_arguments_are_part_of_the_program(counted, strategy):
    for mode, flag in [("a", True), ("b", True), ("a", True), ("a", False), ("b", True)]:
        strategy.run(counted, (1.0, mode), {"flag": flag})

    assert [(args[0], kwargs["flag"]) for _, args, kwargs in counted.traces] == [
        ("a", True),
        ("b", True),
        ("a", False),
    ]


def test_objects_count_by_identity_and_are_not_kept_alive(counted, strategy):
    class Configuration:
        scale = 3.0

    first, second = Configuration(), Configuration()
    for configuration in (first, second, first):
        strategy.run(counted, (1.0, configuration))
    traced = len(counted.traces)
    counted.traces.clear()
    gone = weakref.ref(first)
    del first, configuration
    gc.collect()

    assert traced == 2
    assert gone() is None


def test_variables_as_arguments_are_told_apart(strategy, variable):
    v, w = variable(1.0), variable(10.0)

    def step(target, delta):
        target.assign_add(delta)
        return target

    assert strategy.run(step, (v, 2.0)) is v
    strategy.run(step, (w, 2.0))
    strategy.run(step, (v, 5.0))

    assert (v.numpy(), w.numpy()) == (8.0, 12.0)


def test_every_strategy_has_programs_of_its_own(counted, strategy_of):
    for num_replicas in (1, 2, 2):
        strategy_of(num_replicas).run(counted, (1.0,))

    assert len(counted.traces) == 3


def test_a_step_whose_variable_was_deleted_is_traced_again(strategy, variable):
    traces = []
    holder = [variable(1.0)]

    def step():
        traces.append(None)
        return holder[0] + 1.0

    assert strategy.run(step).values[0] == 2.0
    holder[0] = variable(5.0)
    gc.collect()

    assert strategy.run(step).values[0] == 6.0
    assert len(traces) == 2


def test_tracing_again_and_again_warns_once(counted, strategy):
    def run_on_many_sizes():
        for size in range(1, 12):
            strategy.run(counted, (np.ones(size, np.float32),))

    with pytest.warns(DistributaryWarning, match=r"argument number 0 .* changes from") as warned:
        run_on_many_sizes()

    assert len(warned) == 1


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


# JAX caches nested jits


def test_a_nested_jit_serves_every_number_of_replicas(strategy_of):
    @jax.jit
    def total(x):
        context = dist.get_replica_context()
        return context.all_reduce("SUM", x) * 100 + context.num_replicas_in_sync

    one_device = dist.OneDeviceStrategy("CPU:0")
    results = []
    for strategy in (strategy_of(2), strategy_of(4), one_device, strategy_of(1), strategy_of(2)):
        result = strategy.run(lambda x: total(x), (jnp.float32(1.0),))
        results.append(float(strategy.experimental_local_results(result)[0]))

    assert results == [202.0, 404.0, 101.0, 101.0, 202.0]


def test_a_nested_jit_reads_and_assigns_in_every_step(strategy, variable):
    v = variable(1.0)

    @jax.jit
    def advance(x):
        v.assign_add(x)
        return v * 10.0

    first = strategy.run(lambda x: advance(x), (1.0,))
    second = strategy.run(lambda x: advance(x) + advance(x), (1.0,))
    third = dist.function(lambda x: advance(x))(1.0)

    assert (first.values[0], second.values[0], third) == (20.0, 30.0 + 40.0, 50.0)
    assert v.numpy() == 5.0


def test_a_nested_jit_that_assigns_what_differs_is_an_error_in_every_step(strategy, variable):
    v = variable(0.0, name="v")
    assign = jax.jit(lambda x: v.assign(x))
    per_replica = dist.PerReplica([1.0, 2.0])
    strategy.run(lambda x: assign(x), (1.0,))

    for step in (lambda x: assign(x), lambda x: assign(x) + 1.0):
        with pytest.raises(ReplicaDivergenceError, match=r"'v' is mirrored.*test_steps\.py:\d+"):
            strategy.run(step, (per_replica,))
    assert v.numpy() == 1.0


def test_a_nested_jit_in_a_function_sees_the_current_strategy(strategy_of):
    inner = jax.jit(lambda x: x * dist.get_strategy().num_replicas_in_sync)
    outer = dist.function(lambda x: inner(x))
    results = []

    for num_replicas in (2, 4):
        with strategy_of(num_replicas).scope():
            results.append(float(outer(jnp.float32(1.0))))

    assert results == [2.0, 4.0]


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


def test_a_value_taken_before_a_step_stays(strategy, variable):
    v = variable(jnp.zeros(3))
    taken = v.value()

    strategy.run(lambda: v.assign_add(jnp.ones(3)))

    np.testing.assert_array_equal(taken, np.zeros(3))
    np.testing.assert_array_equal(v.numpy(), np.ones(3))


def test_arguments_are_not_donated(strategy, variable):
    v = variable(jnp.zeros(3))
    x = strategy.run(lambda: jnp.ones(3))

    for _ in range(2):
        strategy.run(lambda x: v.assign_add(_all_reduce(x)), (x,))

    np.testing.assert_array_equal(x.values[0], np.ones(3))
    np.testing.assert_array_equal(v.numpy(), np.full(3, 4.0))


def test_a_failing_step_leaves_the_variables_as_they_were(strategy, variable):
    v = variable(1.0)

    def step(x):
        v.assign(x * 100.0)
        raise ZeroDivisionError("in the step")

    with pytest.raises(ZeroDivisionError, match="in the step"):
        strategy.run(step, (1.0,))

    assert v.numpy() == 1.0
    assert not dist.has_strategy()


# Randomness


def test_keys_as_arguments_give_different_numbers_per_replica_when_folded(strategy):
    def step(typed, raw):
        own = [jax.random.fold_in(key, _replica_id()) for key in (typed, raw)]
        return [jax.random.normal(key, (3,)) for key in own]

    typed, raw = strategy.run(step, (jax.random.key(7), jax.random.PRNGKey(7)))

    for i in range(2):
        expected = jax.random.normal(jax.random.fold_in(jax.random.key(7), i), (3,))
        np.testing.assert_allclose(typed.values[i], expected, rtol=1e-6)
        np.testing.assert_allclose(raw.values[i], expected, rtol=1e-6)


def test_keys_of_the_closure_and_as_results(strategy):
    key = jax.random.key(3)

    own = strategy.run(lambda: jax.random.fold_in(key, _replica_id()))
    numbers = strategy.run(lambda key: jax.random.uniform(key), (own,))

    expected = [jax.random.uniform(jax.random.fold_in(key, i)) for i in range(2)]
    np.testing.assert_allclose(numbers.values, expected, rtol=1e-6)


def test_a_key_per_replica(strategy):
    keys = jax.random.split(jax.random.key(3), 2)

    numbers = strategy.run(
        lambda key: jax.random.uniform(key), (dist.PerReplica([keys[0], keys[1]]),)
    )

    np.testing.assert_allclose(numbers.values, jax.vmap(jax.random.uniform)(keys), rtol=1e-6)


def test_numbers_drawn_from_one_key_are_the_same_and_may_be_assigned(strategy, variable):
    v = variable(jnp.zeros(2))

    strategy.run(lambda key: v.assign(jax.random.normal(key, (2,))), (jax.random.key(0),))

    np.testing.assert_allclose(v.numpy(), jax.random.normal(jax.random.key(0), (2,)), rtol=1e-6)


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


# Raw jax.jit outside


def test_run_and_variables_inside_a_raw_jit_are_refused(strategy, variable):
    v = variable(1.0, name="v")

    with pytest.raises(ContextError, match=r"Compile the outer function with distributary\.func"):
        jax.jit(lambda x: strategy.run(lambda y: y, (x,)))(1.0)
    with pytest.raises(ContextError, match=r"'v' is read inside a function compiled by jax\.jit"):
        jax.jit(lambda: v.value())()
    with pytest.raises(ContextError, match="'v' is assigned inside a function compiled by"):
        jax.jit(lambda: v.assign(2.0))()


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
