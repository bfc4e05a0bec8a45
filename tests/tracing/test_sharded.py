"""State that is updated in parts, each by the device that holds it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

from distributary.devices import (
    fetch_whole,
    make_mesh,
    put_sharded,
    shard_spec,
    stored_shards,
    whole_shards,
)
from distributary.programs._sharded import sharded_map

N = 4
ROWS, WHOLE = P("replica"), P()
X = np.arange(N * 5, dtype=np.float32).reshape(N, 5) / 10
W = np.linspace(-1, 1, 5).astype(np.float32)
M = np.full(5, 0.5, np.float32)


@pytest.fixture
def mesh():
    return make_mesh(jax.devices()[:N])


def _update(gradient, w, m):
    m = 0.9 * m + gradient / jnp.linalg.norm(gradient)
    return w - m, m


def _plain(w, m, x):
    return (*_update(lax.psum(x[0] * w, "replica"), w, m), x * 2)


def _sum_is_looked_at(w, m, x):
    total = lax.psum(x[0] * w, "replica")
    return (*_update(total, w, m), x * total)


def _sum_in_groups(w, m, x):
    pairs = lax.psum(x[0] * w, "replica", axis_index_groups=[[0, 1], [2, 3]])
    total = lax.psum(pairs, "replica", axis_index_groups=[[0, 2], [1, 3]])
    return (*_update(total, w, m), x)


def _state_is_looked_at(w, m, x):
    return (*_update(lax.psum(x[0] * m, "replica"), w, m), x - m)


def _state_is_reduced(w, m, x):
    return w, lax.psum(x[0] + m, "replica"), x


@pytest.mark.parametrize(
    ("body", "num_scattered"),
    [
        (_plain, 1),
        (_sum_is_looked_at, 0),
        (_sum_in_groups, 0),
        (_state_is_looked_at, 1),
        (_state_is_reduced, 0),
    ],
)
def test_results_are_those_of_whole_state(body, num_scattered, mesh):
    in_specs, out_specs = (WHOLE, WHOLE, ROWS), (WHOLE, WHOLE, ROWS)
    expected = jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    )(W, M, X)
    layout = NamedSharding(mesh, ROWS)
    divided = sharded_map(
        body, mesh, in_specs, out_specs, (WHOLE, ROWS, WHOLE), (WHOLE, ROWS, WHOLE)
    )

    @jax.jit
    def step(w, m, x):
        w, m, y = divided(w, whole_shards(m, M.shape, layout), x)
        return w, stored_shards(m, layout), y

    stored = put_sharded(M, layout)
    w, m, y = step(W, stored, X)

    assert m.sharding == layout
    assert [shard.data.shape for shard in m.addressable_shards] == [(2,)] * N
    for got, wanted in zip((w, fetch_whole(m, M.shape), y), expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)
    hlo = step.lower(W, stored, X).compile().as_text()
    assert len(re.findall(r" reduce-scatter\(", hlo)) == num_scattered


@pytest.mark.parametrize(
    ("shape", "num_shards", "expected"),
    [
        ((8,), 4, P("replica")),
        ((10007, 64), 4, P(None, "replica")),
        ((10007, 6), 4, P("replica")),
        ((3, 3, 3, 64), 8, P(None, None, None, "replica")),
        ((2,), 4, P("replica")),
        ((4, 4), 4, P("replica")),
        ((), 4, P()),
        ((0, 4), 4, P()),
        ((8,), 1, P()),
    ],
)
def test_the_dim_with_the_least_padding_is_divided(shape, num_shards, expected):
    assert shard_spec(shape, num_shards) == expected


@pytest.mark.parametrize("shape", [(8, 3), (3, 8), (5, 3), (2,)])
def test_what_is_put_is_fetched(shape, mesh):
    value = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    layout = NamedSharding(mesh, shard_spec(shape, N))

    stored = put_sharded(value, layout)

    assert put_sharded(stored, layout) is stored
    np.testing.assert_array_equal(fetch_whole(stored, shape), value)
    parts = [np.asarray(shard.data) for shard in stored.addressable_shards]
    assert sum(part.size for part in parts) == stored.size
    assert sum(part.sum() for part in parts) == pytest.approx(value.sum(), abs=1e-5)
