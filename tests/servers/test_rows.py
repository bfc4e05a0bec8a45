"""Steps that pull and push rows of tables, against dense training on one device."""

from dataclasses import astuple, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import distributary as dist
from distributary.errors import DistributaryWarning, InvalidValueError
from distributary.servers._cluster import local_cluster
from distributary.servers._cluster_coordinator import ClusterCoordinator
from distributary.servers._messages import Limits, Message
from distributary.servers._plans import Update
from distributary.servers._programs import export_function
from distributary.servers._store import ParameterServer
from distributary.servers._strategy import ParameterServerStrategy
from distributary.servers._table_rows import RowPlan
from distributary.servers.passes import Lookup, RowSpace, UpdatedRows
from distributary.tracing import push

RNG = np.random.default_rng(0)
TABLE = RNG.normal(size=(60, 3)).astype(np.float32)
WEIGHT = RNG.normal(size=(3, 2)).astype(np.float32)
BATCHES = [
    np.array([[3, 3, 7], [59, 0, 7]], np.int32),
    np.array([[-1, -60, 58], [60, 1000, -61]], np.int32),  # the last three are out of range
    np.array([[1, 2, 3, 4]], np.int32),
]


def sgd(value, slots, gradient):
    return value - 0.1 * gradient, slots


def adagrad(value, slots, gradient):
    total = slots[0] + gradient * gradient
    return value - 0.1 * gradient / jnp.sqrt(total + 1e-7), [total]


def row_norms(value, slots, gradient):
    """Row-wise Adagrad: one number for every row."""
    total = slots[0] + jnp.square(gradient).sum(axis=1, keepdims=True)
    return value - 0.1 * gradient * jax.lax.rsqrt(total + 1e-7), [total]


def momentum(value, slots, gradient):
    velocity = 0.9 * slots[0] - 0.1 * gradient
    return value + velocity, [velocity]


def adam(value, slots, gradient):
    mean = 0.9 * slots[0] + 0.1 * gradient
    square = 0.99 * slots[1] + 0.01 * gradient * gradient
    return value - 0.1 * mean / (jnp.sqrt(square) + 1e-7), [mean, square]


def clipped_norm(value, slots, gradient):
    scale = 1.0 / jnp.maximum(1.0, jnp.sqrt((gradient * gradient).sum()))
    return value - 0.1 * scale * gradient, slots


RULES = {
    sgd: [],
    adagrad: [(60, 3)],
    row_norms: [(60, 1)],
    momentum: [(60, 3)],
    adam: [(60, 3), (60, 3)],
    clipped_norm: [],
}


def loss_of(table, weight, ids):
    rows = jnp.take(table, ids, axis=0)
    # Rows out of range are NaN.
    rows = jnp.where(jnp.isnan(rows), 0.5, rows)
    again = jnp.take(table, ids[:, :1] % 60, axis=0)
    return jnp.sum((rows.sum(1) @ weight - again[:, 0, :2]) ** 2)


class Spy:
    """Counts the rows of arrays in messages to servers and in their replies."""

    def __init__(self):
        self.rows = []

    def __call__(self, source, target, message, deliver):
        reply = deliver(message)
        if source.startswith("worker"):
            self.rows += [len(a) for a in (*message.arrays, *reply.arrays) if a.ndim]
        return reply


def cluster_of(ps=1, limits=None):
    cluster = local_cluster(1, ps, limits=limits)
    cluster.fault = spy = Spy()
    return ParameterServerStrategy(cluster), spy


