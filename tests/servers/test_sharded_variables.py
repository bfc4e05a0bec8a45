"""Variables in shards on several servers, against whole ones."""

import re

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import distributary as dist
from distributary.coordinator import ClusterCoordinator
from distributary.errors import InvalidTypeError, InvalidValueError
from distributary.experimental import local_cluster
from distributary.experimental.partitioners import FixedShardsPartitioner, MinSizePartitioner
from distributary.tracing import (
    push,
)
from tests.servers.message_faults import spy, spy_on_bytes

RNG = np.random.default_rng(0)
TABLE = RNG.normal(size=(50, 4)).astype(np.float32)
IDS = [np.array([[3, 3], [49, 17]], np.int32), np.array([[16, 33], [34, 0]], np.int32)]


@pytest.fixture(scope="module")
def strategy():
    partitioner = MinSizePartitioner(100, max_shards=3)
    return dist.ParameterServerStrategy(local_cluster(workers=1, ps=2), partitioner)


@pytest.fixture
def table(strategy):
    with strategy.scope():
        return dist.Variable(TABLE, name="table")


def test_a_large_variable_is_divided(strategy, table):
    with strategy.scope():
        small = dist.Variable(np.zeros((6, 2), np.float32), name="small")
        scalar = dist.Variable(1.0)

    assert isinstance(table, dist.ShardedVariable)
    assert [shard.name for shard in table.variables] == [f"table/part_{i}:0" for i in range(3)]
    assert [shard.shape for shard in table] == [(17, 4), (17, 4), (16, 4)]
    servers = [shard._place[0] for shard in table]
    assert servers in ([0, 1, 0], [1, 0, 1])
    assert (table.name, table.shape, table.dtype, len(table)) == ("table", (50, 4), "float32", 50)
    assert not isinstance(table, dist.Variable)
    assert isinstance(small, dist.Variable)
    assert isinstance(scalar, dist.Variable)
    assert repr(table) == (
        "<dist.ShardedVariable 'table' shape=(50, 4) dtype=float32, shards of 17, 17, 16 rows>"
    )


def test_it_is_read_and_assigned_like_the_whole(table):
    np.testing.assert_array_equal(table.numpy(), TABLE)
    np.testing.assert_array_equal(np.asarray(table) + 1, table + 1)
    np.testing.assert_array_equal(table @ TABLE.T, jnp.asarray(TABLE) @ TABLE.T)
    for index in (0, -1, slice(3, 40, 5), (..., 1), (None, 20), TABLE[:, 0] > 0, (18, 2)):
        np.testing.assert_array_equal(table[index], TABLE[index])
    for index in (50, -51, (0, 4)):
        with pytest.raises(IndexError, match=r"'table': index .* out of range"):
            table[index]
    np.testing.assert_array_equal(table.sparse_read([49, 16]), TABLE[[49, 16]])

    assert table.assign(2 * TABLE) is table
    table.assign_add(np.ones_like(TABLE)).assign_sub(TABLE)
    np.testing.assert_allclose(table, TABLE + 1, rtol=1e-6)
    ids = [16, 17, 17, 49, -3, 50, -51]
    table.scatter_add(dist.IndexedSlices(np.ones((7, 4), np.float32), np.int8(ids)))
    table.scatter_update(dist.IndexedSlices(np.zeros((1, 4), np.float32), [33]))
    expected = TABLE + 1
    np.add.at(expected, ids[:5], 1)
    expected[33] = 0
    np.testing.assert_allclose(table, expected, rtol=1e-6)
    with pytest.raises(InvalidValueError, match=r"'table': assign got a value of shape \(4,\)"):
        table.assign([1, 2, 3, 4])


def test_shards_of_ones_own():
    shards = [dist.Variable([1.0, 2.0]), dist.Variable([3.0])]
    table = dist.ShardedVariable(shards, "mine")

    np.testing.assert_array_equal(table, [1, 2, 3])
    assert table.variables == shards or [a is b for a, b in zip(table, shards, strict=True)]
    with pytest.raises(InvalidTypeError, match="'x': shard 0 is 1"):
        dist.ShardedVariable([1], "x")
    with pytest.raises(InvalidValueError, match=r"shard 1 is int32\[1\] and shard 0 float32\[2\]"):
        dist.ShardedVariable([shards[0], dist.Variable([1])], "x")
    with pytest.raises(InvalidValueError, match="variables is empty"):
        dist.ShardedVariable([])


def test_initial_values_may_know_their_part(strategy):
    def rows(partition_shape, partition_offset):
        parts.append((partition_shape, partition_offset))
        start = partition_offset[0]
        return TABLE[start : start + partition_shape[0]]

    parts = []
    with strategy.scope():
        table = dist.Variable(rows, shape=(50, 4), dtype="float32")
        whole = dist.Variable(lambda: TABLE, name="whole")

    np.testing.assert_array_equal(table, TABLE)
    np.testing.assert_array_equal(whole, TABLE)
    assert parts == [((17, 4), (0, 0)), ((17, 4), (17, 0)), ((16, 4), (34, 0))]
    with strategy.scope(), pytest.raises(InvalidValueError, match="initial_value is missing"):
        dist.Variable()


