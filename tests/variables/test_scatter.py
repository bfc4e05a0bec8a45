"""Changing and reading rows, against NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist
from distributary.errors import ReplicaDivergenceError

ON_READ = dist.VariableSynchronization.ON_READ
NONE = dist.VariableAggregation.NONE
SUM = dist.VariableAggregation.SUM
MEAN = dist.VariableAggregation.MEAN
FIRST = dist.VariableAggregation.ONLY_FIRST_REPLICA

_UFUNCS = {
    "scatter_add": np.add,
    "scatter_sub": np.subtract,
    "scatter_mul": np.multiply,
    "scatter_div": np.divide,
    "scatter_min": np.minimum,
    "scatter_max": np.maximum,
}
LINEAR = ("scatter_add", "scatter_sub", "scatter_mul", "scatter_div")
KINDS = (*_UFUNCS, "scatter_update")
NUM_ROWS, WIDTH = 5, 2


def _scatter(kind, array, values, indices):
    """What a scatter does to an array, row after row."""
    result = array.copy()
    for row, index in zip(values, indices, strict=True):
        result[index] = row if kind == "scatter_update" else _UFUNCS[kind](result[index], row)
    return result


def _initial():
    return np.arange(1, 1 + NUM_ROWS * WIDTH, dtype=np.float32).reshape(NUM_ROWS, WIDTH)


def _rows_of_replica(kind, replica):
    """Two rows; index 1 repeats over replicas except where the last of equal rows would win."""
    values = np.array([[2, 4], [-3, 8]], np.float32) * (replica + 1)
    first = 1 if kind != "scatter_update" else replica % NUM_ROWS
    return values, np.array([first, (2 + replica) % NUM_ROWS])


def _create(strategy, kinds, **kwargs):
    with strategy.scope():
        return {kind: dist.Variable(_initial(), name=kind, **kwargs) for kind in kinds}


@pytest.mark.parametrize(
    ("aggregation", "num_replicas"), [(SUM, 1), (FIRST, 2), (SUM, 2), (MEAN, 4)]
)
def test_replicas_rows_are_combined_as_the_aggregation_says(aggregation, num_replicas, strategy_of):
    strategy = strategy_of(num_replicas)
    kinds = KINDS if aggregation is FIRST else LINEAR
    variables = _create(strategy, kinds, aggregation=aggregation)
    rows = [{kind: _rows_of_replica(kind, i) for kind in kinds} for i in range(num_replicas)]

    def step(rows):
        return {
            kind: getattr(v, kind)(dist.IndexedSlices(*rows[kind])) for kind, v in variables.items()
        }

    results = strategy.run(step, (dist.PerReplica(rows),))

    for kind, v in variables.items():
        expected = _initial()
        for replica in range(1 if aggregation is FIRST else num_replicas):
            rows, ids = _rows_of_replica(kind, replica)
            rows = rows / num_replicas if aggregation is MEAN else rows
            expected = _scatter(kind, expected, rows, ids)
        np.testing.assert_allclose(v.numpy(), expected, rtol=1e-6, err_msg=kind)
        for result in strategy.experimental_local_results(results[kind]):
            np.testing.assert_array_equal(result, v.numpy(), err_msg=kind)


def _in_scope(strategy, function):
    with strategy.scope():
        return function()


def _in_update(strategy, function):
    v = _in_scope(strategy, lambda: dist.Variable(0.0))
    return strategy.extended.update(v, lambda _: function())


def _in_merge_call(strategy, function):
    return strategy.run(lambda: dist.get_replica_context().merge_call(lambda _: function()))


_CALLS = {
    "run": lambda strategy, function: strategy.run(function),
    "scope": _in_scope,
    "function": lambda strategy, function: dist.function(function)(),
    "merge_call": _in_merge_call,
    "update": _in_update,
}


@pytest.mark.parametrize("context", _CALLS)
def test_equal_rows_count_once(context, strategy):
    variables = {
        (aggregation, kind): v
        for aggregation in ((NONE, FIRST) if context == "run" else (NONE, SUM, MEAN, FIRST))
        for kind, v in _create(
            strategy, KINDS if aggregation in (NONE, FIRST) else LINEAR, aggregation=aggregation
        ).items()
    }

    def scatter_all():
        for (_, kind), v in variables.items():
            getattr(v, kind)(dist.IndexedSlices(*_rows_of_replica(kind, 0)))

    _CALLS[context](strategy, scatter_all)  # in run, equal rows of all replicas

    for key, v in variables.items():
        expected = _scatter(key[1], _initial(), *_rows_of_replica(key[1], 0))
        np.testing.assert_allclose(v.numpy(), expected, rtol=1e-6, err_msg=str(key))


@pytest.mark.parametrize("part", ["values", "indices"])
def test_different_rows_without_aggregation_are_refused(part, strategy):
    variables = _create(strategy, KINDS)

    def step(kind):
        replica_id = dist.get_replica_context().replica_id_in_sync_group
        values, indices = jnp.ones((1, WIDTH)), jnp.zeros(1, jnp.int32)
        if part == "values":
            values += replica_id
        else:
            indices += replica_id
        getattr(variables[kind], kind)(dist.IndexedSlices(values, indices))

    for kind in KINDS:
        message = rf"'{kind}' is mirrored.*test_scatter.py:\d+"
        with pytest.raises(ReplicaDivergenceError, match=message):
            strategy.run(step, (kind,))


_CONTEXTS = pytest.mark.parametrize("call", list(_CALLS.values())[:3], ids=list(_CALLS)[:3])


@_CONTEXTS
@pytest.mark.parametrize(
    ("kind", "kwargs", "named"),
    [
        ("scatter_min", {"aggregation": SUM}, "SUM"),
        ("scatter_max", {"aggregation": MEAN}, "MEAN"),
        ("scatter_update", {"aggregation": SUM}, "SUM"),
        *[(kind, {"synchronization": ON_READ, "aggregation": SUM}, "ON_READ") for kind in KINDS],
    ],
)
def test_what_has_no_meaning_is_refused(kind, kwargs, named, call, strategy):
    v = _create(strategy, [kind], **kwargs)[kind]

    with pytest.raises(NotImplementedError, match=rf"'{kind}': {kind} is not defined for.*{named}"):
        call(strategy, lambda: getattr(v, kind)(dist.IndexedSlices(*_rows_of_replica(kind, 0))))

    np.testing.assert_array_equal(v.values[0].numpy(), _initial())


@_CONTEXTS
@pytest.mark.parametrize(
    ("slices", "error", "message"),
    [
        (np.ones((1, WIDTH)), TypeError, "got ndarray"),
        (dist.IndexedSlices(np.ones((1, 1)), [0]), ValueError, r"rows of shape \(1, 1\).*\(5, 2\)"),
        (dist.IndexedSlices([[1.0, 2.0]], [0, 1]), ValueError, r"\(1, 2\) and indices.*\(2,\)"),
        (dist.IndexedSlices(np.ones((1, 2)), [0.0]), TypeError, "integer indices, got float"),
        (dist.IndexedSlices(np.ones((1, 2)) * 1j, [0]), TypeError, "dtype complex128.*is float32"),
    ],
    ids=["array", "narrow row", "too few rows", "float indices", "complex rows"],
)
def test_rows_that_do_not_fit_are_refused(slices, error, message, call, strategy):
    v = _create(strategy, ["w"])["w"]

    with pytest.raises(error, match=rf"'w': scatter_add.*{message}"):
        call(strategy, lambda: v.scatter_add(slices))


@_CONTEXTS
def test_rows_out_of_range_are_dropped(call, strategy):
    variables = _create(strategy, KINDS)
    slices = dist.IndexedSlices([[100.0, -100.0], [2.0, 2.0]], [NUM_ROWS, 0])

    call(strategy, lambda: [getattr(v, kind)(slices) for kind, v in variables.items()])

    for kind, v in variables.items():
        expected = _scatter(kind, _initial(), [[2.0, 2.0]], [0])
        np.testing.assert_allclose(v.numpy(), expected, rtol=1e-6, err_msg=kind)


def test_dtype_is_kept(strategy, variable):
    variables = {
        (kind, dtype): variable(np.array([7, -7, 3]), dtype=dtype, aggregation=SUM)
        for kind in LINEAR
        for dtype in ("int32", "float16", "bfloat16", "complex64")
    }

    def scatter_all():
        for (kind, dtype), v in variables.items():
            rows = np.array([2, 2]).astype(jnp.dtype(dtype))
            getattr(v, kind)(dist.IndexedSlices(rows, np.array([0, 1])))

    scatter_all()
    strategy.run(scatter_all)

    for (kind, dtype), v in variables.items():
        expected = {
            "scatter_add": [13, -1, 3],
            "scatter_sub": [1, -13, 3],
            "scatter_mul": [56, -56, 3],
            # Integers are rounded towards zero each time, 7 to 3 and to 3 / 4.
            "scatter_div": [0, 0, 3] if dtype == "int32" else [0.875, -0.875, 3],
        }[kind]
        assert v.value().dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(
            v.numpy().astype(np.complex64), expected, err_msg=f"{kind} {dtype}"
        )


@pytest.mark.parametrize("synchronization", [dist.VariableSynchronization.ON_WRITE, ON_READ])
def test_rows_are_read(synchronization, strategy):
    v = _create(strategy, ["w"], synchronization=synchronization, aggregation=MEAN)["w"]
    all_indices = [1, 1, 0], [[2, 3], [4, 0]], 3

    def read():
        return [v.sparse_read(indices) for indices in all_indices]

    results = zip(read(), strategy.run(read), dist.function(read)(), strict=True)

    for indices, (outside, inside, compiled) in zip(all_indices, results, strict=True):
        for rows in (outside, *inside.values, compiled):
            np.testing.assert_array_equal(rows, _initial()[np.asarray(indices)])


def test_rows_are_read_by_integers_and_scalars_have_none():
    floats, integers = dist.Variable(_initial(), name="w"), dist.Variable(np.ones(3, np.int32))
    scalar = dist.Variable(1.0, name="s")

    assert np.isnan(floats.sparse_read([NUM_ROWS])).all()  # out of range
    assert int(integers.sparse_read([3])[0]) == np.iinfo(np.int32).min
    with pytest.raises(TypeError, match="'w': sparse_read needs integer indices, got float32"):
        floats.sparse_read([0.5])
    with pytest.raises(ValueError, match=r"'s': scatter_add got rows.*shape \(\)"):
        scalar.scatter_add(dist.IndexedSlices(np.ones(1), np.zeros(1, int)))
    with pytest.raises(ValueError, match="'s' is a scalar and has no rows"):
        scalar.sparse_read([0])


def test_slices_at_positions_change():
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    variable = dist.Variable(array)
    places = [[2, 1], [0, 3], [2, 1]]

    variable.scatter_nd_add(places, [1.0, 2.0, 3.0])
    np.add.at(array, tuple(np.transpose(places)), [1, 2, 3])
    np.testing.assert_array_equal(variable, array)
    variable.scatter_nd_sub([[1]], [[1.0, 2.0, 3.0, 4.0]], name="by row")
    array[1] -= [1, 2, 3, 4]
    np.testing.assert_array_equal(variable, array)
    variable.scatter_nd_update([[0, 0], [1, 1]], np.array([7, 8]))
    array[[0, 1], [0, 1]] = [7, 8]
    np.testing.assert_array_equal(variable, array)
    variable.batch_scatter_update(
        dist.IndexedSlices([[5.0, 6.0], [7.0, 8.0], [9.0, 10.0]], [[3, 0], [1, 2], [0, 3]])
    )
    array[[[0], [1], [2]], [[3, 0], [1, 2], [0, 3]]] = [[5, 6], [7, 8], [9, 10]]
    np.testing.assert_array_equal(variable, array)

    np.testing.assert_array_equal(variable.gather_nd([[2, 3], [0, 1]]), array[[2, 0], [3, 1]])
    np.testing.assert_array_equal(variable.gather_nd([[1]]), array[[1]])
    with pytest.raises(ValueError, match=r"updates of shape \(1,\) for slices of shape \(2,\)"):
        variable.scatter_nd_add([[0, 0], [1, 1]], [1.0])
    with pytest.raises(TypeError, match="array of integers"):
        variable.scatter_nd_add([[0.0, 0.0]], [1.0])
    with pytest.raises(TypeError, match="complex"):
        variable.scatter_nd_add([[0, 0]], [1j])


def test_slices_of_replicas_are_rows_that_the_aggregation_combines(strategy, variable):
    variable = variable(jnp.zeros((3, 2)), aggregation=SUM)

    strategy.run(
        lambda rows: variable.scatter_nd_add([[1]], rows[None]),
        args=(dist.PerReplica([jnp.array([1.0, 2.0]), jnp.array([10.0, 20.0])]),),
    )

    np.testing.assert_array_equal(variable, [[0, 0], [11, 22], [0, 0]])
    with pytest.raises(dist.errors.UnsupportedError, match=r"only along dim 0, but .* 2 dims"):
        variable.scatter_nd_add([[1, 0]], [1.0])
    np.testing.assert_array_equal(variable, [[0, 0], [11, 22], [0, 0]])
