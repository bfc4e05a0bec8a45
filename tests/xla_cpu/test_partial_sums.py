"""Steps of a whole batch whose sums over rows are taken per device and added up together."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from distributary.jaxprs import (
    walk,
)
from distributary.xla_cpu import with_partial_sums

RNG = np.random.default_rng(0)


def _normal(*shape):
    return (RNG.standard_normal(shape) / 2).astype(np.float32)


def _trained(loss):
    return jax.value_and_grad(loss)


W, V, B = _normal(6, 8), _normal(8, 3), _normal(8)
TABLE = _normal(20, 6)
KERNEL = _normal(3, 3, 4, 8)
WIDE = _normal(3, 3, 32, 32)
RNN = {"x": _normal(6, 32), "h": _normal(8, 32), "b": _normal(32)}
ATTENTION = {name: _normal(8, 8) for name in "qkvo"}


def _x(rows, *shape):
    return _normal(rows, *(shape or (6,)))


def _mean(x):
    return jnp.mean(jnp.square(x))


def _mlp(w, x):
    return _mean(jnp.tanh(x @ w["w"] + w["b"]) @ w["v"])


def _convolved(kernel, x, padding="SAME"):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (1, 1), padding, dimension_numbers=numbers)


def _pooled(x, size=2):
    window = (1, size, size, 1)
    return lax.reduce_window(x, -jnp.inf, lax.max, window, window, "VALID")


def _conv(kernel, x):
    return _mean(_pooled(jax.nn.relu(_convolved(kernel, x))))


def _lstm(w, x):
    def turn(carry, x):
        h, c = carry
        i, f, g, o = jnp.split(x @ w["x"] + h @ w["h"] + w["b"], 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zeros = jnp.zeros((x.shape[0], 8))
    return _mean(lax.scan(turn, (zeros, zeros), jnp.swapaxes(x, 0, 1))[1])


def _attention(w, x):
    q, k, v = ((x @ w[n]).reshape(*x.shape[:2], 2, 4) for n in "qkv")
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    mixed = jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(x.shape)
    return _mean(_layernorm(x + mixed @ w["o"]))


def _layernorm(x):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(jnp.square(x - mean).mean(-1, keepdims=True) + 1e-3)


def _batchnorm(w, x):
    h = x @ w["w"]
    mean, var = h.mean(0), h.var(0)
    return _mean(jnp.sin((h - mean) * lax.rsqrt(var + 1e-3) * w["b"]))


def _embedding(table, ids, x):
    return _mean(jnp.tanh(table[ids] * x[:, None, :]))


def _cond_of_rows(w, x):
    return lax.cond(jnp.sum(x) > 0, lambda: _mlp(w, x), lambda: 2 * _mlp(w, -x))


def _blocks(w, x):
    @jax.checkpoint
    def block(w, x):
        return jnp.tanh(jnp.tanh(x @ w["w"] + w["b"]) @ w["w"].T)

    for _ in range(3):
        x = block(w, x)
    return _mean(x)


def _half(w, x):
    low = functools.partial(jnp.asarray, dtype=jnp.bfloat16)
    h = jnp.tanh(low(x) @ low(w["w"]) + low(w["b"]))
    return _mean((h @ low(w["v"])).astype(jnp.float32))


def _cancelling(w, x):
    """Sums of 16 bits of which the parts are large and the whole is small."""
    large = jnp.where(jnp.arange(x.shape[0]) < x.shape[0] // 2, 300.0, -300.0)[:, None]
    low = (x + large + jnp.sum(w)).astype(jnp.bfloat16)
    ones = jnp.ones((x.shape[0], 2), jnp.bfloat16)
    return (low.T @ ones).T.astype(jnp.float32), lax.reduce_sum(low, (0,))


def _mixed_rows(w, x):
    h = jnp.tanh(x @ w).T.reshape(-1, 4)
    return _mean(h @ h.T[:, :3])


def _weighted(w, x, weights):
    rows = jnp.square(jnp.tanh(x @ w)).sum(-1)
    return jnp.sum(rows * weights) / jnp.maximum(jnp.sum(weights), 1e-3)


def _while_loop(w, x):
    def body(carry):
        i, w, total = carry
        loss, g = jax.value_and_grad(lambda w: _mean(jnp.tanh(x @ w)))(w)
        return i + 1, w - 0.1 * g, total + loss

    return lax.while_loop(lambda carry: carry[0] < 3, body, (0, w, 0.0))


def _accumulated(w, x):
    """Gradients of several parts of the batch are added up in a loop."""

    def turn(total, factor):
        g = jax.grad(lambda w: _mean(jnp.tanh(x @ w) * factor))(w)
        return total + g, jnp.max(total)

    def unread(total, factor):
        return turn(total, factor)[0], factor

    start = jnp.full(w.shape, 0.5)
    factors = jnp.arange(1.0, 4.0)
    return lax.scan(turn, start, factors), lax.scan(unread, start, factors)


def _steps(w, x):
    """Steps one after the other; `x` is [steps, batch, time, features]."""

    def step(carry, x):
        w, total = carry
        loss, g = jax.value_and_grad(_lstm)(w, x)
        return (jax.tree.map(lambda w, g: w - 0.1 * g, w, g), total + loss), loss

    return lax.scan(step, (w, 0.0), x)


def _counts(x, y):
    hits = (jnp.argmax(x, 1) == y % 6).astype(jnp.int32)
    per_class = jnp.zeros(6, jnp.int32).at[y % 6].add(1)
    low = jnp.sum(y.astype(jnp.int8), dtype=jnp.int8)
    return hits.sum(), hits.sum() // 2, per_class, -per_class * 3, low, (y > 2).sum() / y.size


def _orders(x):
    return jnp.sort(x, 0), jnp.cumsum(x, 0), jnp.median(x, 0), jnp.argsort(x[:, 0]), x[::-1]


def _various(x, y):
    low, high = lax.top_k(x, 2)
    pads = jnp.pad(x, ((1, 2), (0, 1)), constant_values=3.0)
    return (
        jnp.stack([x, 2 * x], 1).sum(0),
        jnp.concatenate([x, x[:2]]).sum(0),
        lax.dynamic_slice_in_dim(x, y[0] % 2, 2, 0).sum(0),
        lax.dynamic_update_slice(x, x[:2] * 5, (1, 0)).sum(0),
        pads.sum(0),
        low.sum(0),
        high.sum(),
        x.at[y % 2].multiply(2.0).sum(0),
        x.at[jnp.arange(x.shape[0]), y % 6].add(1.5).sum(0),
        x.max(0) - x.min(0) + x.prod(0),
        jnp.where(y[:, None] > 3, x, 0).sum(0, keepdims=True),
        jnp.sum(x) / jnp.float32(0),
        jnp.sum(x) * jnp.inf,
        jnp.einsum("bi,bj->ij", x, x).reshape(-1)[2:30:3].sum(),
        jnp.concatenate([x.sum(0), (x * x).sum(0)])[3:9],
        jax.random.uniform(jax.random.key(0), x.shape).sum(0) * x.sum(0),
        (x + jax.random.normal(jax.random.key(1), x.shape)).sum(0),
        lax.cummax(x, 1).sum(0),
        x.reshape(-1).sum(),
        x.reshape(1, -1, 3).sum(1),
        jnp.zeros((9, 6)).at[y % 9].add(x),
        jnp.ones((9, 6)).at[:, y % 6].add(1.0),
        jnp.sum(x.astype(jnp.bfloat16), 0),
        jnp.sum(x.astype(jnp.bfloat16).T @ x.astype(jnp.bfloat16), 0) * 2,
        jnp.linalg.solve(x.T @ x + jnp.eye(6), x.sum(0)),
        jnp.vdot(x[:, 0] + 1j, x[:, 1] + 2j),
        jax.vmap(lambda row: jnp.outer(row, row))(x).sum(0),
    )


_DENSE = {"w": W, "b": B, "v": V}
STEPS = {
    "dense": (_trained(_mlp), [_DENSE], [_x]),
    "convolution": (_trained(_conv), [KERNEL], [lambda n: _x(n, 8, 8, 4)]),
    "lstm": (_trained(_lstm), [RNN], [lambda n: _x(n, 5, 6)]),
    "attention": (_trained(_attention), [ATTENTION], [lambda n: _x(n, 5, 8)]),
    "batchnorm": (_trained(_batchnorm), [_DENSE], [_x]),
    "embedding": (_trained(_embedding), [TABLE], [lambda n: RNG.integers(0, 20, (n, 4)), _x]),
    "cond_of_rows": (_trained(_cond_of_rows), [_DENSE], [_x]),
    "checkpoint": (_trained(_blocks), [_DENSE], [_x]),
    "bfloat16": (_trained(_half), [_DENSE], [_x]),
    "mixed_rows": (_trained(_mixed_rows), [W], [lambda n: _x(n, 4, 6)]),
    "weighted": (_trained(_weighted), [W], [_x, lambda n: np.abs(_normal(n))]),
    "while": (_while_loop, [W], [_x]),
    "accumulated": (_accumulated, [W], [_x]),
    "counts": (_counts, [], [_x, "ids"]),
    "orders": (_orders, [], [_x]),
    "various": (_various, [], [_x, "ids"]),
    "steps": (_steps, [RNN], [lambda n: _normal(3, n, 4, 6)]),
}


def _case(name, num_rows):
    step, params, data = STEPS[name]
    arrays = [
        RNG.integers(0, 12, num_rows).astype(np.int32) if make == "ids" else make(num_rows)
        for make in data
    ]
    leaves, tree = jax.tree.flatten((*params, *arrays))
    num_params = len(jax.tree.leaves(params))
    of_rows = 1 if name == "steps" else 0
    dims = [None if i < num_params else of_rows for i in range(len(leaves))]
    return (lambda *flat: step(*jax.tree.unflatten(tree, flat))), leaves, dims


def _mesh(num_replicas):
    return Mesh(np.array(jax.devices()[:num_replicas]), ("replica",))


def _compiled(step, args, dims, mesh):
    program, args = _lowered(step, args, dims, mesh)
    return program.compile(), args


def _lowered(step, args, dims, mesh):
    """The program of a step; rows that do not divide are padded and cut off inside."""

    def padded(x, dim):
        if dim is None:
            return x
        widths = [(0, -n % mesh.size if i == dim else 0) for i, n in enumerate(x.shape)]
        return np.pad(x, widths, constant_values=9)

    def cut(*args):
        own = [
            x if dim is None else lax.slice_in_dim(x, 0, given.shape[dim], axis=dim)
            for x, given, dim in zip(args, given_args, dims, strict=True)
        ]
        return step(*own)

    given_args = args
    shardings = [
        NamedSharding(mesh, P() if dim is None else P(*[None] * dim, "replica")) for dim in dims
    ]
    args = list(map(jax.device_put, map(padded, args, dims), shardings))
    return jax.jit(cut, in_shardings=shardings).lower(*args), args


def _check(step, args, dims, mesh, rtol=2e-5):
    passed = with_partial_sums(step, dims, mesh)
    expected = jax.jit(step)(*args)
    program, given = _compiled(passed, args, dims, mesh)
    actual = program(*given)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        if jnp.issubdtype(other.dtype, jnp.inexact):
            is_half = other.dtype == jnp.bfloat16
            one, other = np.asarray(one, np.complex64), np.asarray(other, np.complex64)
            rtol = 1e-2 if is_half else rtol
            finite = np.abs(other[np.isfinite(other)])
            scale = max(finite.max(initial=0), 1e-3)
            np.testing.assert_allclose(one, other, rtol=rtol, atol=rtol * scale)
        else:
            np.testing.assert_array_equal(one, other)
    return program


def _collectives(program):
    names = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
    text = program.as_text()
    return {name: text.count(f" {name}(") for name in names if f" {name}(" in text}


# XLA by itself adds up the kernels of an LSTM in every turn of its loop.
_NUM_SUMS = {
    **dict.fromkeys(("dense", "attention", "convolution", "embedding", "lstm", "checkpoint"), 1),
    "bfloat16": 1,
    "steps": 2,  # in every step, and of the losses after it
    "batchnorm": 5,  # two statistics that need each other, and their gradients
}


@pytest.mark.parametrize("name", STEPS)
def test_results_are_those_of_one_device_and_sums_are_added_up_together(name):
    step, args, dims = _case(name, 8)

    program = _check(step, args, dims, _mesh(2), 1e-2 if name == "bfloat16" else 2e-5)

    if name in _NUM_SUMS:
        assert _collectives(program) == {"all-reduce": _NUM_SUMS[name]}


@pytest.mark.parametrize(
    ("name", "num_rows"),
    [
        # Some devices have no row.
        *[(name, 3) for name in ("convolution", "embedding", "weighted", "counts", "various")],
        ("orders", 6),  # the last ones have fewer
    ],
)
def test_rows_that_do_not_divide_count_once(name, num_rows):
    step, args, dims = _case(name, num_rows)

    _check(step, args, dims, _mesh(4))


def test_sums_of_16_bits_are_rounded_once():
    step, args, dims = lambda x: _cancelling(jnp.zeros(()), x), [_x(64) * 16], [0]
    low = np.where(np.arange(64) < 32, 300.0, -300.0)[:, None] + args[0]
    expected = np.asarray(jnp.asarray(low, jnp.bfloat16), np.float64).sum(0)

    program, arrays = _lowered(with_partial_sums(step, dims, _mesh(2)), args, dims, _mesh(2))
    # Without this, XLA keeps more bits inside of a program, and hides where it rounds.
    exact = program.compile(compiler_options={"xla_allow_excess_precision": False})
    of_product, total = exact(*arrays)

    np.testing.assert_allclose(of_product, [expected, expected], rtol=1e-2)
    np.testing.assert_allclose(np.float64(total), expected, rtol=1e-2)


def test_loops_add_up_only_what_they_add_to():
    def step(w, x):
        def turn(carry, factor):
            total, unread, read = carry
            g = jax.grad(lambda w: _mean(jnp.tanh(x @ w) * factor))(w)
            return (total + g, unread, -read), jnp.sum(read)

        return lax.scan(turn, (jnp.zeros(w.shape), w, w), jnp.arange(3.0))

    _, inside = _names(with_partial_sums(step, [None, 0], _mesh(2)), [W, _x(8)])

    assert inside.count("psum") == 1


def _names(step, args):
    """The operations inside of each `shard_map`, and those outside."""
    outside, inside = [], []
    for eqn in jax.make_jaxpr(step)(*args).jaxpr.eqns:
        body = eqn.params.get("jaxpr") if eqn.primitive.name == "shard_map" else None
        found = [eqn] if body is None else walk(body.eqns)
        (outside if body is None else inside).extend(one.primitive.name for one in found)
    return outside, inside


def _pooled_large(kernel, x):
    return _mean(_pooled(jnp.sin(_convolved(kernel, x, "VALID"))))


@pytest.mark.parametrize("is_on", [True, False])
def test_what_each_device_computes_is_rewritten(is_on, monkeypatch):
    if not is_on:
        monkeypatch.setenv("DISTRIBUTARY_CPU_REWRITES", "0")
    args, dims = [WIDE, _x(8, 17, 17, 32)], [None, 0]
    step = with_partial_sums(_trained(_pooled_large), dims, _mesh(2))

    outside, inside = _names(step, args)

    assert ("select_and_scatter_add" in outside) is not is_on
    assert ("conv_general_dilated" in outside) is not is_on
    assert "select_and_scatter_add" not in inside
    assert ("slice" in inside) is is_on


def test_effects_stay_in_order():
    def step(w, x):
        total = jnp.sum(jnp.tanh(x @ w))
        jax.debug.callback(lambda x: None, jnp.sin(total))
        jax.debug.callback(lambda x: None, x)
        return w + total

    def ndims(step):
        eqns = walk(jax.make_jaxpr(step)(W, _x(8)).jaxpr.eqns)
        return [
            len(eqn.invars[0].aval.shape) for eqn in eqns if eqn.primitive.name == "debug_callback"
        ]

    assert ndims(with_partial_sums(step, [None, 0], _mesh(2))) == ndims(step) == [0, 2]


def test_checkpoints_compute_once_more():
    step, args, dims = _case("checkpoint", 8)

    def num_products(step):
        program, _ = _compiled(step, args, dims, _mesh(2))
        return program.as_text().count(" tanh(")

    assert num_products(with_partial_sums(step, dims, _mesh(2))) == num_products(step)
