"""`CrossDeviceOps.reduce` and `batch_reduce` called directly, and values in a merged function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist
from distributary.errors import (
    DeviceError,
    InvalidTypeError,
    InvalidValueError,
    ReplicaMismatchError,
)

SUM, MEAN = dist.ReduceOp.SUM, dist.ReduceOp.MEAN


class _Largest(dist.CrossDeviceOps):
    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        first, second = per_replica_value.values
        return jnp.maximum(first, second)


def _components(kind, strategy):
    """The components [1, 2] and [3, 4], as they come about."""
    first, second = np.array([1.0, 2.0], np.float32), np.array([3.0, 4.0], np.float32)
    if kind == "numpy":
        return dist.PerReplica([first, second])
    if kind == "jax":
        return dist.PerReplica([jnp.asarray(first), jnp.asarray(second)])
    if kind == "two devices":
        devices = jax.local_devices()
        placed = [jax.device_put(first, devices[0]), jax.device_put(second, devices[1])]
        return dist.PerReplica(placed)
    return strategy.run(lambda x: x, (dist.PerReplica([first, second]),))


@pytest.mark.parametrize("kind", ["numpy", "two devices", "result of run"])
def test_a_subclass_and_an_accumulation_function_are_honoured(kind, strategy_of):
    value = _components(kind, strategy_of(2))
    ops = dist.ReductionToOneDevice(accumulation_fn=lambda parts: parts[1] - 10 * parts[0])

    np.testing.assert_array_equal(_Largest().reduce(SUM, value, "CPU:0").numpy(), [3.0, 4.0])
    np.testing.assert_array_equal(ops.reduce(SUM, value, "CPU:0").numpy(), [-7.0, -16.0])


def test_a_batch_may_mix_places_and_kinds(strategy):
    none, one = (dist.IndexedSlices(jnp.ones((n, 2)), jnp.full(n, 1), (3, 2)) for n in (0, 1))
    values = [
        _components("numpy", strategy),
        _components("result of run", strategy),
        dist.PerReplica([none, one]),
        jnp.float32(7.0),
        dist.Mirrored(jnp.float32(8.0), 2),
        dist.PerReplica([np.float32(9.0)]),
        *[dist.PerReplica([np.full(3, 20, dtype)] * 2) for dtype in ("uint8", "int8", "float16")],
    ]

    results = dist.NcclAllReduce().batch_reduce(SUM, [(value, "CPU:0") for value in values])

    np.testing.assert_array_equal(results[0].numpy(), [4.0, 6.0])
    np.testing.assert_array_equal(results[1].numpy(), [4.0, 6.0])
    np.testing.assert_array_equal(results[2].value().to_dense(), [[0, 0], [1, 1], [0, 0]])
    # A single component is its own sum, as in TensorFlow.
    assert [float(result.numpy()) for result in results[3:6]] == [7.0, 8.0, 9.0]
    for result, value in zip(results[6:], values[6:], strict=True):
        assert result.dtype == value.values[0].dtype
        np.testing.assert_array_equal(result.numpy(), [40, 40, 40])
    assert dist.NcclAllReduce().batch_reduce(SUM, []) == []


def test_values_stand_for_their_devices(strategy, variable):
    value, v = _components("result of run", strategy), variable([0.0, 0.0])
    ops = dist.NcclAllReduce()

    for place in ("CPU:1", np.ones(3), jnp.ones(3), v, value):
        np.testing.assert_array_equal(ops.reduce(SUM, value, place).numpy(), [4.0, 6.0])
    copies = ops.broadcast(jnp.float32(3.0), value)
    assert isinstance(copies, dist.Mirrored)
    assert copies.values == (3.0, 3.0)


DESTINATIONS = {
    "numpy": lambda: "CPU:3",
    "jax": lambda: "/job:localhost/replica:0/task:0/device:CPU:3",
    "two devices": lambda: jax.device_put(jnp.ones(1), jax.devices()[3]),
    "result of run": lambda: dist.Variable(1.0).values[1],
}


@pytest.mark.parametrize("kind", DESTINATIONS)
def test_one_device_gets_the_only_copy(kind):
    strategy = dist.MirroredStrategy(["CPU:2", "CPU:3"])
    device = jax.devices()[3]
    value = _components(kind, strategy)
    with strategy.scope():
        place = DESTINATIONS[kind]()

    for ops in (dist.NcclAllReduce(num_packs=0), dist.ReductionToOneDevice()):
        reduced = ops.reduce(MEAN, value, place)
        assert [copy.devices() for copy in reduced.values] == [{device}]
        np.testing.assert_array_equal(reduced.numpy(), [2.0, 3.0])
    with strategy.scope():
        total = strategy.extended.reduce_to("sum", {"a": value}, place)["a"]
        sent = strategy.extended.broadcast_to(np.arange(2), place)
        rows = dist.IndexedSlices(jnp.ones((1, 2)), jnp.array([1]), (3, 2))
        slices = strategy.extended.reduce_to("sum", dist.PerReplica([rows, rows]), place)
    assert total.devices() == sent.devices() == slices.values.devices() == {device}
    assert dist.NcclAllReduce().broadcast(np.ones(2), place).value().devices() == {device}
    np.testing.assert_array_equal(slices.indices, [1, 1])
    np.testing.assert_array_equal(sent + total, [4, 7])


@pytest.mark.parametrize("num_replicas", [1, 4])
def test_the_mean_of_whole_numbers_is_in_floats_for_any_number_of_replicas(num_replicas):
    rows = dist.IndexedSlices(np.array([[3]]), np.array([0]), (2, 1))
    values = [dist.PerReplica([value] * num_replicas) for value in (np.array([3, 4]), rows)]

    array, slices = dist.NcclAllReduce().batch_reduce(MEAN, [(v, "CPU:0") for v in values])

    np.testing.assert_array_equal(array.value(), [3.0, 4.0])
    np.testing.assert_array_equal(slices.value().to_dense(), [[3.0], [0.0]])
    assert array.value().dtype == slices.value().values.dtype == np.float32


def test_parts_of_different_dtypes_are_refused_by_their_dtypes():
    value = dist.PerReplica([jnp.ones(2), jnp.ones(2, jnp.int32)])

    with pytest.raises(ReplicaMismatchError, match=r"'float32\[2\]', 'int32\[2\]'"):
        dist.NcclAllReduce().reduce(SUM, value, "CPU:0")


def test_destination_in_a_step_and_in_a_function(strategy, variable):
    value, v = _components("result of run", strategy), variable([0.0, 0.0])

    def merged(strategy, x):
        places = "CPU:5", v.values[1]
        of_ops = strategy.extended.cross_device_ops.reduce(SUM, x, x)
        return of_ops, *(strategy.extended.reduce_to("sum", x, place) for place in places)

    in_step = strategy.run(lambda x: dist.get_replica_context().merge_call(merged, (x,)), (value,))
    in_function = dist.function(lambda x: strategy.extended.reduce_to("sum", x, "CPU:5"))(value)

    for result in (*(copy for each in in_step for copy in each.values), in_function):
        np.testing.assert_array_equal(result, [4.0, 6.0])


_OPS, _VALUE = dist.NcclAllReduce(), dist.PerReplica([np.ones(2), np.ones(2)])
_SHAPES_DIFFER = dist.PerReplica([np.ones(2), np.ones(3)])


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (
            lambda s: s.extended.reduce_to("sum", _VALUE, "CPU:77"),
            DeviceError,
            "no device 'CPU:77'",
        ),
        (lambda s: _OPS.reduce(SUM, _VALUE, "CPU:77"), DeviceError, "no device 'CPU:77'"),
        *[
            (use, InvalidValueError, r"destinations is .*, expected a device")
            for use in (
                lambda s: _OPS.reduce(SUM, _VALUE, None),
                lambda s: _OPS.reduce(SUM, _VALUE, ["CPU:0"]),
                lambda s: _OPS.broadcast(np.ones(2), 3),
                lambda s: _OPS.broadcast(np.ones(2), ""),
            )
        ],
        *[
            (
                lambda s, pairs=pairs: _OPS.batch_reduce(SUM, pairs),
                *(InvalidTypeError, r"value_destination_pairs is .*, expected a"),
            )
            for pairs in (3, [1.0], [(1.0,)])
        ],
        (
            lambda s: _OPS.reduce(SUM, _SHAPES_DIFFER, "CPU:0"),
            *(ReplicaMismatchError, r"components are .*float64\[2\].*float64\[3\]"),
        ),
    ],
)
def test_what_cannot_be_reduced_or_has_no_place_is_refused(use, error, message, strategy):
    with pytest.raises(error, match=message):
        use(strategy)


@pytest.mark.parametrize(
    ("components", "axis"),
    [
        ([np.ones((2, 3)), np.ones((1, 3))], 1),
        ([np.ones((2, 3)), np.ones((4, 1))], 0),
        ([np.ones(3), np.ones((3, 1))], 0),
    ],
)
def test_parts_that_would_broadcast_are_refused(components, axis, strategy):
    value = dist.PerReplica([np.float32(part) for part in components])

    for op in ("SUM", "MEAN"):
        with pytest.raises(ReplicaMismatchError, match=r"components are \['float32\[.* axis=\("):
            strategy.reduce(op, value, axis=axis)


@pytest.mark.parametrize("sizes", [(2, 2), (2, 3)])
def test_parts_of_several_dtypes_are_refused(sizes, strategy):
    parts = [np.ones(sizes[0], np.float16), np.full(sizes[1], 7e4, np.float32)]

    for components in (parts, parts[::-1]):  # the mean would have the first one's dtype
        with pytest.raises(ReplicaMismatchError, match=r"components are \['float.* axis=\(0,\)"):
            strategy.reduce("MEAN", dist.PerReplica(components), axis=0)


def test_rows_of_a_table_reduced_over_a_dim_are_those_of_the_table(strategy):
    def rows(context):
        number = context.replica_id_in_sync_group
        return dist.IndexedSlices(np.ones((2, 2), np.float32), np.int32([number, 3]), (5, 2))

    value = strategy.experimental_distribute_values_from_function(rows)

    assert isinstance(value, dist.PerReplica)
    np.testing.assert_array_equal(strategy.reduce("SUM", value, axis=0), [4, 4])
    np.testing.assert_allclose(strategy.reduce("MEAN", value, axis=0), [0.4, 0.4])
    np.testing.assert_array_equal(strategy.reduce("SUM", value, axis=None).indices, [0, 3, 1, 3])


def test_numbers_of_replicas_in_a_function(strategy):
    def total():
        number = lambda context: context.replica_id_in_sync_group + 1.0
        value = strategy.experimental_distribute_values_from_function(number)
        return strategy.reduce("SUM", strategy.run(lambda x: 2 * x, args=(value,)), axis=None)

    assert float(dist.function(total)()) == 6


# In a merged function; the call itself is in tests/context/.


def _merge(function, *args, **kwargs):
    return dist.get_replica_context().merge_call(function, args, kwargs)


def test_values_are_gathered_reduced_and_differentiated(on_replicas):
    def step(x):
        slices = dist.IndexedSlices(x[None], jnp.array([0]), (3, 2))
        sums = [
            _merge(lambda s, g, op=op: s.extended.reduce_to(op, g, "CPU:0"), slices)
            for op in ("SUM", "MEAN")
        ]
        with dist.GradientTape() as tape:
            tape.watch(x)
            y = _merge(lambda s, x: s.reduce("SUM", x, None), x * x)
        return _merge(lambda s, x: s.gather(x, 0), x), sums, tape.gradient(y, x)

    results = on_replicas(step, [np.ones(2), np.full(2, 3.0)])

    for (gathered, sums, gradient), own in zip(results, (1, 3), strict=True):
        np.testing.assert_array_equal(gathered, [1, 1, 3, 3])
        np.testing.assert_array_equal(gradient, np.full(2, 4.0 * own))
        for slices, scale in zip(sums, (1.0, 0.5), strict=True):
            np.testing.assert_array_equal(slices.indices, [0, 0])
            np.testing.assert_array_equal(slices.values, np.array([[1, 1], [3, 3]]) * scale)


def test_summing_what_is_the_same_everywhere_is_refused(on_replicas):
    with pytest.raises(InvalidValueError, match=r"cannot SUM .* over 2 replicas"):
        on_replicas(lambda x: _merge(lambda s, n: s.reduce("SUM", n, None), 3), [1.0, 2.0])
