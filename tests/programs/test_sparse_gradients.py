"""Gradients of tables travel and are applied by rows; the numbers are those of dense gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

from distributary.jaxprs import (
    walk,
)
from distributary.programs import with_sparse_gradients
from distributary.tools.compilation import collectives_of

_ROWS, _WIDTH, _NUM_IDS = 4096, 16, 24
_TABLE_BYTES = 4 * _ROWS * _WIDTH
_RATE = 0.1


def _sgd(gradient, table, slots):
    return table - _RATE * gradient, slots


def _adagrad(gradient, table, slots):
    slot = slots[0] + jnp.square(gradient)
    return table - _RATE * gradient / jnp.sqrt(slot + 1e-7), (slot, *slots[1:])


def _adagrad_of_optax(gradient, table, slots):
    slot = slots[0] + gradient * gradient
    scale = jnp.where(slot > 0, lax.rsqrt(slot + 1e-7), 0.0)
    return table + scale * gradient * -_RATE, (slot, *slots[1:])


def _adam(gradient, table, slots):
    first = slots[0] + (gradient - slots[0]) * 0.1
    second = slots[1] + (jnp.square(gradient) - slots[1]) * 0.001
    return table - _RATE * first / (jnp.sqrt(second) + 1e-3), (first, second)


_UPDATES = (_sgd, _adagrad, _adagrad_of_optax, _adam)


def _scattered(ids, rows, mode="drop"):
    return jnp.zeros((_ROWS, *rows.shape[ids.ndim :]), rows.dtype).at[ids].add(rows, mode=mode)


def _step(update, gradient_of=_scattered):
    def step(state, ids, rows):
        table, *slots = state
        total = lax.psum(gradient_of(ids, rows), "replica")
        table, slots = update(total, table, tuple(slots))
        return (table, *slots), jnp.max(jnp.abs(table[:8]))

    return step


def _program(step, num_replicas, *args, in_any_order=False, rewrites=True):
    """The step of all replicas, with the state donated; `args` are state, ids and rows."""
    mesh = Mesh(np.asarray(jax.devices()[:num_replicas]), ("replica",))
    shard = lambda x: jax.ShapeDtypeStruct((x.shape[0] // num_replicas, *x.shape[1:]), x.dtype)
    own = args[0], *jax.tree.map(shard, args[1:])
    jaxpr = jax.make_jaxpr(step, axis_env=[("replica", num_replicas)])(*own).jaxpr
    replica = step
    if rewrites:
        replica = with_sparse_gradients(step, [jaxpr], num_replicas, in_any_order)
    specs = P(), P("replica"), P("replica")
    mapped = jax.shard_map(replica, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    return jax.jit(mapped, donate_argnums=0)


def _state(dtype=np.float32):
    random = np.random.default_rng(0)
    table = random.normal(size=(_ROWS, _WIDTH))
    slots = random.uniform(0.1, 1.0, (2, _ROWS, _WIDTH))
    return tuple(np.asarray(x, dtype) for x in (table, *slots))


def _batch(num_replicas, shape=(_NUM_IDS,), dtype=np.float32):
    """Ids that come twice or more on one replica and on several, and others."""
    random = np.random.default_rng(1)
    ids = random.integers(0, _ROWS, (num_replicas * shape[0], *shape[1:]), np.int32)
    ids[::3] = ids[:1]
    return ids, random.normal(size=(*ids.shape, _WIDTH)).astype(dtype)


def _expected(update, state, ids, rows):
    """The state after a step, from a dense gradient that NumPy adds up."""
    gradient = np.zeros((_ROWS, _WIDTH))
    np.add.at(gradient, ids, rows.astype(np.float64))
    gradient = jnp.asarray(gradient, state[0].dtype)
    table, *slots = map(jnp.asarray, state)
    table, slots = update(gradient, table, tuple(slots))
    return table, *slots


def _assert_close(actual, expected, rtol=1e-5, atol=2e-6):
    for own, other in zip(actual, expected, strict=True):
        own, other = (np.asarray(x).astype(np.float32) for x in (own, other))
        np.testing.assert_allclose(own, other, rtol=rtol, atol=atol)


def _largest_collective(compiled):
    return max([found.num_bytes for found in collectives_of(compiled.as_text())], default=0)


@pytest.mark.parametrize(
    ("update", "num_replicas"), [*[(update, 2) for update in _UPDATES], (_adagrad, 1)]
)
def test_state_is_that_of_a_dense_gradient(update, num_replicas):
    state, batch = _state(), _batch(num_replicas)
    lowered = _program(_step(update), num_replicas, state, *batch).lower(state, *batch)
    compiled = lowered.compile()

    new, largest = compiled(state, *batch)

    expected = _expected(update, state, *batch)
    _assert_close(new, expected)
    np.testing.assert_allclose(largest, np.abs(expected[0][:8]).max(), rtol=1e-5)
    if num_replicas == 2:  # no collective is as large as the table
        assert 0 < _largest_collective(compiled) < _TABLE_BYTES / 8
    if update is not _adam:  # the new table and slots lie where the old ones did
        assert compiled.memory_analysis().temp_size_in_bytes < _TABLE_BYTES / 2


@pytest.mark.parametrize("update", [_adagrad, _adam])
def test_replicas_add_the_same_in_one_order_where_scatters_have_none(update):
    state, batch = _state(), _batch(4)
    program = _program(_step(update), 4, state, *batch, in_any_order=True)

    new, _ = program(state, *batch)

    _assert_close(new, _expected(update, state, *batch))
    eqns = list(walk(jax.make_jaxpr(program)(state, *batch).jaxpr.eqns))
    gathered = [eqn.primitive.name for eqn in eqns].index("all_gather")
    added = [eqn for eqn in eqns[gathered:] if eqn.primitive.name == "scatter-add"]
    # One after the other, those of each replica. No id is named twice, so there is one sum.
    assert len(added) == 4
    assert all(eqn.params["unique_indices"] for eqn in added)


_MODES = {
    "drop": lambda ids: (ids >= 0) & (ids < _ROWS),
    "clip": lambda ids: np.ones_like(ids, bool),
}


@pytest.mark.parametrize("mode", _MODES)
def test_ids_out_of_range_mean_what_they_mean_in_jax(mode):
    state, update = _state(), _adagrad
    ids, rows = _batch(2)
    ids[:6] = [-1, -_ROWS - 5, _ROWS, _ROWS + 3, _ROWS - 1, 2**31 - 1]

    def gradient_of(ids, rows):
        zeros = jnp.zeros((_ROWS, _WIDTH), rows.dtype)
        return zeros.at[ids].add(rows, mode=mode, wrap_negative_indices=False)

    program = _program(_step(update, gradient_of), 2, state, ids, rows)
    new, _ = program(state, ids, rows)

    counts = _MODES[mode](ids)
    _assert_close(new, _expected(update, state, np.clip(ids[counts], 0, _ROWS - 1), rows[counts]))


def test_ids_may_be_of_a_dtype_that_does_not_count_the_rows():
    state = _state()
    ids, rows = _batch(2)
    ids = (ids % 200).astype(np.uint8)

    new, _ = _program(_step(_adagrad), 2, state, ids, rows)(state, ids, rows)

    _assert_close(new, _expected(_adagrad, state, ids.astype(np.int64), rows))


def test_narrow_floats_are_summed_before_they_are_added():
    dtype, update = jnp.bfloat16, _adagrad
    state = tuple(np.full((_ROWS, _WIDTH), x, dtype) for x in (1.0, 1.0, 1.0))
    ids, rows = np.full(2 * _NUM_IDS, 7, np.int32), np.full((2 * _NUM_IDS, _WIDTH), 0.01, dtype)

    new, _ = _program(_step(update), 2, state, ids, rows)(state, ids, rows)

    # A single row is less than half of the distance from 1.0 to the next bfloat16.
    _assert_close(new, _expected(update, state, ids, rows), rtol=2e-2)
    assert np.all(np.asarray(new[0][7]) < 0.97)


def _twice(ids, rows):
    return _scattered(ids, rows) + 2.0 * _scattered(ids[::-1] // 2, rows)


def _of_pairs(ids, rows):
    return _scattered(ids.reshape(-1, 2), rows.reshape(-1, 2, _WIDTH))


def _in_a_function(ids, rows):
    return jax.jit(_scattered)(ids, rows) * 0.5


def _masked(ids, rows):
    return _scattered(ids, jnp.where((ids % 2 == 0)[:, None], rows, 0.0))


def _with_a_dense_part(ids, rows):
    return _scattered(ids, rows) + jnp.ones((_ROWS, _WIDTH)) * jnp.mean(rows)


def _cubed(ids, rows):
    return _scattered(ids, rows) ** 3


def _wider(ids, rows):
    return _scattered(ids, rows.astype(jnp.bfloat16)).astype(jnp.float32)


def test_gradients_of_other_forms():
    forms = dict.fromkeys((_twice, _with_a_dense_part, _cubed), _adam)
    forms |= dict.fromkeys((_of_pairs, _in_a_function, _masked, _wider), _sgd)
    args = [_state() for _ in forms], *_batch(2)

    def step(states, ids, rows):
        steps = [_step(update, form) for form, update in forms.items()]
        return [step(state, ids, rows)[0] for step, state in zip(steps, states, strict=True)]

    results = [_program(step, 2, *args, rewrites=rewrites)(*args) for rewrites in (True, False)]

    for form, new, expected in zip(forms, *results, strict=True):
        _assert_close(new, expected, rtol=2e-2 if form is _wider else 1e-4, atol=1e-5)


_LEFT_ALONE = {
    "small": lambda ids, rows: jnp.zeros((256, _WIDTH)).at[ids].add(rows),
    "mostly read": lambda ids, rows: jnp.zeros((64, 4096)).at[ids % 64].add(rows[:, :1]),
    "set": lambda ids, rows: jnp.zeros((_ROWS, _WIDTH)).at[ids].set(rows),
    "single elements": lambda ids, rows: jnp.zeros((_ROWS, _WIDTH)).at[ids, 0].add(rows[:, 0]),
}


@pytest.mark.parametrize("gradient_of", _LEFT_ALONE)
def test_other_programs_are_left_alone(gradient_of):
    def step(ids, rows):
        return lax.psum(_LEFT_ALONE[gradient_of](ids, rows), "replica")

    jaxpr = jax.make_jaxpr(step, axis_env=[("replica", 2)])(*_batch(1)).jaxpr

    assert with_sparse_gradients(step, [jaxpr], 2, False) is step


@pytest.mark.parametrize("num_rows", [_ROWS, _ROWS * 64])
def test_large_tables_find_distinct_rows_by_sorting(num_rows):
    random = np.random.default_rng(2)
    state = tuple(random.uniform(0.1, 1.0, (num_rows, 1)).astype(np.float32) for _ in range(2))
    ids = np.asarray([5, 5, num_rows - 1, num_rows, 5, 17, -1, 17], np.int32)
    rows = random.normal(size=(8, 1)).astype(np.float32)

    def step(state, ids, rows):
        gradient = (
            jnp.zeros((num_rows, 1)).at[ids].add(rows, mode="drop", wrap_negative_indices=False)
        )
        table, slots = _adagrad(lax.psum(gradient, "replica"), state[0], state[1:])
        return table, *slots

    new = _program(step, 2, state, ids, rows)(state, ids, rows)

    dense = np.zeros((num_rows, 1))
    kept = (ids >= 0) & (ids < num_rows)
    np.add.at(dense, ids[kept], rows[kept].astype(np.float64))
    table, slots = _adagrad(jnp.asarray(dense, np.float32), state[0], state[1:])
    _assert_close(new, (table, *slots))
