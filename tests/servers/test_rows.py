"""Steps that pull and push rows of tables, against dense training on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist
from distributary.coordinator import ClusterCoordinator, ParameterServerStrategy, local_cluster
from distributary.errors import DistributaryWarning
from distributary.experimental.partitioners import FixedShardsPartitioner
from distributary.tracing import (
    push,
)
from tests.servers.message_faults import spy

RNG = np.random.default_rng(0)
TABLES = [RNG.normal(size=(60, width)).astype(np.float32) for width in (3, 2)]
IDS = np.array([[3, 3], [59, 0], [12, 3]], np.int32)
OUT = np.array([[3, 60], [-1, -61], [1000, 3]], np.int32)  # some are out of range


class Job:
    """A worker, servers, and variables on them.

    Attributes:
        max_rows: The largest dim 0 of arrays between workers and servers.
    """

    def __init__(self, values, num_shards=1):
        cluster = local_cluster(1, ps=num_shards)
        self._sizes = spy(cluster)
        strategy = ParameterServerStrategy(cluster, FixedShardsPartitioner(num_shards))
        with strategy.scope():
            self.variables = [
                dist.Variable(value, name=f"table {i}") for i, value in enumerate(values)
            ]
        self._coordinator = ClusterCoordinator(strategy)

    @property
    def max_rows(self):
        return max(self._sizes, default=0)

    def run(self, function, ids):
        """Assigns what a function of the values and ids returns; also returns its first result."""

        def step(ids):
            result, *new = function([v.value() for v in self.variables], ids)
            for variable, value in zip(self.variables, new, strict=True):
                variable.assign(value)
            return result

        return self._coordinator.schedule(step, args=(ids,)).fetch()


def _take(table, ids, mode="fill"):
    return jnp.nan_to_num(jnp.take(table, ids, axis=0, mode=mode))


def _normed(table):
    return table / jnp.linalg.norm(table, axis=1, keepdims=True)


LOSSES = {
    "shared ids": lambda t, ids, other: (_take(t, ids).sum(-1) * _take(other, ids).sum(-1)).sum(),
    "twice": lambda t, ids, _: (
        _take(t, ids).sum() ** 2 + (_take(t, ids[:, 0] + 1, "clip") ** 3).sum()
    ),
    "converted": lambda t, ids, _: (
        (t.astype(jnp.bfloat16) * 2)[ids].astype(jnp.float32) ** 2
    ).sum(),
    "normed rows": lambda t, ids, _: (_normed(t)[ids] * jnp.arange(3)).sum(),
    "by scan": lambda t, ids, _: jax.lax.scan(
        lambda total, row: (total * 0.5 + row, None), jnp.zeros(3), _take(t, ids)[:, 0]
    )[0][0],
    "small ids": lambda t, ids, _: (t[(ids % 60).astype(jnp.uint8)] ** 2).sum(),
    "checkpointed": lambda t, ids, _: jax.checkpoint(lambda t: (_take(t, ids) ** 2).sum())(t),
    "beside a constant": lambda t, ids, _: (jnp.ones(t.shape)[ids] * _take(t, ids)).sum(),
    "vmapped": lambda t, ids, _: jax.vmap(lambda own: (_take(t, own) ** 2).sum())(ids).sum(),
}


def test_only_rows_that_are_looked_up_travel():
    """Each loss looks up rows of a table of its own; the first one also of the last table."""
    tables = [*[TABLES[0]] * len(LOSSES), TABLES[1]]

    def step(tables, ids):
        def losses_of(tables):
            *own, other = tables
            pairs = zip(LOSSES.values(), own, strict=True)
            losses = [loss(table, ids, other) for loss, table in pairs]
            return sum(losses), jnp.stack(losses)

        (_, losses), gradients = jax.value_and_grad(losses_of, has_aux=True)(tables)
        norm = jnp.sqrt(sum((g * g).sum() for g in (gradients[0], gradients[-1])))
        scales = [norm, *[1] * (len(LOSSES) - 1), norm]
        updates = zip(tables, gradients, scales, strict=True)
        return losses, *(table - push(g / scale) for table, g, scale in updates)

    job = Job(tables)
    expected = jax.jit(step)
    for ids in (IDS, OUT):
        result = job.run(step, ids)

        losses, *tables = expected(tables, ids)
        np.testing.assert_allclose(result, losses, rtol=1e-4, err_msg=str([*LOSSES]))
    for name, variable, table in zip([*LOSSES, "other"], job.variables, tables, strict=True):
        np.testing.assert_allclose(variable.numpy(), table, rtol=1e-4, atol=1e-5, err_msg=name)
    assert 0 < job.max_rows < 20


def row_norms(w, z, n, g):
    """Row-wise Adagrad: one number for every row."""
    total = z + jnp.square(g).sum(axis=1, keepdims=True)
    return w - 0.1 * g * jax.lax.rsqrt(total + 1e-7), total, n


def adam(w, z, n, g):
    z, n = 0.9 * z + 0.1 * g, 0.99 * n + 0.01 * g * g
    return w - 0.1 * z / (jnp.sqrt(n) + 1e-7), z, n


def ftrl(w, z, n, g):
    new_n = n + g * g
    new_z = z + g - (jnp.sqrt(new_n) - jnp.sqrt(n)) * w
    return jnp.where(jnp.abs(new_z) > 0.1, -new_z / jnp.sqrt(new_n), 0.0), new_z, new_n


_BY_ROWS = [
    lambda w, z, n, g: (w - 0.1 * jnp.clip(g, -1, 1), z, n),
    lambda w, z, n, g: (w - g * jax.lax.rsqrt(n + g**2), z, n + g**2),
    row_norms,
    lambda w, z, n, g: (w - jnp.tanh(g) * n, jnp.where(n > 0, z, z), n),
]
_OF_ALL_ROWS = [
    lambda w, z, n, g: (jnp.where(g > 0, w, w), z, jnp.maximum(n, jnp.abs(g) * 0)),
    lambda w, z, n, g: (w - 0.1 * (g + 0.01 * w), z, n),
    adam,
    lambda w, z, n, g: (jnp.clip(w - g / jnp.maximum(1, jnp.sqrt((g * g).sum())), -1, 1), z, n),
    ftrl,
]
_BY_OTHER_ROWS = [
    lambda w, z, n, g: (w - g[::-1], g, n),
    lambda w, z, n, g: (w - g / (1 + g.mean(axis=0)), z, n),
]


@pytest.mark.parametrize(
    ("num_shards", "rules", "changes_all"),
    [(3, _BY_ROWS, False), (3, _OF_ALL_ROWS, True), (1, _BY_OTHER_ROWS, True)],
    ids=["rows", "all rows", "rows of others"],
)
def test_servers_update_tables_as_one_device_does(num_shards, rules, changes_all):
    tables = [TABLES[0]] * len(rules)
    shapes = [(60, 1 if rule is row_norms else 3) for rule in rules]
    slots = [np.full(shape, value, np.float32) for shape in shapes for value in (0.5, 0.1)]

    def step(values, ids):
        tables, slots = values[: len(rules)], values[len(rules) :]
        value, gradients = jax.value_and_grad(
            lambda tables: sum((_take(t, ids).sum(1) ** 2).sum() for t in tables)
        )(tables)
        columns = zip(rules, tables, slots[::2], slots[1::2], map(push, gradients), strict=True)
        new = [rule(*values) for rule, *values in columns]
        return value, *(w for w, _, _ in new), *(slot for _, *own in new for slot in own)

    job = Job([*tables, *slots], num_shards)
    values = [*tables, *slots]
    for ids in (IDS, OUT):
        result = job.run(step, ids)
        expected, *values = jax.jit(step)(values, ids)
        np.testing.assert_allclose(result, expected, rtol=1e-5)
    for variable, value in zip(job.variables, values, strict=True):
        np.testing.assert_allclose(variable.numpy(), value, rtol=1e-5, atol=1e-5)
    others = np.setdiff1d(np.arange(60), [*IDS.flat, *OUT.flat])
    for variable in job.variables[: len(rules)]:
        is_kept = np.array_equal(variable.numpy()[others], TABLES[0][others])
        assert is_kept or changes_all
    assert 0 < job.max_rows < 20


def test_a_step_may_look_up_nothing():
    job = Job(TABLES[:1])

    loss = job.run(lambda t, ids: (_take(t[0], ids).sum(), t[0]), np.zeros((0,), np.int32))

    assert (loss, job.max_rows) == (0, 0)


@pytest.mark.parametrize(
    ("read", "reason"),
    [
        (lambda table, offset, ids: (table[ids] @ table.T).sum(), "transpose needs all of it"),
        (lambda table, offset, ids: table[ids].sum() + (table**2).sum(), "reduce_sum|all of it"),
        (lambda table, offset, ids: table[ids + offset].sum(), "the ids depend on a variable"),
    ],
)
def test_a_table_of_which_more_is_needed_travels_as_a_whole(read, reason):
    job = Job([TABLES[0], np.int32(0)])
    ids = np.array([1, 1, 2], np.int32)

    def step(values, ids):
        table, offset = values
        loss, gradient = jax.value_and_grad(read)(table, offset, ids)
        return loss, table - 0.1 * push(gradient), offset

    with pytest.warns(DistributaryWarning, match=f"'table 0' are looked up.*{reason}"):
        loss = job.run(step, ids)
    assert job.max_rows == 60
    expected, table, _ = jax.jit(step)([TABLES[0], 0], ids)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(job.variables[0].numpy(), table, rtol=1e-5, atol=1e-6)
