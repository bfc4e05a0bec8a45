"""Where the state of `CentralStorageStrategy` lies; numbers are in tests/contracts/."""

import copy
import gc
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

import distributary as dist
from distributary.errors import DeviceError

SIZE = 64
PART_BYTES = "distributary.engine._staged._PART_BYTES"
COMPUTE = ["CPU:1", "CPU:2", "CPU:3"]
ON_READ = dist.VariableSynchronization.ON_READ
SUM = dist.VariableAggregation.SUM


def _host_memory():
    return SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")


def _copies() -> Counter:
    """Number of arrays of the size of the weights in each memory."""
    gc.collect()
    arrays = [array for array in jax.live_arrays() if array.shape == (SIZE, SIZE)]
    return Counter(
        f"{array.sharding.memory_kind} {device.id}"
        for array in arrays
        for device in array.devices()
    )


class _Training:
    """Momentum, with the number of the step as an argument and the loss summed up per replica."""

    def __init__(self, strategy):
        self.strategy = strategy
        with strategy.scope():
            self.w = dist.Variable(np.eye(SIZE, dtype=np.float32), name="w")
            self.momentum = dist.Variable(jnp.zeros((SIZE, SIZE)), name="momentum")
            self.total = dist.Variable(0.0, synchronization=ON_READ, aggregation=SUM)

    def step(self, x, number):
        context = dist.get_replica_context()
        rows = context.all_reduce("sum", jnp.float32(x.shape[0]))
        loss, gradient = dist.value_and_grad(
            lambda: jnp.sum((x @ self.w.value()) ** 2) / rows, self.w
        )()
        gradient = context.all_reduce("sum", gradient)
        self.momentum.assign(0.9 * self.momentum.value() + gradient)
        self.w.assign_sub(self.momentum.value() / (number + 1.0))
        self.total.assign_add(loss)
        return loss


def _by_hand(batches):
    w, momentum, total = np.eye(SIZE), np.zeros((SIZE, SIZE)), 0.0
    for number, x in enumerate(batches):
        total += ((x @ w) ** 2).sum() / len(x)
        momentum = 0.9 * momentum + 2 * x.T @ (x @ w) / len(x)
        w = w - momentum / (number + 1)
    return w, momentum, total


def _batches(*sizes):
    random = np.random.default_rng(0)
    return [random.normal(size=(size, SIZE)).astype(np.float32) / 8 for size in sizes]


