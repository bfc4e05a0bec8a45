import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist
from distributary.errors import ContextError, InvalidTypeError, InvalidValueError


def _merge(function, *args, **kwargs):
    return dist.get_replica_context().merge_call(function, args, kwargs)


def test_arrays_arrive_as_per_replica_and_other_values_as_they_are(on_replicas):
    arrived = []

    def merged(strategy, array, number, text, nest):
        arrived.append((strategy, array, number, text, nest))
        return strategy.reduce("SUM", array, axis=None)

    def step(x):
        return _merge(merged, x, 3, text="t", nest={"x": [x]})

    results = on_replicas(step, [1.0, 2.0])

    strategy, array, number, text, nest = arrived[0]
    assert results == (3.0, 3.0)
    assert isinstance(array, dist.PerReplica)
    assert isinstance(nest["x"][0], dist.PerReplica)
    assert (number, text) == (3, "t")
    assert isinstance(strategy, dist.MirroredStrategy)
    assert len(arrived) == 1


def test_runs_in_a_cross_replica_context(on_replicas):
    seen = []

    def merged(strategy):
        seen.append((dist.in_cross_replica_context(), dist.get_replica_context()))

    def step(x):
        _merge(merged)
        seen.append(dist.in_cross_replica_context())
        return x

    on_replicas(step, [1.0, 2.0])

    assert seen == [(True, None), False]


def test_results_are_handed_back_by_kind(strategy_of):
    strategy = strategy_of(2)
    with strategy.scope():
        v = dist.Variable(5.0)

    def step(x):
        given = _merge(
            lambda s, x: {"own": x, "mean": s.reduce("MEAN", x, None), "v": v, "n": 3}, x
        )
        assert given["v"] is v
        assert given["n"] == 3
        return given["own"], given["mean"]

    own, mean = strategy.run(step, (dist.PerReplica([1.0, 3.0]),))

    assert own.values == (1.0, 3.0)
    assert mean.values == (2.0, 2.0)


def test_components_are_visible_inside(on_replicas):
    def merged(strategy, x):
        first, second = strategy.experimental_local_results(x)
        return first - second

    assert on_replicas(lambda x: _merge(merged, x), [1.0, 3.0]) == (-2.0, -2.0)


def test_run_and_update_inside(strategy_of):
    strategy = strategy_of(2)
    with strategy.scope():
        v = dist.Variable(1.0)

    def merged(strategy, x):
        total = strategy.reduce("SUM", x, None)
        strategy.extended.update(v, lambda v, t: v.assign_add(t), args=(total,))
        return strategy.run(lambda x: x * 10, args=(x,))

    result = strategy.run(lambda x: _merge(merged, x), (dist.PerReplica([1.0, 3.0]),))

    assert result.values == (10.0, 30.0)
    assert v.numpy() == 5.0


def test_gather_inside(on_replicas):
    results = on_replicas(
        lambda x: _merge(lambda s, x: s.gather(x, 0), x), [np.ones(2), np.full(2, 3.0)]
    )

    np.testing.assert_array_equal(results[0], [1, 1, 3, 3])


def test_on_an_uneven_batch(on_replicas):
    def step(x):
        return _merge(lambda s, x: s.reduce("SUM", x, None), jnp.sum(x))

    assert on_replicas(step, [np.ones(2, np.float32), np.ones(1, np.float32)]) == (3.0, 3.0)


@pytest.mark.parametrize("num_replicas", [1])
def test_one_replica_gets_its_own_values(num_replicas, strategy_of):
    strategy = strategy_of(num_replicas)

    assert strategy.run(lambda x: _merge(lambda s, x: x * 2, x), (jnp.float32(3),)) == 6.0


def test_outside_of_run():
    assert _merge(lambda strategy, x: (strategy.num_replicas_in_sync, x), 5.0) == (1, 5.0)


def test_inside_control_flow_and_jit(on_replicas):
    def total(x):
        return _merge(lambda s, x: s.reduce("SUM", x, None), x)

    def step(x):
        scanned = jax.lax.scan(lambda c, row: (c + total(row), None), 0.0, x)[0]
        return scanned, jax.jit(total)(x)

    scanned, summed = on_replicas(step, [np.array([1.0, 2.0]), np.array([3.0, 4.0])])[0]

    assert scanned == 10.0
    np.testing.assert_array_equal(summed, [4, 6])


def test_gradient_through_merge_call(on_replicas):
    def step(x):
        with dist.GradientTape() as tape:
            tape.watch(x)
            y = _merge(lambda s, x: s.reduce("SUM", x, None), x * x)
        return tape.gradient(y, x)

    assert on_replicas(step, [1.0, 2.0]) == (4.0, 8.0)


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_indexed_slices_are_reduced_by_concatenation(op, on_replicas):
    def step(rows):
        slices = dist.IndexedSlices(rows, jnp.array([0]), (3, 2))
        return _merge(lambda s, g: s.extended.reduce_to(op, g, "CPU:0"), slices)

    results = on_replicas(step, [np.full((1, 2), 1.0), np.full((1, 2), 3.0)])

    scale = 1.0 if op == "SUM" else 0.5
    np.testing.assert_array_equal(results[0].indices, [0, 0])
    np.testing.assert_array_equal(results[0].values, np.array([[1, 1], [3, 3]]) * scale)


def test_errors_of_the_merged_function_come_out(on_replicas):
    def merged(strategy):
        raise ZeroDivisionError("from the merged function")

    with pytest.raises(ZeroDivisionError, match="from the merged function"):
        on_replicas(lambda x: _merge(merged), [1.0, 2.0])


def test_summing_what_is_the_same_everywhere_is_refused(on_replicas):
    with pytest.raises(InvalidValueError, match=r"cannot SUM .* over 2 replicas"):
        on_replicas(lambda x: _merge(lambda s, n: s.reduce("SUM", n, None), 3), [1.0, 2.0])


def test_arguments_must_be_a_list_or_tuple(strategy_of):
    def step(x):
        return dist.get_replica_context().merge_call(lambda s, x: x, args=x)

    with pytest.raises(InvalidTypeError, match=r"merge_call: args is .*, expected a list or tuple"):
        strategy_of(2).run(step, (jnp.float32(1),))


def test_inside_merge_call_there_is_no_replica_context(strategy_of):
    def step():
        context = dist.get_replica_context()
        return context.merge_call(lambda s: context.merge_call(lambda s: 1.0))

    with pytest.raises(ContextError, match="runs in a cross-replica context"):
        strategy_of(2).run(step)
