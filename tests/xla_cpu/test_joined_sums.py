"""Sums of metrics travel with those of gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

from distributary.collectives import all_reduce_of_vectors
from distributary.xla_cpu import JOINABLE, with_joined_sums


def _sum(value):
    return jax.lax.psum(value, "replica")


def _sum_of_metrics(value):
    with jax.named_scope(JOINABLE):
        return _sum(value)


def _gradients_first(state, x):
    total = _sum(x * 2)
    return {"loss": _sum_of_metrics(jnp.stack([x.sum(), x.max()]))}, state - 0.1 * total


def _several_gradients(state, x):
    total, more = all_reduce_of_vectors([x[:4] * 2, x[:3].sum(keepdims=True)])
    loss, largest = _sum_of_metrics(x.sum()), _sum_of_metrics(x[:2].reshape(2, 1))
    return {"loss": loss, "largest": largest}, state - 0.1 * total * more


def _metrics_first(state, x):
    loss = _sum_of_metrics(x[:2])
    return {"loss": loss}, state - 0.1 * _sum(x)


def _two_vectors(state, x):
    first, last = _sum(x), _sum(x * 3)
    return {"loss": _sum_of_metrics(x.sum()), "steps": 3}, state - first * last


def _metrics_of_new_weights(state, x):
    new = state - _sum(x)
    return {"norm": _sum_of_metrics(new @ x)}, new


def _gradients_from_metrics(state, x):
    weight = _sum_of_metrics(x.sum())
    return {"weight": weight}, state - _sum(x * weight)


def _other_dtype(state, x):
    return {"count": _sum_of_metrics((x > 0).astype(jnp.int32))}, state - _sum(x)


def _no_vector(state, x):
    return {"loss": _sum_of_metrics(x.sum())}, state - _sum(x.reshape(2, 2)).reshape(4)


def _with_effect(state, x):
    jax.debug.print("{}", x.sum())
    return {"loss": _sum_of_metrics(x.sum())}, state - _sum(x)


@pytest.mark.parametrize(
    ("step", "num_sums"),
    [
        (_gradients_first, 1),
        (_several_gradients, 1),
        (_metrics_first, 1),
        (_two_vectors, 2),
        (_metrics_of_new_weights, 2),
        (_gradients_from_metrics, 2),
        (_other_dtype, 2),
        (_no_vector, 2),
        (_with_effect, 2),
    ],
)
def test_they_are_one_vector_where_neither_needs_the_other(step, num_sums):
    mesh = Mesh(np.array(jax.devices()[:2]), ("replica",))
    state = jnp.arange(4.0)
    x = jnp.asarray(np.random.default_rng(0).normal(size=8), jnp.float32)

    def on_mesh(step):
        specs = {"in_specs": (P(), P("replica")), "out_specs": P(), "check_vma": False}
        return jax.shard_map(step, mesh=mesh, **specs)

    logs, new = jax.jit(on_mesh(with_joined_sums(step)))(state, x)

    expected_logs, expected = jax.jit(on_mesh(step))(state, x)
    np.testing.assert_array_equal(new, expected)
    jax.tree.map(np.testing.assert_array_equal, logs, expected_logs)
    found = str(jax.make_jaxpr(on_mesh(with_joined_sums(step)))(state, x))
    assert found.count("psum[") == num_sums
    assert str(jax.make_jaxpr(on_mesh(step))(state, x)).count("psum[") == 2 + (
        step in (_two_vectors, _several_gradients)
    )
