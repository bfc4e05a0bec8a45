"""`CrossDeviceOps.reduce` and `batch_reduce` called directly, on values that lie anywhere."""

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
    slices = dist.IndexedSlices(jnp.ones((1, 2)), jnp.array([1]), (3, 2))
    values = [
        _components("numpy", strategy),
        _components("result of run", strategy),
        dist.PerReplica([slices, slices]),
        jnp.float32(7.0),
        dist.Mirrored(jnp.float32(8.0), 2),
        dist.PerReplica([np.float32(9.0)]),
        *[dist.PerReplica([np.full(3, 20, dtype)] * 2) for dtype in ("uint8", "int8", "float16")],
    ]

    results = dist.NcclAllReduce().batch_reduce(SUM, [(value, "CPU:0") for value in values])

    np.testing.assert_array_equal(results[0].numpy(), [4.0, 6.0])
    np.testing.assert_array_equal(results[1].numpy(), [4.0, 6.0])
    np.testing.assert_array_equal(results[2].value().indices, [1, 1])
    # A single component is its own sum, as in TensorFlow.
    assert [float(result.numpy()) for result in results[3:6]] == [7.0, 8.0, 9.0]
    for result, value in zip(results[6:], values[6:], strict=True):
        assert result.dtype == value.values[0].dtype
        np.testing.assert_array_equal(result.numpy(), [40, 40, 40])
    assert dist.NcclAllReduce().batch_reduce(SUM, []) == []


@pytest.mark.parametrize("rows", [(1, 1), (0, 1)])
def test_indexed_slices_are_concatenated(rows):
    parts = [
        dist.IndexedSlices(jnp.full((n, 2), i + 1.0), jnp.full(n, i), (5, 2))
        for i, n in enumerate(rows)
    ]

    for op, scale in ((SUM, 1.0), (MEAN, 0.5)):
        result = dist.NcclAllReduce().reduce(op, dist.PerReplica(parts), "CPU:0").value()

        expected = np.concatenate([np.full((n, 2), i + 1.0) for i, n in enumerate(rows)])
        np.testing.assert_array_equal(result.values, scale * expected)
        np.testing.assert_array_equal(result.indices, np.repeat([0, 1], rows))
        assert result.dense_shape == (5, 2)


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


def test_destination_in_a_step_and_in_a_function(strategy, variable):
    value = _components("result of run", strategy)

    def merged(strategy, x):
        return strategy.extended.reduce_to("sum", x, "CPU:5")

    v = variable([0.0, 0.0])

    def merged_to_copy(strategy, x):
        return strategy.extended.reduce_to("sum", x, v.values[1])

    to_copy = strategy.run(
        lambda x: dist.get_replica_context().merge_call(merged_to_copy, (x,)), (value,)
    )
    in_step = strategy.run(lambda x: dist.get_replica_context().merge_call(merged, (x,)), (value,))
    in_function = dist.function(lambda x: strategy.extended.reduce_to("sum", x, "CPU:5"))(value)

    for result in (*in_step.values, *to_copy.values, in_function):
        np.testing.assert_array_equal(result, [4.0, 6.0])


def test_device_that_does_not_exist(strategy_of):
    value = _components("numpy", strategy_of(2))

    with pytest.raises(DeviceError, match="no device 'CPU:77'"):
        strategy_of(2).extended.reduce_to("sum", value, "CPU:77")
    with pytest.raises(DeviceError, match="no device 'CPU:77'"):
        dist.NcclAllReduce().reduce(SUM, value, "CPU:77")


@pytest.mark.parametrize("destination", [None, "", 3, ["CPU:0"]])
def test_unusable_destinations(destination):
    value = dist.PerReplica([np.ones(2), np.ones(2)])

    with pytest.raises(InvalidValueError, match=r"destinations is .*, expected a device"):
        dist.NcclAllReduce().reduce(SUM, value, destination)
    with pytest.raises(InvalidValueError, match=r"destinations is .*, expected a device"):
        dist.NcclAllReduce().broadcast(np.ones(2), destination)


@pytest.mark.parametrize("pairs", [3, [1.0], [(1.0,)], [(1.0, "CPU:0", 3)]])
def test_unusable_pairs(pairs):
    with pytest.raises(InvalidTypeError, match=r"value_destination_pairs is .*, expected a"):
        dist.NcclAllReduce().batch_reduce(SUM, pairs)


def test_components_must_agree_in_shape():
    value = dist.PerReplica([np.ones(2), np.ones(3)])

    with pytest.raises(ReplicaMismatchError, match=r"components have shapes \[\(2,\), \(3,\)\]"):
        dist.NcclAllReduce().reduce(SUM, value, "CPU:0")


def test_inside_run_replicas_reduce_directly(strategy):
    def merged(strategy, x):
        return strategy.extended.cross_device_ops.reduce(SUM, x, x)

    result = strategy.run(
        lambda x: dist.get_replica_context().merge_call(merged, args=(x,)),
        (dist.PerReplica([1.0, 2.0]),),
    )

    assert result.values == (3.0, 3.0)