@pytest.mark.parametrize(
    ("memory", "compiled", "compute"),
    [
        pytest.param("pinned_host", True, COMPUTE, id="host, function, 3 replicas"),
        pytest.param("device", False, ["CPU:1"], id="device, run, 1 replica"),
    ],
)
def test_there_is_one_copy_and_the_optimizer_runs_where_it_lies(
    compute, compiled, memory, monkeypatch
):
    monkeypatch.setattr(PART_BYTES, 4 * SIZE * SIZE // 4)  # four parts of each
    strategy = dist.CentralStorageStrategy(
        compute, "CPU:0" if memory == "device" else _host_memory()
    )
    dist.get_strategy().run(lambda: jnp.zeros(()))  # the latest program's output is kept
    before = _copies()
    training = _Training(strategy)
    state = Counter({f"{memory} 0": 2})
    assert _copies() - before == state
    run = lambda x, number: strategy.run(training.step, (x, number))
    run = dist.function(run) if compiled else run

    batches = _batches(6, 6, 5)  # 5 rows do not divide
    dataset = strategy.experimental_distribute_dataset(
        dist.data.Dataset.from_generator(lambda: iter(batches))
    )
    for number, x in enumerate(dataset):
        loss = run(x, jnp.float32(number))
        assert _copies() - before == state, number
        lowered = strategy.extended.lower(training.step, (x, jnp.float32(number)))
        shapes = [leaf.shape for leaf in jax.tree.leaves(lowered.in_avals)]
        assert shapes.count((SIZE, SIZE)) == 1, "replicas get w and nothing else"

    w, momentum, total = _by_hand(batches)
    np.testing.assert_allclose(training.w.numpy(), w, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(training.momentum.numpy(), momentum, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(training.total.numpy(), total, rtol=1e-4)
    home = {jax.devices()[0]}
    assert training.w._value.sharding.device_set == home
    assert training.momentum._value.sharding.device_set == home
    losses = strategy.experimental_local_results(loss)
    assert all(home.isdisjoint(value.devices()) for value in losses)


def test_variables_in_host_memory_are_read_and_assigned_on_their_device():
    strategy = dist.CentralStorageStrategy(["CPU:0", "CPU:1"], _host_memory())
    with strategy.scope():
        v = dist.Variable(jnp.arange(3))
        copied = copy.deepcopy(v)

    read = v.value()
    v.assign_add(read * 2)
    strategy.run(lambda: v.assign_add([1, 1, 1]))
    v.scatter_add(dist.IndexedSlices(jnp.array([5]), jnp.array([0])))
    v.assign(v.value() + 1)

    np.testing.assert_array_equal(read, [0, 1, 2])
    np.testing.assert_array_equal(v.numpy(), [7, 5, 8])
    np.testing.assert_array_equal(v.values[0].numpy() + copied, [7, 6, 10])
    assert v.value().sharding.memory_kind == "device"
    assert {x.sharding.memory_kind for x in (v, copied)} == {"pinned_host"}
    assert "variables in the host memory of CPU:0" in repr(strategy)


@pytest.mark.parametrize("sizes", [(1, 1), (1, 2)])
def test_constants_may_be_returned(sizes):
    rows = dist.PerReplica([jnp.ones(size) for size in sizes])
    results = []
    for kind in dist.CentralStorageStrategy, dist.MirroredStrategy:
        strategy = kind(["CPU:1", "CPU:2"])
        with strategy.scope():
            v = dist.Variable(0)

        def step(rows, v=v):
            v.assign(jnp.asarray(5))
            arrays = [jnp.asarray(constant) for constant in (1, True, 1 + 2j)]
            return arrays, 1.5, np.int8(3), np.arange(2), jax.lax.axis_index("replica"), "a", None

        result = strategy.run(step, (rows,))
        results.append(strategy.experimental_local_results(result))
        assert v.numpy() == 5

    central, mirrored = (jax.tree.leaves(result) for result in results)
    for own, expected in zip(central, mirrored, strict=True):
        assert getattr(own, "dtype", None) == getattr(expected, "dtype", None)
        assert np.array_equal(own, expected)


def test_other_kinds_of_memory_are_refused():
    sharding = SingleDeviceSharding(jax.devices()[1], memory_kind="unpinned_host")
    with pytest.raises(DeviceError, match="expected memory_kind='pinned_host'"):
        dist.CentralStorageStrategy(COMPUTE, sharding)


def test_default_devices():
    several, alone = dist.CentralStorageStrategy(), dist.CentralStorageStrategy(["CPU:3"])

    assert several.num_replicas_in_sync == 8
    assert several.extended.parameter_devices[0].endswith("device:CPU:0")
    assert alone.extended.parameter_devices == alone.extended.worker_devices
    assert repr(dist.CentralStorageStrategy(["CPU:1", "CPU:2"])).startswith(
        "<CentralStorageStrategy: 2 replicas on CPU:1, CPU:2, variables on CPU:0"
    )


def test_values_in_one_place_are_combined_with_variables():
    strategy = dist.CentralStorageStrategy(COMPUTE)
    with strategy.scope():
        w = dist.Variable([1.0, 2.0])
        own = dist.Variable([0.0, 0.0], synchronization=ON_READ, aggregation=SUM)

    ids = strategy.run(lambda: jnp.full(2, dist.get_replica_context().replica_id_in_sync_group))
    total = strategy.reduce("sum", ids, axis=None)
    rows = strategy.gather(ids, axis=0)
    strategy.run(lambda x, i: own.assign_add(x + i), (w.value(), ids))
    assert strategy.reduce("mean", 3.0, axis=None) == 3.0
    np.testing.assert_array_equal(strategy.extended.reduce_to("mean", w, w), [1, 2])
    w.assign_add(total + w.value())
    strategy.extended.update(w, lambda v, x: v.assign_add(x), (total,))

    assert total.devices() == rows.devices() == w.value().devices() == {jax.devices()[0]}
    np.testing.assert_array_equal(rows, [0, 0, 1, 1, 2, 2])
    np.testing.assert_array_equal(w.numpy(), [8, 10])
    np.testing.assert_array_equal(own.numpy(), [6, 9])
    assert len(own._value.devices()) == 3
    assert [c.numpy().tolist() for c in w.values] == [[8, 10]]


def test_a_step_that_needs_the_optimizer_on_its_replicas_is_right():
    strategy = dist.CentralStorageStrategy(COMPUTE)
    with strategy.scope():
        w = dist.Variable(1.0, aggregation=dist.VariableAggregation.MEAN)
        count = dist.Variable(0)

    def step(x):
        w.assign(w.value() * x)  # combined after it
        count.assign_add(1)
        return w.value(), count.value()

    x = strategy.experimental_distribute_values_from_function(
        lambda context: jnp.float32(context.replica_id_in_sync_group)
    )
    value, number = dist.function(lambda x: [strategy.run(step, (x,)) for _ in range(2)][1])(x)

    assert [float(v) for v in strategy.experimental_local_results(value)] == [1.0] * 3
    assert [int(n) for n in strategy.experimental_local_results(number)] == [2] * 3
    numbers = strategy.run(lambda: count.value() * 2)
    devices = [next(iter(n.devices())).id for n in strategy.experimental_local_results(numbers)]
    assert devices == [1, 2, 3]