def test_rows_of_tables_train_as_whole_tables_do():
    strategy, spy = cluster_of(limits=Limits())
    with strategy.scope():
        tables = [dist.Variable(TABLE, name=f"table {i}") for i in range(len(RULES))]
        slots = [
            [dist.Variable(np.full(s, 0.1, np.float32)) for s in own] for own in RULES.values()
        ]
        weight = dist.Variable(WEIGHT, name="weight")
        steps = dist.Variable(0, name="steps")

    def updated(values, gradients):
        value_and_slots = zip(RULES, *values, gradients, strict=True)
        return [rule(value, own, gradient) for rule, value, own, gradient in value_and_slots]

    def total(tables, weight, ids):
        return sum(loss_of(table, weight, ids) for table in tables)

    def step(ids):
        with dist.GradientTape() as tape:
            loss = total([table.value() for table in tables], weight.value(), ids)
        gradients = tape.gradient(loss, [*tables, weight])
        *gradients, last = dist.get_replica_context().all_reduce("SUM", gradients)
        values = [t.value() for t in tables], [[s.value() for s in own] for own in slots]
        for table, own, (new, new_slots) in zip(
            tables, slots, updated(values, gradients), strict=True
        ):
            table.assign(new)
            for slot, value in zip(own, new_slots, strict=True):
                slot.assign(value)
        weight.assign_sub(0.1 * last)
        steps.assign_add(1)
        return loss

    coordinator = ClusterCoordinator(strategy)
    expected = (
        [jnp.asarray(TABLE)] * len(RULES),
        [[jnp.full(s, 0.1) for s in r] for r in RULES.values()],
    )
    expected_weight = jnp.asarray(WEIGHT)
    before = [TABLE] * len(RULES)
    for ids in BATCHES:
        loss = coordinator.schedule(lambda ids: strategy.run(step, args=(ids,)), args=(ids,))
        value, gradients = jax.value_and_grad(total, (0, 1))(expected[0], expected_weight, ids)
        np.testing.assert_allclose(loss.fetch(), value, rtol=1e-5)
        expected = tuple(zip(*updated(expected, gradients[0]), strict=True))
        expected_weight = expected_weight - 0.1 * gradients[1]
        found = [[t.numpy() for t in tables], [[s.numpy() for s in own] for own in slots]]
        for own, whole in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(own, whole, rtol=1e-5, atol=1e-6)
        others = np.setdiff1d(np.arange(60), ids % 60)
        for rule, old, new in zip(RULES, before, found[0], strict=True):
            is_kept = np.array_equal(old[others], new[others])
            assert is_kept == (rule not in (momentum, adam))
        before = found[0]
    np.testing.assert_allclose(weight.numpy(), expected_weight, rtol=1e-5)
    assert steps.numpy() == 3
    assert 0 < max(spy.rows) < 8


def test_a_step_may_look_up_nothing():
    strategy, spy = cluster_of()
    with strategy.scope():
        table = dist.Variable(TABLE)
        steps = dist.Variable(0)

    def step(ids):
        steps.assign_add(1)
        return (jnp.take(table.value(), ids, axis=0) ** 2).sum()

    loss = ClusterCoordinator(strategy).schedule(step, args=(np.zeros((0,), np.int32),))

    assert loss.fetch() == 0
    assert steps.numpy() == 1
    assert max(spy.rows, default=0) == 0


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.lists(st.lists(st.integers(-60, 60), max_size=12), min_size=1, max_size=3),
    st.booleans(),
)
def test_every_row_is_found_once_and_in_its_shard(sizes, numbers, is_clipped):
    size = sum(sizes)
    space = RowSpace([Lookup(0, size, is_clipped, False)] * len(numbers), sum(map(len, numbers)))
    arrays = [np.array(own, np.int32).reshape(-1, 1) for own in numbers]

    (found,) = RowPlan("", [], [space], []).find(arrays)

    starts = np.cumsum([0, *sizes])
    table = np.arange(size)
    parts = []
    for start, own in zip(starts, sizes, strict=False):
        where, rows = found.part(start, own)
        assert np.array_equal(found.rows[where], table[start : start + own][rows])
        parts.append(rows + start)
    assert np.array_equal(np.concatenate(parts), found.rows)
    assert len(found.rows) <= space.capacity
    for positions, own in zip(found.positions, arrays, strict=True):
        assert positions.shape == own.shape
        expected = own.clip(0, size - 1) if is_clipped else own
        is_row = (expected >= 0) & (expected < size)
        assert np.array_equal(found.rows[positions[is_row]], expected[is_row])
        assert (positions[~is_row] == space.capacity).all()


