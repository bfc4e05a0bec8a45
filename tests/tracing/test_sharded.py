"""State that is updated in parts, each by the device that holds it."""

import re

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import distributary as dist
from distributary.devices import shard_spec

N = 4
X = np.arange(N * 5, dtype=np.float32).reshape(N, 5) / 10
W = np.linspace(-1, 1, 5).astype(np.float32)
M = np.full(5, 0.5, np.float32)


def _update(gradient, w, m):
    def assign(strategy):  # the same on all replicas
        m.assign(0.9 * m.value + gradient / jnp.linalg.norm(gradient))
        w.assign(w.value - m.value)

    dist.get_replica_context().merge_call(assign)


def _plain(w, m, x):
    loss, gradient = lax.psum((x.sum(), x * w.value), "replica")
    _update(gradient, w, m)
    return loss, x * 2


def _sum_is_looked_at(w, m, x):
    total = lax.psum(x * w.value, "replica")
    _update(total, w, m)
    return x * total


def _sum_in_groups(w, m, x):
    pairs = lax.psum(x * w.value, "replica", axis_index_groups=[[0, 1], [2, 3]])
    _update(lax.psum(pairs, "replica", axis_index_groups=[[0, 2], [1, 3]]), w, m)


def _state_is_looked_at(w, m, x):
    before = m.value
    _update(lax.psum(x * before, "replica"), w, m)
    return x - before


def _state_is_reduced(w, m, x):
    total = lax.psum(x + m.value, "replica")
    dist.get_replica_context().merge_call(lambda strategy: m.assign(total))


def _functions_of_both_stages(w, m, x):
    table = np.arange(5, dtype=np.float32)

    @jax.jit
    def inner(x, values):  # called twice, with a constant and an argument that it returns
        gradient = lax.psum(x * x * values + jnp.asarray(table), "replica")
        return (x * values).sum(), jnp.sin(gradient), values

    loss, gradient, values = inner(x, w.value)
    loss, other, _ = inner(x + loss, values)
    _update(gradient + other, w, m)
    return loss


def _branch_of_the_update(w, m, x):
    gradient = lax.psum(x * w.value, "replica")
    is_finite = jnp.isfinite(gradient).all()
    new = lax.cond(is_finite, lambda: 0.9 * m.value + jnp.sin(gradient), lambda: m.value)
    dist.get_replica_context().merge_call(lambda strategy: m.assign(new))


@pytest.mark.parametrize(
    ("body", "num_scattered"),
    [
        (_functions_of_both_stages, 2),
        (_branch_of_the_update, 1),
        (_plain, 1),
        (_sum_is_looked_at, 0),
        (_sum_in_groups, 0),
        (_state_is_looked_at, 1),
        (_state_is_reduced, 0),
    ],
)
def test_results_are_those_of_whole_state(body, num_scattered):
    def run(is_divided):
        strategy = dist.MirroredStrategy(
            [f"CPU:{i}" for i in range(N)], experimental_shard_optimizer_state=is_divided
        )
        with strategy.scope():
            w = keras.Variable(W)
            optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
            optimizer.build([w])
        (m,) = optimizer.momentums
        m.assign(M)
        step, batch = lambda x: body(w, m, x), dist.PerReplica(list(X))
        lowered = strategy.extended.lower(step, (batch,))
        hlo = lowered.compile().as_text() if is_divided else ""
        results = strategy.experimental_local_results(strategy.run(step, (batch,)))
        return m._value, hlo, [results, w.numpy(), m.numpy()]

    stored, hlo, divided = run(True)

    *_, whole = run(False)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), divided, whole)
    assert [shard.data.shape for shard in stored.addressable_shards] == [(2,)] * N
    assert len(re.findall(r" reduce-scatter\(", hlo)) == num_scattered


@pytest.mark.parametrize(
    ("shape", "num_shards", "expected"),
    [
        ((10007, 64), 4, P(None, "replica")),
        ((10007, 6), 4, P("replica")),
        ((3, 3, 3, 64), 8, P(None, None, None, "replica")),
        ((2,), 4, P("replica")),
        ((), 4, P()),
        ((0, 4), 4, P()),
        ((8,), 1, P()),
    ],
)
def test_the_dim_with_the_least_padding_is_divided(shape, num_shards, expected):
    assert shard_spec(shape, num_shards) == expected
