"""The program of one replica, cut where the replicas stop to differ."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

from distributary.errors import UnsupportedError
from distributary.programs import cut, cut_around_mesh
from distributary.tracing import walk

N = 4
VARYING = {0}  # inputs of the programs below
W = np.linspace(-1, 1, 3).astype(np.float32)
M = np.full(3, 0.5, np.float32)
X = np.arange(3, dtype=np.float32)
STEP = np.float32(0)
TABLE = np.arange(3, dtype=np.float32)


def _primitives(closed):
    return {eqn.primitive.name for eqn in walk(closed.jaxpr.eqns)}


def _cut(function, *args):
    closed = jax.make_jaxpr(function, axis_env=[("replica", N)])(*args)
    return cut(closed.jaxpr, [i in VARYING for i in range(len(args))], N)


def _new_collective(name_of_axes):
    """A collective that only a later JAX has."""
    primitive = jax.extend.core.Primitive("rotate_halves")
    primitive.def_abstract_eval(lambda x, **params: x)
    return lambda x: primitive.bind(x, **{name_of_axes: ("replica",)})


@pytest.mark.parametrize(
    ("name_of_axes", "where"), [("axes", "step"), ("axis_name", "scan"), ("axis", "cond")]
)
def test_a_collective_that_is_not_known_is_refused(name_of_axes, where):
    collective = _new_collective(name_of_axes)
    functions = {
        "step": collective,
        "scan": lambda w: lax.scan(lambda w, _: (collective(w), None), w, length=2)[0],
        "cond": lambda w: lax.cond(w.sum() > 0, collective, lambda w: w, w),
    }

    with pytest.raises(UnsupportedError, match=r"'rotate_halves' at .*test_stages\.py:\d+"):
        _cut(lambda x, w: functions[where](w), X, W)
    with pytest.raises(UnsupportedError, match="'rotate_halves'"):
        _cut(lambda x, w: functions[where](x), X, W)  # replicas differ before


def _evaluate(stages, num_outs, args):
    """Both stages, the first on replicas that `jax.vmap` makes; arguments that vary are stacked."""
    values = [args[i] for i in stages.replica_inputs]
    axes = [0 if i in VARYING else None for i in stages.replica_inputs]
    run = lambda *own: jax.core.eval_jaxpr(stages.replica.jaxpr, stages.replica.consts, *own)
    outs = jax.vmap(run, in_axes=axes, axis_name="replica", axis_size=N)(*values)
    taken = [out[0] for out in outs[len(stages.replica_outputs) :]]
    results = [None] * num_outs
    for i, out in zip(stages.replica_outputs, outs, strict=False):
        results[i] = out
    rest = jax.core.eval_jaxpr(
        stages.update.jaxpr, stages.update.consts, *(args[i] for i in stages.update_inputs), *taken
    )
    for i, out in zip(stages.update_outputs, rest, strict=True):
        results[i] = jnp.broadcast_to(out, (N, *out.shape))
    return results


def _momentum(gradient, w, m, rate):
    m = 0.9 * m + jnp.sin(gradient)
    return w - rate * m, m


def _plain(x, w, m, step):
    loss, gradient = jax.value_and_grad(lambda w: ((x * w) ** 2).sum())(w)
    new = _momentum(lax.psum(gradient, "replica"), w, m, 1 / (1 + jnp.exp2(step)))
    return [loss, *new, step + 1]


def _jitted(x, w, m, step):
    # A function of both stages, called twice, with a constant and an argument it passes on.
    @jax.jit
    def inner(x, w, m, step):
        table = jnp.asarray(TABLE)
        gradient = lax.psum(2 * x * x * w + table, "replica")
        return (x * w).sum(), *_momentum(gradient, w, m, 1.0), step

    loss, w, m, step = inner(x, w, m, step)
    loss, w, m, step = inner(x + loss, w, m, step)
    return [loss, w, m, step + 1]


def _cond(x, w, m, step):
    gradient = lax.psum(x * w, "replica")
    finite = jnp.isfinite(gradient).all()
    w, m = lax.cond(finite, lambda: _momentum(gradient, w, m, 1.0), lambda: (w, m))
    return [x.sum(), w, m, step + 1]


@pytest.mark.parametrize("function", [_plain, _jitted, _cond])
def test_the_stages_compute_what_the_whole_program_computes(function):
    stages = _cut(function, X, W, M, STEP)
    x = np.stack([X + i for i in range(N)])
    expected = jax.vmap(function, in_axes=(0, None, None, None), axis_name="replica", out_axes=0)(
        x, W, M, STEP
    )
    results = _evaluate(stages, 4, [x, W, M, STEP])
    assert "sin" in _primitives(stages.update)  # also of functions that belong to both stages
    for result, value in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, np.broadcast_to(value, result.shape), rtol=1e-6)


def test_a_program_of_global_arrays_is_cut_after_its_last_part_on_a_mesh():
    mesh = Mesh(np.array(jax.devices()[:N]), ("replica",))

    def total(x, w):
        body = lambda x, w: lax.psum((x * w).sum(), "replica")
        return jax.shard_map(body, mesh=mesh, in_specs=(P("replica"), P()), out_specs=P())(x, w)

    def program(x, w, m, step):
        first = total(jnp.tanh(x), w)
        m = jnp.sin(m) + first * TABLE
        second = total(x, jnp.exp2(w))
        return second, m, w - m * second, step + 1, jnp.abs(x)

    x = np.ones((N, 3), np.float32)
    closed = jax.make_jaxpr(program)(x, W, M, STEP)
    stages = cut_around_mesh(closed, [True, False, False, False])

    assert {"tanh", "shard_map", "exp2", "abs"} <= _primitives(stages.replica)
    assert {"sin", "sub"} <= _primitives(stages.update)
    values = [*closed.consts, x, W, M, STEP]
    made = jax.core.eval_jaxpr(
        stages.replica.jaxpr, stages.replica.consts, *(values[i] for i in stages.replica_inputs)
    )
    results = stages.complete(values, made)
    for i, expected in enumerate(program(x, W, M, STEP)):
        np.testing.assert_allclose(results[i], expected, rtol=1e-6)