@pytest.mark.parametrize(
    ("read", "reason"),
    [
        (lambda table, offset, ids: (table[ids] @ table.T).sum(), "transpose needs all of it"),
        (lambda table, offset, ids: table[ids].sum() + (table**2).sum(), "reduce_sum|all of it"),
        (lambda table, offset, ids: table[ids + offset].sum(), "the ids depend on a variable"),
        (lambda table, offset, ids: (table[ids].sum(), table)[0], None),
    ],
)
def test_a_table_of_which_more_is_needed_travels_as_a_whole(read, reason):
    strategy, spy = cluster_of()
    with strategy.scope():
        table = dist.Variable(TABLE, name="big table")
        offset = dist.Variable(0)

    def step(ids):
        with dist.GradientTape() as tape:
            loss = read(table.value(), offset.value(), ids)
        table.assign_sub(0.1 * push(tape.gradient(loss, table)))
        return loss

    coordinator = ClusterCoordinator(strategy)
    ids = np.array([1, 1, 2], np.int32)
    if reason is None:
        loss = coordinator.schedule(step, args=(ids,)).fetch()
        assert max(spy.rows) < 8
    else:
        with pytest.warns(DistributaryWarning, match=f"'big table' are looked up.*{reason}"):
            loss = coordinator.schedule(step, args=(ids,)).fetch()
        assert max(spy.rows) == 60
    value, gradient = jax.value_and_grad(read)(jnp.asarray(TABLE), 0, ids)
    np.testing.assert_allclose(loss, value, rtol=1e-5)
    np.testing.assert_allclose(table.numpy(), TABLE - 0.1 * gradient, rtol=1e-5, atol=1e-6)


def test_a_server_refuses_rows_that_it_does_not_have():
    server = ParameterServer(0)
    server.handle(Message("create", {"ids": [0]}, [TABLE]), None)
    aval = jax.ShapeDtypeStruct(TABLE.shape, np.float32)
    program = export_function(lambda w, g: [w - g], [aval, aval], [16, 16])
    own = UpdatedRows(0, 0, 60, 16, [0], [0], [0], is_whole=False)

    def add_update(states, outputs, **changes):
        update = Update(program.name, states, outputs, [replace(own, **changes)])
        fields = {"update": astuple(update)}
        server.handle(Message("update", fields, blobs=[program.content]), None)
        return update.name

    name = add_update([0], [0])

    def push_rows(rows, values):
        fields = {"closure": 0, "update": name, "ids": [], "num_row_reads": 0}
        arrays = [np.full((values, 3), 1, np.float32), np.array(rows, np.int64)]
        return server.handle(Message("push", fields, arrays), None)

    for rows in ([-1], [60], [3, 2], [2, 2], [[1]], np.array([1.5])):
        with pytest.raises(InvalidValueError, match="Rows"):
            server.handle(Message("read", {"ids": [0]}, [np.asarray(rows)]), None)
    with pytest.raises(InvalidValueError, match="Rows 60 to 60"):
        push_rows([60], 1)
    with pytest.raises(InvalidValueError, match="rows of a variable of 1000000000000 rows"):
        add_update([], [], is_whole=True, size=10**12)
    (value,) = server.handle(Message("read", {"ids": [0]}), None).arrays
    np.testing.assert_array_equal(value, TABLE)
    push_rows([1, 59], 2)
    (value,) = server.handle(Message("read", {"ids": [0]}), None).arrays
    expected = TABLE.copy()
    expected[[1, 59]] -= 1
    np.testing.assert_array_equal(value, expected)
