"""Steps that see the whole batch, while every device computes its part."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist
from distributary.engine import StepKind, global_batch

_KIND = StepKind("global", "shared", "a step")
_RANDOM = np.random.default_rng(0)


def _mirrored(num_replicas):
    return dist.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])


def _run(strategy, step, batch, dim=0):
    extended = strategy.extended
    rows = global_batch(batch, extended.placement, dim, is_own=False)
    return extended.engine.execute({}, step, ((rows,), {}), _KIND)


@pytest.mark.parametrize(("num_rows", "num_replicas"), [(8, 4), (6, 4), (1, 4)])
def test_every_device_computes_only_its_rows(num_rows, num_replicas):
    strategy = _mirrored(num_replicas)
    x = _RANDOM.normal(size=(num_rows, 16)).astype(np.float32)
    w = _RANDOM.normal(size=(16, 32)).astype(np.float32)

    def step(x):
        assert x.shape == (num_rows, 16)
        return jnp.sum(jnp.tanh(x @ w) ** 2)

    rows = global_batch(x, strategy.extended.placement, 0, is_own=False)
    text = strategy.extended.engine.lower(step, ((rows,), {}), _KIND).compile().as_text()

    each = -(-num_rows // num_replicas)
    shapes = set(re.findall(r"f32\[(\d+),32\]", text))
    assert str(each) in shapes
    assert str(num_rows) not in shapes - {str(each)}
    expected = (np.tanh(x @ w) ** 2).sum()
    np.testing.assert_allclose(_run(strategy, step, x), expected, rtol=1e-5)


@pytest.mark.parametrize("num_rows", [8, 2])
def test_arrays_of_a_batch_may_differ_in_their_rows(num_rows):
    strategy = _mirrored(3)
    batch = {
        "x": _RANDOM.normal(size=(num_rows, 4)).astype(np.float32),
        "queue": jnp.asarray(_RANDOM.normal(size=(7, 4)).astype(np.float32)),
        "temperature": np.float32(2),
    }

    result = _run(strategy, lambda b: (b["x"] @ b["queue"].T / b["temperature"]).max(), batch)

    expected = (batch["x"] @ np.asarray(batch["queue"]).T / 2).max()
    np.testing.assert_allclose(result, expected, rtol=1e-6)


def test_a_step_is_the_only_replica():
    strategy = _mirrored(2)
    x = np.arange(10, dtype=np.float32).reshape(5, 2)

    def step(x):
        context = dist.get_replica_context()
        assert dist.get_strategy() is strategy
        assert dist.has_strategy()
        assert strategy.num_replicas_in_sync == context.num_replicas_in_sync == 1
        assert context.replica_id_in_sync_group == 0
        gathered = context.all_gather(x, axis=0)
        assert gathered.shape == x.shape
        merged = context.merge_call(
            lambda strategy, value: (
                strategy.reduce("SUM", value, axis=None) * strategy.num_replicas_in_sync
            ),
            args=(x,),
        )
        return context.all_reduce("SUM", x.sum()), context.all_reduce("MEAN", merged)

    total, merged = _run(strategy, step, x)

    assert float(total) == x.sum()
    np.testing.assert_array_equal(merged, x)
    assert strategy.num_replicas_in_sync == 2


@pytest.mark.parametrize(
    ("synchronization", "aggregation"),
    [("ON_READ", "SUM"), ("ON_READ", "MEAN"), ("ON_READ", "ONLY_FIRST_REPLICA"), ("AUTO", "SUM")],
)
def test_variables_have_the_aggregated_value_and_are_assigned_once(synchronization, aggregation):
    strategy = _mirrored(2)
    with strategy.scope():
        count = dist.Variable(
            3.0,
            synchronization=dist.VariableSynchronization[synchronization],
            aggregation=dist.VariableAggregation[aggregation],
        )
    start = float(count.numpy())

    def step(x):
        count.assign_add(x.sum())
        return count.value()

    result = _run(strategy, step, np.ones((5, 1), np.float32))

    assert float(result) == float(count.numpy()) == start + 5
