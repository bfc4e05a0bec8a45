"""Where the state of `CentralStorageStrategy` lies; numbers are in tests/contracts/."""

import gc
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist

SIZE = 64
COMPUTE = ["CPU:1", "CPU:2", "CPU:3"]
ON_READ = dist.VariableSynchronization.ON_READ
SUM = dist.VariableAggregation.SUM


def _copies() -> Counter:
    """Number of arrays of the size of the weights on each device."""
    gc.collect()
    shards = [shard for array in jax.live_arrays() for shard in array.addressable_shards]
    return Counter(shard.device.id for shard in shards if shard.data.shape == (SIZE, SIZE))


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


@pytest.mark.parametrize("compute", [COMPUTE, ["CPU:1"]], ids=["3 replicas", "1 replica"])
@pytest.mark.parametrize("compiled", [False, True], ids=["run", "function"])
def test_there_is_one_copy_and_the_optimizer_runs_where_it_lies(compute, compiled):
    strategy = dist.CentralStorageStrategy(compute, "CPU:0")
    dist.get_strategy().run(lambda: jnp.zeros(()))  # the latest program's output is kept
    before = _copies()
    training = _Training(strategy)
    state = Counter({0: 2})
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