@pytest.mark.parametrize(
    ("initial", "found", "expected"),
    [
        (TABLE, "(50, 4)", "(60, 4)"),
        (lambda: TABLE, "(50, 4)", "(60, 4)"),
        (lambda **partition: TABLE, "(50, 4)", "(20, 4)"),
        (lambda partition_shape, partition_offset: TABLE[:2], "(2, 4)", "(20, 4)"),
    ],
)
def test_shards_have_together_the_shape_of_the_variable(strategy, initial, found, expected):
    match = re.escape(f"Variable 'x': initial_value has shape {found}, expected {expected}")

    with strategy.scope(), pytest.raises(InvalidValueError, match=match):
        dist.Variable(initial, name="x", shape=(60, 4), dtype="float32")


@pytest.mark.parametrize("wrong", [[1, 2], [0, 1], [2], None, 3])
def test_only_dim_0_can_be_divided(wrong):
    strategy = dist.ParameterServerStrategy(local_cluster(1, 1), lambda shape, dtype: wrong)

    with strategy.scope(), pytest.raises(InvalidValueError, match="variable_partitioner returned"):
        dist.Variable(TABLE)


def test_a_divided_weight_is_overwritten_with_data():
    strategy = dist.ParameterServerStrategy(local_cluster(1, 2), FixedShardsPartitioner(2))
    with strategy.scope():
        weight = keras.Variable(np.zeros((3, 2), np.float32))
    values = np.arange(6, dtype=np.float32).reshape(3, 2)

    ClusterCoordinator(strategy).schedule(lambda x: weight.assign(x), args=(values,)).fetch()

    np.testing.assert_array_equal(weight, values)


def test_shards_train_as_the_whole_does():
    cluster = local_cluster(workers=1, ps=2)
    sizes = spy(cluster)
    strategy = dist.ParameterServerStrategy(cluster, FixedShardsPartitioner(3))
    with strategy.scope():
        table = dist.Variable(TABLE, name="table")
        with strategy.extended.colocate_vars_with(table):
            total = dist.Variable(np.full_like(TABLE, 0.1), name="total")
    assert [a._place[0] for a in table] == [a._place[0] for a in total]

    def rule(value, total, gradient):
        total = total + gradient * gradient
        return value - 0.1 * gradient / jnp.sqrt(total), total

    def step(ids):
        with dist.GradientTape() as tape:
            loss = (dist.embedding_lookup(table, ids) ** 2).sum()
        gradients = [push(g) for g in tape.gradient(loss, table.variables)]
        for shard, own, gradient in zip(table, total, gradients, strict=True):
            new, new_own = rule(shard.value(), own.value(), gradient)
            shard.assign(new)
            own.assign(new_own)
        return loss

    coordinator = ClusterCoordinator(strategy)
    expected, expected_total = jnp.asarray(TABLE), jnp.full_like(TABLE, 0.1)
    for ids in IDS:
        loss = coordinator.schedule(step, args=(ids,))
        value, gradient = jax.value_and_grad(lambda t, ids=ids: (t[ids] ** 2).sum())(expected)
        expected, expected_total = rule(expected, expected_total, gradient)
        np.testing.assert_allclose(loss.fetch(), value, rtol=1e-5)
    np.testing.assert_allclose(table, expected, rtol=1e-5)
    np.testing.assert_allclose(total, expected_total, rtol=1e-5)
    assert 0 < max(sizes) <= 4


def test_lazy_updates_leave_other_rows_and_their_moments_alone():
    strategy = dist.ParameterServerStrategy(
        local_cluster(workers=1, ps=2), FixedShardsPartitioner(2), sparse_update="lazy"
    )
    with strategy.scope():
        table = keras.Variable(TABLE, name="table")
        optimizer = keras.optimizers.Adam(0.1)
        optimizer.build([table])

    def step(ids):
        with dist.GradientTape() as tape:
            loss = (dist.embedding_lookup(table, ids) ** 2).sum()
        optimizer.apply([tape.gradient(loss, table)], [table])

    coordinator = ClusterCoordinator(strategy)
    for ids in IDS:
        coordinator.schedule(step, args=(ids,))
        coordinator.join()

    first, second = (np.unique(ids) for ids in IDS)
    others = np.setdiff1d(np.arange(50), np.concatenate([first, second]))
    found = np.asarray(table)
    np.testing.assert_array_equal(found[others], TABLE[others])
    # Adam's first step is the learning rate; the second one is larger: its bias correction is less.
    np.testing.assert_allclose(found[first], TABLE[first] - 0.1 * np.sign(TABLE[first]), rtol=1e-3)
    scale = 0.1 * np.sqrt(1 - 0.999**2) / (1 - 0.9**2) * 0.1 / np.sqrt(0.001)
    moved = TABLE[second] - scale * np.sign(TABLE[second])
    np.testing.assert_allclose(found[second], moved, rtol=1e-3)


def test_a_large_variable_travels_in_pieces():
    cluster = local_cluster(workers=1, ps=1)
    sizes = spy_on_bytes(cluster)
    strategy = dist.ParameterServerStrategy(cluster)
    value = np.arange(20 << 20, dtype=np.float32).reshape(-1, 1024)  # 80 MiB

    with strategy.scope():
        variable = dist.Variable(value)
    variable.assign_add(np.ones_like(value))

    np.testing.assert_array_equal(variable.numpy(), value + 1)
    assert max(sizes) <= 64 << 20
