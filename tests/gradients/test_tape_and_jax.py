"""A tape around and inside of control flow, jit, checkpoint and custom gradients of JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import distributary as dist
from distributary.errors import UnsupportedError

X = jnp.array([0.5, -1.0, 2.0])


def _equal(actual, expected, rtol=1e-5, name=""):
    compare = lambda a, e: np.testing.assert_allclose(a, e, rtol=rtol, err_msg=name)
    jax.tree.map(compare, actual, expected)


def _tape_of(function, v):
    """`function(v.value(), x)` and its gradient, by a tape."""

    def step(x):
        with dist.GradientTape() as tape:
            tape.watch(x)
            result = function(v.value(), x)
        return result, tape.gradient(result, [v, x])

    return step


@jax.custom_vjp
def _clipped_square(x):
    return x * x


_clipped_square.defvjp(lambda x: (x * x, x), lambda x, g: (jnp.clip(2 * x * g, -1.0, 1.0),))


@jax.custom_jvp
def _loud(x):
    return x * 3.0


@_loud.defjvp
def _loud_jvp(primals, tangents):
    return _loud(primals[0]), 100.0 * tangents[0]


def _scanned(v, x):
    def body(carry, row):
        return jnp.tanh(carry * v + row), carry

    last, all_of_them = lax.scan(body, v, x)
    return last + jnp.sum(all_of_them)


def _branching(v, x):
    return jnp.sum(lax.cond(v > 0, lambda a: a * v * v, lambda a: a + v, x))


def _counted_loop(v, x):
    return jnp.sum(lax.fori_loop(0, 3, lambda i, a: a * v, x))


def _solved(v, x):
    return jnp.sum(jnp.linalg.solve(jnp.eye(3) * v + jnp.outer(x, x), x))


FUNCTIONS = {
    "relu": lambda v, x: jnp.sum(jax.nn.relu(v * x) ** 2),
    "custom_vjp": lambda v, x: jnp.sum(_clipped_square(v * x)),
    "custom_jvp": lambda v, x: jnp.sum(_loud(v * x)),
    "checkpoint": lambda v, x: jnp.sum(jax.checkpoint(lambda a: jnp.sin(jnp.sin(a * v)))(x)),
    "checkpointed scan": lambda v, x: jax.checkpoint(_scanned)(v, x),
    "checkpointed cond": lambda v, x: jax.checkpoint(_branching)(v, x),
    "checkpointed jit": lambda v, x: jax.checkpoint(jax.jit(_scanned))(v, x),
    "jit": lambda v, x: jax.jit(lambda a, b: jnp.sum(jnp.exp(a * b)))(v, x),
    "linalg": _solved,
    "scan": _scanned,
    "cond": _branching,
    "fori_loop": _counted_loop,
}


def test_gradients_through_functions(run):
    v = run.variable(1.5)

    results = run(lambda x: {n: _tape_of(f, v)(x) for n, f in FUNCTIONS.items()}, X)

    for name, function in FUNCTIONS.items():
        value, gradients = results[name]
        expected = jax.jit(jax.value_and_grad(function, (0, 1)))(jnp.float32(1.5), X)
        _equal((value, tuple(gradients)), expected, name=name)


def test_second_order_through_functions(run):
    functions = [FUNCTIONS[name] for name in ("relu", "checkpointed scan", "cond")]
    v = run.variable(1.5)

    def second(function, x):
        with dist.GradientTape() as outer:
            with dist.GradientTape() as inner:
                result = function(v.value(), x)
            gradient = inner.gradient(result, v)
        return outer.gradient(gradient, v)

    results = run(lambda x: [second(function, x) for function in functions], X)

    expected = [jax.jit(jax.grad(jax.grad(f)))(jnp.float32(1.5), X) for f in functions]
    _equal(results, expected, rtol=1e-4)


# Variables read inside


def _read_in_scan(v, x):
    return lax.scan(lambda carry, row: (carry + v * row * row, None), 0.0, x)[0]


def _read_in_checkpoint(v, x):
    return jax.checkpoint(lambda a: jnp.sum(jnp.sin(a * v)))(x)


def _read_in_checkpointed_scan(v, x):
    return jax.checkpoint(lambda a: _read_in_scan(v, a) * v)(x)


_READS = {
    "scan": _read_in_scan,
    "vmap": lambda v, x: jnp.sum(jax.vmap(lambda a: a * v)(x)),
    "cond": lambda v, x: lax.cond(x[0] > 0, lambda: v * v, lambda: v + 1.0),
    "jit": lambda v, x: jax.jit(lambda a: jnp.sum(a * v) * v)(x),
    "checkpoint": _read_in_checkpoint,
    "checkpointed scan": _read_in_checkpointed_scan,
    "while": lambda v, x: (
        lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] + 2.0), (0, 0.0))[1] * v
    ),
}


def test_variables_read_inside(run):
    v = run.variable(1.5)

    def step(function, x):
        with dist.GradientTape() as tape:
            result = function(v, x)
        return result, tape.gradient(result, v)

    results = run(lambda x: {name: step(read, x) for name, read in _READS.items()}, X)

    for name, read in _READS.items():
        expected = jax.value_and_grad(read)(jnp.float32(1.5), X)
        _equal(results[name], expected, name=name)


def test_gradient_of_jax_where_a_variable_is_read_inside_of(run):
    functions = _read_in_checkpoint, _read_in_checkpointed_scan
    gradients = lambda v: lambda x: [jax.grad(lambda x: f(v, x))(x) for f in functions]  # noqa: B023

    actual = run(gradients(run.variable(1.5)), X)

    _equal(actual, gradients(jnp.float32(1.5))(X))


# Tapes opened and closed inside


def _with_tape(v, x):
    with dist.GradientTape() as tape:
        tape.watch(x)
        loss = jnp.sum(v * v * x)
    return tape.gradient(loss, v)


def test_tape_inside_control_flow_checkpoints_and_jits(run):
    v = run.variable(1.5)

    def step(x):
        once = lambda state: (state[0] + 1, state[1] + _with_tape(v, x))
        return (
            lax.scan(lambda total, row: (total + _with_tape(v, row), None), 0.0, x)[0],
            lax.while_loop(lambda state: state[0] < 3, once, (0, 0.0))[1],
            jax.checkpoint(lambda a: _with_tape(v, a))(x),
            [lax.cond(a[0] > 0, lambda: _with_tape(v, x), lambda: 0.0) for a in (x, -x)],
            jitted(x) + jitted(2 * x),
        )

    total, jitted = jnp.sum(3.0 * X), jax.jit(lambda a: _with_tape(v, a))
    _equal(run(step, X), (total, 3 * total, total, [total, 0.0], 3 * total))


def test_training_loop_inside_scan(run):
    v = run.variable(1.5)

    def step(x):
        def body(_, row):
            with dist.GradientTape() as tape:
                loss = (v * row - 1.0) ** 2
            v.assign_sub(0.1 * tape.gradient(loss, v))
            return None, loss

        return lax.scan(body, None, x)[1]

    def plain(v, row):
        loss, gradient = jax.value_and_grad(lambda v: (v * row - 1.0) ** 2)(v)
        return v - 0.1 * gradient, loss

    losses = run(step, X)
    last, expected = lax.scan(plain, jnp.float32(1.5), X)
    _equal((losses, v.value()), (expected, last))


def test_tape_inside_under_a_tape_outside(run):
    v = run.variable(2.0)
    ways = [
        lambda f, x: lax.scan(lambda total, row: (total + f(row), None), 0.0, x)[0],
        lambda f, x: lax.cond(x[1] < 0, lambda: f(jnp.sum(x)), lambda: 0.0),
        lambda f, x: jax.checkpoint(f)(jnp.sum(x)),
        lambda f, x: jax.jit(f)(jnp.sum(x)),
    ]

    def derivative(a):
        with dist.GradientTape() as tape:
            loss = v**3 * a
        return tape.gradient(loss, v)

    def step(x, inside):
        with dist.GradientTape() as tape:
            result = inside(derivative, x)
        return result, *tape.gradient(result, [v, x])

    results = run(lambda x: [step(x, inside) for inside in ways], X)

    _equal(results, [(12.0 * 1.5, 12.0 * 1.5, 12.0 * jnp.ones(3))] * 4)


def test_a_jit_with_a_tape_serves_several_steps(run):
    # JAX keeps the traced jit, with the number of its tape, and puts it into the second step.
    v, w = run.variable(1.5), run.variable(2.0)

    @jax.jit
    def inner(x):
        with dist.GradientTape() as tape:
            w.value()
            loss = jnp.sum(v * v * x)
        return [g for g in tape.gradient(loss, [v, w]) if g is not None]

    def step(x):
        with dist.GradientTape() as tape:
            first, second = inner(x), inner(2 * x)
            loss = (sum(first) + sum(second)) * w
        return first, second, *tape.gradient(loss, [v, w])

    total = jnp.sum(3.0 * X)
    _equal(run(lambda x: inner(x), X), [total])
    _equal(run(step, X), ([total], [2 * total], 3 * total / 1.5 * 2.0, 3 * total))


def _gradient_inside(inside):
    def step(v, x):
        with dist.GradientTape() as tape:
            loss = v * v
        return inside(lambda: tape.gradient(loss, v))

    return step, "the tape was opened outside of it"


def _gradient_while_a_later_tape_records(v, x):
    first, second = dist.GradientTape(), dist.GradientTape()
    first.__enter__()
    loss = v * v
    with second:
        first.__exit__(None, None, None)
        twice = first.gradient(loss, v) * v
    return second.gradient(twice, v)


_TRANSFORMED = r"inside a function transformed by jax\.vmap or"
_REFUSED = {
    "in a scan": _gradient_inside(lambda f: lax.scan(lambda c, _: (c, f()), 0.0, None, 2)[1]),
    "in a cond": _gradient_inside(lambda f: lax.cond(True, f, lambda: jnp.float32(0))),
    "in a jit": _gradient_inside(lambda f: jax.jit(f)()),
    "in a checkpoint": _gradient_inside(lambda f: jax.checkpoint(f)()),
    "in vmap": (lambda v, x: jax.vmap(lambda a: _with_tape(v, a))(x), _TRANSFORMED),
    "in grad": (lambda v, x: jax.grad(lambda a: _with_tape(v, a))(x[0]), _TRANSFORMED),
    "later tape": (
        _gradient_while_a_later_tape_records,
        "while a tape records that was opened later",
    ),
}


@pytest.mark.parametrize(("step", "message"), _REFUSED.values(), ids=_REFUSED)
def test_gradients_that_cannot_be_taken_are_refused(step, message, run):
    v = run.variable(1.5)

    with pytest.raises(UnsupportedError, match=message):
        run(lambda x: step(v, x), X)


# Assignments while a tape records


def test_assignment_inside_the_tape_takes_effect_once_and_has_no_gradient(place):
    v = place.variable(2.0)
    average = place.variable(10.0, trainable=False)
    count = place.variable(0.0, trainable=False)

    def step(x):
        with dist.GradientTape(persistent=True) as tape:
            mean = jnp.mean(v * x)
            average.assign(0.9 * average + 0.1 * mean)
            scale = count.assign_add(1.0)
            loss, scaled = mean**2 + average * v, scale * v**3
        return tape.gradient(loss, v), tape.gradient(scaled, v)

    mean, expected = 2.0 * jnp.mean(X), 10.0
    for turn in (1.0, 2.0):
        gradients = place(step, X)

        expected = 0.9 * expected + 0.1 * mean
        _equal((average.value(), count.value()), (expected, turn))
        _equal(gradients, (2 * mean * jnp.mean(X) + expected, turn * 12.0))


def test_assignment_inside_a_nested_function_of_the_tape(run):
    v, count = run.variable(2.0), run.variable(0.0, trainable=False)
    once = lambda f: lambda x: lax.scan(lambda c, _: (f(x), c), 0.0, None, 1)[0]

    def step(x, wrap):
        @wrap
        def layer(a):
            count.assign_add(jnp.sum(a) * v)
            return jnp.sum(jnp.sin(a * v))

        with dist.GradientTape() as tape:
            loss = layer(x)
        return tape.gradient(loss, v)

    gradients = run(lambda x: [step(x, wrap) for wrap in (jax.jit, jax.checkpoint, once)], X)

    _equal(gradients, [jnp.sum(X * jnp.cos(2.0 * X))] * 3)
    _equal(count.value(), 3 * 2.0 * jnp.sum(X))


def _assigned_in_cond(v, tape):
    lax.cond(v.value() > 0, lambda: [v.assign(v * 2.0), 0][1], lambda: 0)
    return v * v


def _assigned_in_scan(v, tape):
    def body(total, x):
        v.assign(v * 2.0)
        return total + v * x, None

    return lax.scan(body, 0.0, jnp.asarray([1.0, 10.0]))[0]


def _assigned_in_while(v, tape):
    def turn(state):
        i, total = state
        v.assign(v * 2.0)
        return i + 1, total + v * v

    return lax.while_loop(lambda state: state[0] < 2, turn, (0, 0.0))[1]


def _assigned_while_paused(v, tape):
    before = 3.0 * v
    with tape.stop_recording():
        v.assign(5.0)
    return before * v


_ASSIGNED = {
    "once": (lambda v, tape: [v.assign(v * 2.0), v * v][1], 8.0),
    "with reads before": (lambda v, tape: [3.0 * v, v.assign(5.0)][0] * v, 21.0),
    "in a cond": (_assigned_in_cond, 8.0),
    "in a scan": (_assigned_in_scan, 11.0),
    "in a while loop": (_assigned_in_while, 24.0),
    "while paused": (_assigned_while_paused, 21.0),
}


def test_reads_of_a_source_after_an_assignment_count_as_in_tensorflow(traced):
    variables = {name: traced.variable(2.0) for name in _ASSIGNED}

    cubed = traced.variable(2.0)

    def step(v, loss_of):
        with dist.GradientTape(persistent=True) as tape:
            loss = loss_of(v, tape)
            thrice = 3.0 * loss
        return tape.gradient(loss, v), tape.gradient(thrice, v)

    def second():
        with dist.GradientTape() as outer:
            with dist.GradientTape() as inner:
                cubed.assign(3.0)
                loss = cubed * cubed * cubed
            first = inner.gradient(loss, cubed)
        return first, outer.gradient(first, cubed)

    results, of_cubed = traced(
        lambda: ({name: step(variables[name], _ASSIGNED[name][0]) for name in variables}, second())
    )

    _equal(results, {name: (each, 3.0 * each) for name, (_, each) in _ASSIGNED.items()})
    _equal(of_cubed, (27.0, 18.0))


# Nothing is computed twice


def _loss(w1, b1, w2, x, y):
    hidden = jax.nn.relu(x @ w1 + b1)
    return jnp.mean((jnp.tanh(hidden @ w2) - y) ** 2)


@pytest.mark.parametrize(
    ("persistent", "order"), [(False, "together"), (True, "together"), (True, "one_by_one")]
)
def test_a_tape_costs_what_value_and_grad_costs_and_gives_the_same_bits(persistent, order):
    strategy = dist.OneDeviceStrategy("CPU:0")
    random = np.random.default_rng(0)
    shapes = [(16, 32), (32,), (32, 4)]
    arrays = [jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes]
    with strategy.scope():
        variables = [dist.Variable(array) for array in arrays]
    x = jnp.asarray(random.normal(size=(8, 16)), jnp.float32)
    y = jnp.asarray(random.normal(size=(8, 4)), jnp.float32)

    def step(x, y):
        with dist.GradientTape(persistent=persistent) as tape:
            loss = _loss(*(v.value() for v in variables), x, y)
        if order == "together":
            return loss, tuple(tape.gradient(loss, variables))
        return loss, tuple(tape.gradient(loss, v) for v in variables)

    ours = strategy.extended.lower(step, (x, y)).compile()
    plain = jax.jit(jax.value_and_grad(_loss, (0, 1, 2))).lower(*arrays, x, y).compile()
    result = strategy.run(step, (x, y))

    assert ours.cost_analysis()["flops"] == plain.cost_analysis()["flops"]
    jax.tree.map(np.testing.assert_array_equal, result, plain(*arrays, x, y))
