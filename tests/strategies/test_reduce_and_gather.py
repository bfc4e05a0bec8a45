"""`Strategy.reduce` and `Strategy.gather` against NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist

SUM, MEAN = dist.ReduceOp.SUM, dist.ReduceOp.MEAN


def _per_replica(strategy, *components):
    return strategy.experimental_distribute_values_from_function(
        lambda context: components[context.replica_id_in_sync_group]
    )


@pytest.mark.parametrize(
    ("num_replicas", "axis", "op"),
    [
        *[(3, axis, op) for axis in (None, 0, 1, -1, (0, 1)) for op in (SUM, MEAN)],
        *[(n, axis, MEAN) for n in (1, 2, 8) for axis in (None, 0)],
    ],
)
def test_results_are_those_of_numpy(strategy_of, num_replicas, axis, op):
    strategy = strategy_of(num_replicas)
    random = np.random.default_rng(0)
    components = [random.normal(size=(2, 3)).astype(np.float32) for _ in range(num_replicas)]
    stacked = np.stack(components)

    result = strategy.reduce(op, _per_replica(strategy, *components), axis=axis)

    if axis is None:
        expected = stacked.sum(0) if op is SUM else stacked.mean(0)
    else:
        inner = tuple(a % 2 + 1 for a in (axis if isinstance(axis, tuple) else (axis,)))
        function = np.sum if op is SUM else np.mean
        expected = function(stacked, axis=(0, *inner))
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("op", "dtype", "values", "expected", "expected_dtype"),
    [
        (SUM, "int32", [1, 2], 3, "int32"),
        (MEAN, "int32", [1, 2], 1.5, "float32"),
        (MEAN, "int32", [2**31 - 1, 2**31 - 1], 2.0**31, "float32"),
        (MEAN, "int32", [-3, 2], -0.5, "float32"),
        (MEAN, "uint8", [255, 254], 254.5, "float32"),
        (MEAN, "float16", [40000, 40000], 40000, "float16"),
        (MEAN, "float32", [3e38, 3e38], 3e38, "float32"),
        (MEAN, "bfloat16", [1, 2], 1.5, "bfloat16"),
        (SUM, "complex64", [1 + 1j, 2], 3 + 1j, "complex64"),
    ],
)
def test_dtypes(strategy_of, op, dtype, values, expected, expected_dtype):
    strategy = strategy_of(2)
    value = _per_replica(strategy, *(jnp.asarray(v, dtype) for v in values))

    result = strategy.reduce(op, value, axis=None)

    assert result.dtype == expected_dtype
    np.testing.assert_allclose(np.asarray(result, np.complex64), expected, rtol=1e-3)


def test_the_mean_over_an_axis_counts_every_example_the_same_on_uneven_batches(strategy_of):
    strategy = strategy_of(2)
    uneven = _per_replica(strategy, np.float32([1, 2, 3, 4]), np.float32([5, 6]))
    empty = _per_replica(strategy, np.float32([1, 2, 3]), np.zeros(0, np.float32))

    assert float(strategy.reduce("sum", uneven, axis=0)) == 21
    assert float(strategy.reduce("mean", uneven, axis=0)) == 3.5
    assert float(strategy.reduce("sum", empty, axis=0)) == 6
    assert float(strategy.reduce("mean", empty, axis=0)) == 2
    with pytest.raises(ValueError, match=r"\(4,\), \(2,\).*axis=0"):
        strategy.reduce("sum", uneven, axis=None)


def test_a_nest_is_reduced_leaf_by_leaf(strategy_of):
    strategy = strategy_of(2)
    nest = strategy.run(
        lambda: {
            "a": dist.get_replica_context().replica_id_in_sync_group,
            "b": [jnp.ones(2), jnp.zeros(3)],
        }
    )

    result = strategy.reduce(SUM, nest, axis=None)

    assert int(result["a"]) == 1
    np.testing.assert_array_equal(result["b"][0], [2, 2])


def test_indexed_slices_are_concatenated(strategy_of):
    strategy = strategy_of(2)

    def step(scale):
        return dist.IndexedSlices(jnp.ones((1, 2)) * scale, jnp.array([3]), (5, 2))

    slices = strategy.run(step, args=(_per_replica(strategy, np.float32(1), np.float32(10)),))
    total = strategy.reduce(SUM, slices, axis=None)
    mean = strategy.reduce(MEAN, slices, axis=None)

    np.testing.assert_array_equal(total.values, [[1, 1], [10, 10]])
    np.testing.assert_array_equal(total.indices, [3, 3])
    np.testing.assert_array_equal(mean.values, [[0.5, 0.5], [5, 5]])
    np.testing.assert_array_equal(total.to_dense()[3], [11, 11])


@pytest.mark.parametrize(
    ("op", "value", "axis", "error", "message"),
    [
        ("product", 1.0, None, ValueError, "'product', which is not a valid ReduceOp"),
        (None, 1.0, None, TypeError, "reduce_op is None"),
        (dist.VariableAggregation.SUM, 1.0, None, TypeError, "VariableAggregation.SUM"),
        (SUM, np.ones(2), None, ValueError, "not a distributed value"),
        (SUM, 3.0, None, ValueError, "cannot SUM 3.0"),
        (SUM, np.ones(2), [0], TypeError, r"axis is \[0\]"),
        (SUM, np.ones(2), 0.5, TypeError, "axis is 0.5"),
        (SUM, np.ones(2), 4, ValueError, "axis 4 is out of range"),
    ],
)
def test_misuse_of_reduce(strategy_of, op, value, axis, error, message):
    with pytest.raises(error, match=message):
        strategy_of(2).reduce(op, value, axis=axis)


@pytest.mark.parametrize("components", [[True, False], ["a", "b"]])
def test_what_cannot_be_added_is_refused(strategy_of, components):
    strategy = strategy_of(2)
    with pytest.raises(TypeError, match=r"boolean|strings"):
        strategy.reduce(SUM, dist.PerReplica([np.array(c) for c in components]), axis=None)


def test_axis_is_required(strategy_of):
    with pytest.raises(TypeError, match="axis"):
        strategy_of(2).reduce(SUM, 1.0)


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


def test_a_per_replica_of_another_number_of_replicas_is_refused(strategy_of):
    with pytest.raises(ValueError, match="3 components"):
        strategy_of(2).reduce(SUM, dist.PerReplica([1.0, 2.0, 3.0]), axis=None)


@pytest.mark.parametrize("num_replicas", [1, 2, 4])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_gather_concatenates_in_replica_order(strategy_of, num_replicas, axis):
    strategy = strategy_of(num_replicas)
    components = [np.full((2, 3), float(i), np.float32) for i in range(num_replicas)]

    result = strategy.gather(_per_replica(strategy, *components), axis=axis)

    np.testing.assert_array_equal(result, np.concatenate(components, axis))


def test_gather_takes_different_lengths_and_empty_components(strategy_of):
    strategy = strategy_of(3)
    value = _per_replica(strategy, np.ones((2, 1)), np.zeros((0, 1)), np.full((1, 1), 3.0))

    np.testing.assert_array_equal(strategy.gather(value, axis=0), [[1], [1], [3]])


def test_gather_of_bools_and_nests(strategy_of):
    strategy = strategy_of(2)
    flags = _per_replica(strategy, np.array([True]), np.array([False]))

    result = strategy.gather({"flags": flags, "plain": 3}, axis=0)

    np.testing.assert_array_equal(result["flags"], [True, False])
    assert result["plain"] == 3


@pytest.mark.parametrize(
    ("components", "axis", "error", "message"),
    [
        ([np.float32(1), np.float32(2)], 0, ValueError, "scalar"),
        ([np.ones(2), np.ones(2)], 1, ValueError, "axis 1 is out of range"),
        ([np.ones((1, 2)), np.ones((1, 3))], 0, ValueError, r"\(1, 3\).*\(1, 2\)"),
        ([np.ones(2), np.ones(2)], "0", TypeError, "axis is '0'"),
    ],
)
def test_misuse_of_gather(strategy_of, components, axis, error, message):
    strategy = strategy_of(2)
    with pytest.raises(error, match=message):
        strategy.gather(_per_replica(strategy, *components), axis=axis)


def test_gather_refuses_indexed_slices(strategy_of):
    with pytest.raises(NotImplementedError, match="IndexedSlices"):
        strategy_of(2).gather(dist.IndexedSlices(np.ones((1, 2)), np.zeros(1, int)), axis=0)


@pytest.mark.parametrize("call", ["reduce", "gather", "run", "scope"])
def test_cross_replica_methods_are_refused_inside_run(strategy_of, call):
    strategy = strategy_of(2)
    calls = {
        "reduce": lambda: strategy.reduce(SUM, 1.0, axis=None),
        "gather": lambda: strategy.gather(jnp.ones(2), axis=0),
        "run": lambda: strategy.run(lambda: 1),
        "scope": lambda: strategy.scope().__enter__(),
    }
    with pytest.raises(RuntimeError, match=f"{call}.*Strategy.run"):
        strategy.run(calls[call])


@pytest.mark.parametrize(
    ("components", "dtype", "expected"),
    [
        ([[60000.0, 60000.0], [60000.0, 60000.0]], "float16", 60000.0),
        ([[60000.0, 60000.0], [60000.0]], "float16", 60000.0),
        ([[2**31 - 1] * 2] * 2, "int32", 2.0**31),
    ],
)
def test_the_mean_over_an_axis_does_not_overflow(strategy_of, components, dtype, expected):
    value = dist.PerReplica([jnp.asarray(c, dtype) for c in components])

    assert float(strategy_of(2).reduce("mean", value, axis=0)) == expected


def test_slices_of_different_lengths_are_reduced(strategy_of):
    value = dist.PerReplica(
        [
            dist.IndexedSlices(jnp.ones((2, 1)), jnp.array([0, 1]), (3, 1)),
            dist.IndexedSlices(jnp.ones((1, 1)), jnp.array([0]), (3, 1)),
        ]
    )

    total = strategy_of(2).reduce("sum", value, axis=None)
    mean = strategy_of(2).reduce("mean", value, axis=None)

    np.testing.assert_array_equal(total.to_dense(), [[2], [1], [0]])
    np.testing.assert_array_equal(mean.to_dense(), [[1], [0.5], [0]])
