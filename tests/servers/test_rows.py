"""Steps that pull and push rows of tables, against dense training on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist
from distributary.coordinator import ClusterCoordinator, ParameterServerStrategy, local_cluster
from distributary.errors import DistributaryWarning
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


def cluster_of():
    cluster = local_cluster(1, 1)
    cluster.fault = spy = Spy()
    return ParameterServerStrategy(cluster), spy


def test_rows_of_tables_train_as_whole_tables_do():
    strategy, spy = cluster_of()
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
