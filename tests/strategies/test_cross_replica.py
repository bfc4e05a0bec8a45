"""Combining values of the replicas outside of steps: tables of section 3 of the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist
from distributary.errors import (
    InvalidTypeError,
    InvalidValueError,
    ReplicaMismatchError,
    UnsupportedError,
)

ON_READ = dist.VariableSynchronization.ON_READ
SUM = dist.ReduceOp.SUM
MEAN = dist.ReduceOp.MEAN


def _per_replica(*components, dtype=None):
    return dist.PerReplica([jnp.asarray(c, dtype) for c in components])


def _ragged():
    return _per_replica([1.0, 2.0, 3.0, 4.0], [5.0, 6.0])


def _matrices():
    return _per_replica(np.ones((2, 3)), 3 * np.ones((2, 3)), dtype=jnp.float32)


# Value, operation, axis, result, dtype.
REDUCTIONS = {
    "by name": (lambda: _per_replica(1.0, 3.0), "Mean", None, 2.0, "float32"),
    "NumPy scalars": (lambda: dist.PerReplica([np.int32(1), np.int32(3)]), SUM, None, 4, "int32"),
    # tf.distribute gives float64 for the mean of integers.
    "mean of integers": (lambda: _per_replica(1, 2), MEAN, None, 1.5, "float32"),
    # tf.distribute sums first and overflows.
    "mean of float16": (
        lambda: _per_replica(40000, 40000, dtype=jnp.float16),
        *(MEAN, None, 40000, "float16"),
    ),
    "complex": (
        lambda: _per_replica(1j, 2.0, dtype=jnp.complex64),
        *(MEAN, None, 1 + 0.5j, "complex64"),
    ),
    "vectors": (lambda: _per_replica([1.0, 2.0], [3.0, 4.0]), SUM, None, [4, 6], "float32"),
    "sum of an axis": (lambda: _per_replica([1.0, 2.0], [3.0, 4.0]), SUM, 0, 10, "float32"),
    "mean of an axis": (lambda: _per_replica([1.0, 2.0], [3.0, 4.0]), MEAN, 0, 2.5, "float32"),
    "mean of integers of an axis": (lambda: _per_replica([1, 2], [4]), MEAN, 0, 7 / 3, "float32"),
    # The mean counts every element the same.
    "ragged mean": (_ragged, MEAN, 0, 3.5, "float32"),
    "mean of one empty": (lambda: _per_replica([1.0, 2.0, 3.0], []), MEAN, 0, 2, "float32"),
    "all empty": (lambda: _per_replica([], []), MEAN, 0, np.nan, "float32"),
    "mean of float16 of an axis": (
        lambda: _per_replica([6e4, 6e4], [6e4], dtype=jnp.float16),
        *(MEAN, 0, 6e4, "float16"),
    ),
    "mean of large integers of an axis": (
        lambda: _per_replica([2**31 - 1] * 2, [2**31 - 1] * 2),
        *(MEAN, 0, 2.0**31, "float32"),
    ),
    "several axes": (_matrices, MEAN, (0, 1), 2, "float32"),
    "no axes": (_matrices, SUM, (), np.full((2, 3), 4), "float32"),
    "ragged rows": (
        lambda: _per_replica(np.ones((1, 3)), np.ones((2, 3)), dtype=jnp.float32),
        *(SUM, 0, [3, 3, 3], "float32"),
    ),
}


_UNEVEN = {
    name for name, (make, *_) in REDUCTIONS.items() if len({np.shape(c) for c in make().values}) > 1
}


def _eager(strategy, reduce_all, values):
    return reduce_all(values)


def _function(strategy, reduce_all, values):
    return dist.function(reduce_all)(values)


def _merge_call_of_an_uneven_batch(strategy, reduce_all, values):
    def step(x):
        return dist.get_replica_context().merge_call(lambda _, merged: reduce_all(merged), (x,))

    results = strategy.run(step, (values,))
    return {name: result.values[1] for name, result in results.items()}


def _merge_call(strategy, reduce_all, values):
    even = {name: value for name, value in values.items() if name not in _UNEVEN}
    return _merge_call_of_an_uneven_batch(strategy, reduce_all, even)


@pytest.mark.parametrize("way", [_eager, _function, _merge_call, _merge_call_of_an_uneven_batch])
def test_reduce_combines_the_replicas(way):
    strategy = dist.MirroredStrategy(["CPU:0", "CPU:1"])

    def reduce_all(values):
        return {
            name: strategy.reduce(REDUCTIONS[name][1], value, axis=REDUCTIONS[name][2])
            for name, value in values.items()
        }

    results = way(strategy, reduce_all, {name: case[0]() for name, case in REDUCTIONS.items()})

    for name, result in results.items():
        *_, expected, dtype = REDUCTIONS[name]
        np.testing.assert_allclose(result, expected, rtol=1e-6, err_msg=name)
        assert result.dtype == jnp.dtype(dtype), name


def test_slices_of_different_lengths_are_concatenated(strategy_of):
    value = dist.PerReplica(
        [
            dist.IndexedSlices(jnp.ones((2, 1)), jnp.array([0, 1]), (3, 1)),
            dist.IndexedSlices(jnp.ones((1, 1)), jnp.array([0]), (3, 1)),
        ]
    )

    total = strategy_of(2).reduce("sum", value, axis=None)
    mean = strategy_of(2).reduce("mean", value, axis=None)

    np.testing.assert_array_equal(total.indices, [0, 1, 0])
    np.testing.assert_array_equal(total.to_dense(), [[2], [1], [0]])
    np.testing.assert_array_equal(mean.to_dense(), [[1], [0.5], [0]])


def test_values_that_are_the_same_everywhere(strategy_of):
    strategy = strategy_of(2)
    with strategy.scope():
        v = dist.Variable([1.0, 2.0])
    plain = np.float32([1, 2])

    assert strategy.reduce(MEAN, plain, axis=None) is plain
    np.testing.assert_array_equal(strategy.reduce(MEAN, v, axis=None), [1, 2])
    with pytest.raises(ValueError, match="mirrored"):
        strategy.reduce(SUM, v, axis=None)
    assert float(strategy.reduce(SUM, plain, axis=0)) == 6
    assert float(strategy_of(1).reduce(SUM, plain[0], axis=None)) == 1


@pytest.mark.parametrize(
    ("op", "value", "axis", "error", "message"),
    [
        (None, 1.0, None, TypeError, "reduce_op is None"),
        (dist.VariableAggregation.SUM, 1.0, None, TypeError, "VariableAggregation.SUM"),
        (SUM, np.ones(2), None, ValueError, "not a distributed value"),
        (SUM, np.ones(2), 0.5, TypeError, "axis is 0.5"),
        (SUM, _matrices(), -3, InvalidValueError, r"axis -3 is out of range .*shape \(2, 3\)"),
        (SUM, _matrices(), (0, 5), InvalidValueError, "axis 5 is out of range"),
        (SUM, _ragged(), None, ValueError, r"\[4\].*\[2\].*axis=0"),
        (SUM, dist.PerReplica([np.array(True)] * 2), None, TypeError, "boolean"),
        (SUM, dist.PerReplica([np.array("a")] * 2), None, TypeError, "strings"),
    ],
)
def test_impossible_reduction_is_refused(op, value, axis, error, message, strategy_of):
    with pytest.raises(error, match=message):
        strategy_of(2).reduce(op, value, axis=axis)


def test_on_read_variable_is_reduced_over_its_components(strategy, variable):
    v = variable([1.0, 2.0], synchronization=ON_READ)

    strategy.run(
        lambda: v.assign_add(jnp.ones(2) * dist.get_replica_context().replica_id_in_sync_group)
    )

    for call in (lambda f: f(), lambda f: dist.function(f)()):
        np.testing.assert_array_equal(call(lambda: strategy.reduce(SUM, v, axis=None)), [3, 5])
        assert float(call(lambda: strategy.reduce(MEAN, v, axis=0))) == 2.0
        np.testing.assert_array_equal(call(lambda: strategy.gather(v, axis=0)), [1, 2, 2, 3])


@pytest.mark.parametrize("strategy", [dist.get_strategy, lambda: dist.OneDeviceStrategy("CPU:1")])
def test_one_device_gives_the_value_back(strategy):
    strategy = strategy()

    assert float(strategy.reduce("mean", jnp.array([1.0, 3.0]), axis=0)) == 2.0
    np.testing.assert_array_equal(strategy.gather(jnp.ones(2), axis=0), [1, 1])
    value = [jnp.ones(1), 2]
    assert strategy.experimental_local_results(value) == (value,)


# gather

# Components, axis, result.
GATHERS = {
    "even": ([[1, 2], [3, 4]], 0, [1, 2, 3, 4]),
    "ragged": ([[1], [2, 3]], 0, [1, 2, 3]),
    "one empty": ([np.zeros((0, 2)), np.ones((2, 2))], 0, np.ones((2, 2))),
    "second dim": ([[[1], [2]], [[3], [4]]], 1, [[1, 3], [2, 4]]),
    "ragged second dim": ([[[1], [2]], [[3, 5], [4, 6]]], 1, [[1, 3, 5], [2, 4, 6]]),
    "booleans": ([[True], [False]], 0, [True, False]),
}


def test_gather_concatenates_in_replica_order(strategy):
    def gather_all(values):
        return {name: strategy.gather(values[name], GATHERS[name][1]) for name in GATHERS}

    values = {name: _per_replica(*components) for name, (components, *_) in GATHERS.items()}

    for results in (gather_all(values), dist.function(gather_all)(values)):
        for name, (_, _, expected) in GATHERS.items():
            np.testing.assert_array_equal(results[name], expected, err_msg=name)
            assert (results[name].dtype == jnp.bool_) == (np.asarray(expected).dtype == bool)


def test_components_and_values_may_be_nests(strategy):
    value = dist.PerReplica([{"x": jnp.ones(2), "y": 1.0}, {"x": jnp.ones(2), "y": 3.0}])

    result = strategy.reduce(MEAN, value, axis=None)
    gathered = strategy.gather({"flags": _per_replica([True], [False]), "plain": 3}, axis=0)

    np.testing.assert_array_equal(result["x"], [1, 1])
    assert float(result["y"]) == 2.0
    np.testing.assert_array_equal(gathered["flags"], [True, False])
    assert gathered["plain"] == 3


@pytest.mark.parametrize(
    ("value", "axis", "error", "message"),
    [
        (lambda: _per_replica(1.0, 2.0), 0, InvalidValueError, "is a scalar"),
        (_matrices, -3, InvalidValueError, "axis -3 is out of range"),
        (_matrices, 0.0, InvalidTypeError, r"axis is 0\.0, expected an int"),
        (
            lambda: _per_replica(np.ones((1, 2)), np.ones((2, 3))),
            *(0, ReplicaMismatchError, r"replica 1 is float\d+\[2, 3\].*only dim 0 may differ"),
        ),
        (
            lambda: dist.PerReplica([jnp.ones(2), jnp.ones(3, jnp.int32)]),
            *(0, ReplicaMismatchError, r"replica 1 is int32\[3\], that of replica 0 float32\[2\]"),
        ),
        (
            lambda: dist.PerReplica([dist.IndexedSlices(jnp.ones((1, 2)), jnp.zeros(1, int))] * 2),
            *(0, UnsupportedError, "IndexedSlices cannot be gathered"),
        ),
    ],
)
def test_impossible_gather_is_refused(value, axis, error, message, strategy):
    with pytest.raises(error, match=message):
        strategy.gather(value(), axis=axis)

    # And nothing is broken by it.
    np.testing.assert_array_equal(strategy.gather(_per_replica([1], [2]), axis=0), [1, 2])


# experimental_local_results


def test_local_results(strategy):
    per_replica = _per_replica(1.0, 2.0)
    results = strategy.experimental_local_results

    assert [float(x) for x in results(per_replica)] == [1.0, 2.0]
    assert results(None) == (None,)
    assert results([1, "a"]) == ([1, "a"],)
    assert [(float(x["a"]), x["b"]) for x in results({"a": per_replica, "b": 3})] == [
        (1.0, 3),
        (2.0, 3),
    ]


# experimental_distribute_values_from_function


def test_values_from_function_lie_on_their_replicas_and_may_differ_in_shape(strategy):
    values = strategy.experimental_distribute_values_from_function(
        lambda c: (np.ones(c.replica_id_in_sync_group), None, "a", c.replica_id_in_sync_group * 1.5)
    )

    assert [c.shape for c in values[0].values] == [(0,), (1,)]
    assert [value.values for value in values[1:]] == [(None, None), ("a", "a"), (0.0, 1.5)]
    assert [c.devices() for c in values[3].values] == [{d} for d in jax.devices()[:2]]
    with pytest.raises(ValueError, match=r"replica 1 has .*structures must agree"):
        strategy.experimental_distribute_values_from_function(
            lambda context: [1] * context.replica_id_in_sync_group
        )
