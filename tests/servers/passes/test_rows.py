"""A worker with rows computes what it computes with whole tables, and pushes the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from distributary.servers._parts import in_parts
from distributary.servers._rows import rows_of, rows_of_update
from distributary.servers._split import StepInput, split_over_servers
from distributary.servers._table_rows import RowPlan
from distributary.tracing import push

RNG = np.random.default_rng(0)
A = RNG.normal(size=(40, 3)).astype(np.float32)
B = RNG.normal(size=(40, 2)).astype(np.float32)
IDS = np.array([[3, 3], [39, 0], [12, 3]], np.int32)
OUT = np.array([[3, 40], [-1, -41], [1000, 3]], np.int32)


def _take(table, ids, mode="fill"):
    return jnp.nan_to_num(jnp.take(table, ids, axis=0, mode=mode))


def _twice(a, b, ids):
    return _take(a, ids).sum() ** 2 + (_take(a, ids[:, 0] + 1, "clip") ** 3).sum()


def _shared_ids(a, b, ids):
    return (_take(a, ids).sum(-1) * _take(b, ids).sum(-1)).sum()


def _converted(a, b, ids):
    half = a.astype(jnp.bfloat16) * 2
    return (half[ids] ** 2).astype(jnp.float32).sum()


def _normed_rows(a, b, ids):
    unit = a / jnp.linalg.norm(a, axis=1, keepdims=True)
    return (unit[ids] * jnp.arange(3)).sum()


def _by_scan(a, b, ids):
    rows = _take(a, ids)
    return jax.lax.scan(lambda total, row: (total * 0.5 + row, None), jnp.zeros(3), rows[:, 0])[0][
        0
    ]


def _small_ids(a, b, ids):
    return (a[(ids % 40).astype(jnp.uint8)] ** 2).sum()


def _checkpointed(a, b, ids):
    return jax.checkpoint(lambda a: (_take(a, ids) ** 2).sum())(a)


def _vmapped(a, b, ids):
    return jax.vmap(lambda own: (_take(a, own) ** 2).sum())(ids).sum()


def _with_norm(loss):
    def step(a, b, ids):
        value, gradients = jax.value_and_grad(loss, (0, 1))(a, b, ids)
        norm = jnp.sqrt(sum((g * g).sum() for g in gradients))
        return value, *(push(g / norm) for g in gradients)

    return step


def _plain(loss):
    def step(a, b, ids):
        value, gradients = jax.value_and_grad(loss, (0, 1))(a, b, ids)
        return value, *map(push, gradients)

    return step


def _split(step, ids):
    closed = jax.make_jaxpr(lambda a, b, ids: _updated(a, b, *step(a, b, ids)))(A, B, ids)
    jaxpr, constants = in_parts(closed.jaxpr, {}, {})
    assert not closed.consts
    return split_over_servers(
        jaxpr,
        [StepInput("state", 0, "a", 0), StepInput("state", 1, "b", 1), StepInput("data", 0)],
        [None, 0, 1],
        constants,
    )


def _updated(a, b, value, a_gradient, b_gradient):
    return value, a - a_gradient, b - b_gradient


def _evaluated(closed, values):
    return jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *values)


@pytest.mark.parametrize(
    "step",
    [
        *map(
            _plain,
            [
                _twice,
                _shared_ids,
                _converted,
                _normed_rows,
                _by_scan,
                _small_ids,
                _checkpointed,
                _vmapped,
            ],
        ),
        _with_norm(_shared_ids),
    ],
)
@pytest.mark.parametrize("ids", [IDS, OUT], ids=["in range", "out of range"])
def test_rows_give_what_whole_tables_give(step, ids):
    inputs = [A, B, ids]
    split = _split(step, ids)
    expected = _evaluated(split.worker, [inputs[i] for i in split.inputs])

    rows, refusals = rows_of(split, [0, 1])

    assert not refusals
    numbers = _evaluated(rows.ids, [inputs[i] for i in rows.ids_inputs])
    found = RowPlan("", [], rows.spaces, []).find(numbers)
    buffers = []
    for buffer in rows.buffers:
        ((table, start),) = buffer.parts
        assert start == 0
        capacity = rows.spaces[buffer.space].capacity
        assert capacity < 40
        own = np.full((capacity, *inputs[table].shape[1:]), 7, np.float32)
        own[: len(found[buffer.space].rows)] = inputs[table][found[buffer.space].rows]
        buffers.append(own)
    assert 0 not in rows.inputs
    positions = [position for own in found for position in own.positions]
    outs = _evaluated(rows.worker, [*(inputs[i] for i in rows.inputs), *buffers, *positions])
    np.testing.assert_allclose(outs[0], expected[0], rtol=1e-5)
    for i, (own, whole) in enumerate(zip(outs[1:], expected[1:], strict=True)):
        if i in rows.pushes:
            space, start = rows.pushes[i]
            dense = np.zeros_like(whole)
            dense[found[space].rows - start] = own[: len(found[space].rows)]
            own = dense
        np.testing.assert_allclose(own, whole, rtol=1e-5, atol=1e-6)
    assert 0 in rows.pushes


def _ftrl(w, z, n, g):
    new_n = n + g * g
    new_z = z + g - (jnp.sqrt(new_n) - jnp.sqrt(n)) * w
    return jnp.where(jnp.abs(new_z) > 0.1, -new_z / jnp.sqrt(new_n), 0.0), new_z, new_n


def _centered(w, z, n, g):
    return w - g / (1 + g.mean(axis=0)), z, n


@pytest.mark.parametrize(
    ("rule", "is_whole"),
    [
        (lambda w, z, n, g: (w - 0.1 * jnp.clip(g, -1, 1), z, n), False),
        (lambda w, z, n, g: (w - g * jax.lax.rsqrt(n + g**2), z, n + g**2), False),
        (lambda w, z, n, g: (jnp.where(g > 0, w, w), z, jnp.maximum(n, jnp.abs(g) * 0)), True),
        (lambda w, z, n, g: (w - jnp.tanh(g) * n, jnp.where(n > 0, z, z), n), False),
        (lambda w, z, n, g: (w - 0.1 * (g + 0.01 * w), z, n), True),
        (lambda w, z, n, g: (w - 0.1 * (0.9 * z + g), 0.9 * z + g, n), True),
        (lambda w, z, n, g: (jnp.clip(w - g, -1, 1), z, n), True),
        (lambda w, z, n, g: (w - g[::-1], z, n), True),
        (lambda w, z, n, g: (w - g, g, n), True),
        (_ftrl, True),
        (_centered, True),
    ],
)
def test_servers_update_rows_only_if_that_is_the_update(rule, is_whole):
    closed = jax.make_jaxpr(lambda w, z, n, g: rule(w, z, n, push(g)))(A, A, abs(A), A)
    jaxpr, constants = in_parts(closed.jaxpr, {}, {})
    inputs = [*(StepInput("state", i, name, 0) for i, name in enumerate("wzn"))]
    split = split_over_servers(jaxpr, [*inputs, StepInput("data", 0)], [0, 1, 2], constants)
    (part,) = split.servers.values()

    update = rows_of_update(part, {0: (0, 0)}, [100], "exact")

    (rows,) = update.rows
    assert rows.is_whole == is_whole
    if not is_whole:
        few = np.array([1, 5, 30])
        inputs = [[A, A, abs(A), A][i] for i in part.states] + [B[:, :1] * A]
        expected = update_of_whole = _evaluated(part.update, inputs)
        own = list(inputs)
        for i in (*rows.states, *(len(part.states) + i for i in rows.pushes)):
            own[i] = inputs[i][few]
        for i, value in enumerate(update.run(*own)):
            wanted = update_of_whole[i][few] if i in rows.outputs else expected[i]
            np.testing.assert_allclose(value, wanted, rtol=1e-6)
