"""Gradients of `sparse_read`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import distributary as dist

TABLE = np.arange(12, dtype=np.float32).reshape(6, 2)
IDS = jnp.array([4, 1, 4])


@pytest.fixture
def table(place):
    return place.variable(TABLE)


def _slices(gradient, values, indices):
    assert isinstance(gradient, dist.IndexedSlices)
    assert gradient.dense_shape == TABLE.shape
    np.testing.assert_array_equal(gradient.indices, indices)
    np.testing.assert_allclose(gradient.values, values, rtol=1e-6)


def _gradient(loss, source):
    def step(*args):
        with dist.GradientTape() as tape:
            value = loss(*args)
        return tape.gradient(value, source)

    return step


def _of_embeddings_in_a_jit(table, ids):
    embed = jax.jit(lambda ids: jnp.sum(table.sparse_read(ids) ** 2))
    return embed(ids) + 3.0 * embed(ids)


def _of_a_read_that_does_not_reach_it(table, ids):
    table.sparse_read(ids[:1])
    return jnp.sum(table.sparse_read(ids[1:2]))


_ROWS = TABLE[[4, 1, 4]]
# Losses of a table, and their gradients by rows.
_BY_ROWS = {
    "duplicates": (lambda t, ids: jnp.sum(t.sparse_read(ids) ** 2), 2 * _ROWS, [4, 1, 4]),
    "several reads": (
        lambda t, ids: jnp.sum(t.sparse_read(ids)) + 5.0 * jnp.sum(t.sparse_read(ids[:1]) ** 2),
        *([[1, 1], [1, 1], [1, 1], 10 * TABLE[4]], [4, 1, 4, 4]),
    ),
    "unused read": (_of_a_read_that_does_not_reach_it, [[0, 0], [1, 1]], [4, 1]),
    "nested jit": (
        _of_embeddings_in_a_jit,
        *(np.concatenate([2 * _ROWS, 6 * _ROWS]), [4, 1, 4, 4, 1, 4]),
    ),
    "vmap": (
        lambda t, ids: jnp.sum(jax.vmap(lambda i: jnp.sum(t.sparse_read(i) ** 2))(ids)),
        *(2 * _ROWS, [4, 1, 4]),
    ),
}
# Losses whose gradient is dense: 1 for each time that a row is read, beside what else is given.
_DENSE = {
    "read densely too": (lambda t, ids: jnp.sum(t.sparse_read(ids)) + jnp.sum(t * t), 2 * TABLE),
    "scan": (
        lambda t, ids: lax.scan(lambda c, i: (c + jnp.sum(t.sparse_read(i)), None), 0.0, ids)[0],
        0 * TABLE,
    ),
    "cond": (
        lambda t, ids: lax.cond(ids[0] > 0, lambda: jnp.sum(t.sparse_read(ids)), lambda: 0.0),
        0 * TABLE,
    ),
    "checkpoint": (
        lambda t, ids: jax.checkpoint(lambda i: jnp.sum(t.sparse_read(i)))(ids),
        0 * TABLE,
    ),
}


def test_gradients_have_rows_where_tables_are_read_by_rows(traced):
    table = traced.variable(TABLE)
    losses = {name: loss for name, (loss, *_) in (_BY_ROWS | _DENSE).items()}

    def step(ids):
        gradients = {
            name: _gradient(lambda ids, loss=loss: loss(table, ids), table)(ids)
            for name, loss in losses.items()
        }
        with dist.GradientTape(persistent=True) as tape:
            a = jnp.sum(table.sparse_read(ids))
            b = jnp.sum(table.sparse_read(ids[:2]) ** 2)
        return gradients, tape.gradient(a, table), tape.gradient(b, table)

    gradients, of_a, of_b = traced(step, IDS)

    for name, (_, values, indices) in _BY_ROWS.items():
        _slices(gradients[name], values, indices)
    for name, (_, beside) in _DENSE.items():
        expected = beside.copy()
        np.add.at(expected, IDS, 1)
        np.testing.assert_allclose(gradients[name], expected, rtol=1e-6, err_msg=name)
    # Reads that only another target depends on have rows, too.
    _slices(of_a, [[1, 1], [1, 1], [1, 1], [0, 0], [0, 0]], [4, 1, 4, 4, 1])
    _slices(of_b, [[0, 0], [0, 0], [0, 0], *2 * TABLE[[4, 1]]], [4, 1, 4, 4, 1])


def test_rows_in_every_place(place, table):
    v = place.variable(3.0)

    def unconnected_zeros_are_dense(ids):
        with dist.GradientTape(persistent=True) as tape:
            loss = jnp.sum(table.sparse_read(ids) ** 2)
            other = jnp.float32(1.0)
        return tape.gradient(loss, table), tape.gradient(other, table, unconnected_gradients="zero")

    def rows_that_do_not_reach_the_target(ids):
        def loss(ids):
            table.sparse_read(ids)
            return v * v

        return _gradient(loss, [table, v])(ids)

    def a_dense_read_after_the_tape(ids):
        gradient = _gradient(lambda ids: jnp.sum(table.sparse_read(ids)), table)(ids)
        return gradient, jnp.sum(table.value())

    def nested_tapes(ids):
        with dist.GradientTape() as outer:
            with dist.GradientTape() as inner:
                loss = jnp.sum(table.sparse_read(ids) ** 3)
            first = inner.gradient(loss, table)
            penalty = jnp.sum(first.values**2)
        return first, outer.gradient(penalty, table)

    steps = (
        *(unconnected_zeros_are_dense, rows_that_do_not_reach_the_target),
        *(a_dense_read_after_the_tape, nested_tapes),
    )
    (rows, zero), none, (after, total), (first, second) = place(
        lambda ids: [step(ids) for step in steps], IDS
    )

    _slices(rows, 2 * _ROWS, [4, 1, 4])
    np.testing.assert_array_equal(rows.to_dense()[4], 4 * TABLE[4])
    np.testing.assert_array_equal(zero, np.zeros_like(TABLE))
    assert none == [None, 6.0]
    _slices(after, np.ones((3, 2)), [4, 1, 4])
    assert total == TABLE.sum()
    _slices(first, 3 * _ROWS**2, [4, 1, 4])
    _slices(second, 36 * _ROWS**3, [4, 1, 4])


# Over the replicas


def test_all_reduce_concatenates_and_does_not_densify(strategy):
    table_shape = (1013, 3)
    with strategy.scope():
        table = dist.Variable(jnp.ones(table_shape))
        bias = dist.Variable(jnp.ones(7))
    ids = dist.PerReplica([jnp.array([1, 5]), jnp.array([5, 7])])

    def step(ids):
        with dist.GradientTape() as tape:
            loss = jnp.sum(table.sparse_read(ids)) * (1.0 + jnp.sum(bias.value()))
        gradients = tape.gradient(loss, [table, bias])
        return [dist.get_replica_context().all_reduce(op, gradients) for op in ("SUM", "MEAN")]

    results = strategy.run(step, (ids,))
    text = strategy.extended.lower(step, (ids,)).compile().as_text()

    for (gradient, of_bias), scale in zip(results, (1.0, 0.5), strict=True):
        for copy in gradient.values:
            np.testing.assert_array_equal(copy.indices, [1, 5, 5, 7])
            np.testing.assert_array_equal(copy.values, np.full((4, 3), 8.0 * scale))
            assert copy.dense_shape == table_shape
        np.testing.assert_array_equal(of_bias.values[1], np.full(7, 12.0 * scale))
    collectives = [
        line for line in text.splitlines() if "all-reduce(" in line or "all-gather(" in line
    ]
    assert collectives
    assert not any("1013" in line for line in collectives)


@pytest.mark.parametrize("sizes", [(2, 1), (3, 0)])
def test_replicas_of_an_uneven_batch_bring_different_numbers_of_rows(sizes, strategy):
    with strategy.scope():
        table = dist.Variable(TABLE)
    ids = [np.array([4, 1, 5])[: sizes[0]], np.array([2])[: sizes[1]]]

    def step(ids):
        gradient = dist.grad(lambda: jnp.sum(table.sparse_read(ids) ** 2), table)()
        gradient = dist.get_replica_context().all_reduce("SUM", gradient)
        table.scatter_sub(gradient)
        return gradient

    gradient = strategy.run(step, (dist.PerReplica(ids),))

    whole = np.concatenate(ids)
    expected = TABLE.copy()
    np.add.at(expected, whole, -2 * TABLE[whole])
    for copy in gradient.values:
        np.testing.assert_array_equal(copy.indices, whole)
        np.testing.assert_array_equal(copy.values, 2 * TABLE[whole])
    np.testing.assert_array_equal(table.numpy(), expected)
