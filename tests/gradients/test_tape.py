import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist
from distributary.errors import ContextError, InvalidTypeError, InvalidValueError, UnsupportedError

X = jnp.array([1.0, 2.0, 3.0])


def _equal(actual, expected, name=""):
    def compare(a, e):
        assert (a is None) == (e is None), name
        if e is not None:
            np.testing.assert_allclose(a, e, rtol=1e-6, err_msg=name)

    jax.tree.map(compare, actual, expected, is_leaf=lambda x: x is None)


# A step gets variables v = 2, w = 3 and u = [1, 2, 3], f = 5, which is not trainable, and
# x = [1, 2, 3]. In a place, all steps are in one program.

CONSTANT = jnp.array([3.0, 4.0])
STEPS = {}


def _gives(*expected):
    """Adds a step to the table, with the gradients that it returns."""

    def add(step):
        STEPS[step.__name__.strip("_")] = step, list(expected)
        return step

    return add


@_gives(3 * X**2, 2 * CONSTANT)
def _watched_arguments_and_constants(v, w, u, f, x):
    with dist.GradientTape() as tape:
        tape.watch([x, CONSTANT])
        loss = jnp.sum(x**3) + jnp.sum(CONSTANT**2)
    return tape.gradient(loss, [x, CONSTANT])


@_gives(2 * 6 * X * 3, 2 * 6 * X, jnp.sum(2 * 6 * X * 2 * X))
def _values_computed_before_and_inside_the_tape(v, w, u, f, x):
    before = x * 2.0
    with dist.GradientTape() as tape:
        inside = before * w
        loss = jnp.sum(inside**2)
    return tape.gradient(loss, [before, inside, w])


@_gives(14.0, 6 * X, 14.0, 6 * X)
def _one_source_given_twice(v, w, u, f, x):
    with dist.GradientTape() as tape:
        loss = jnp.sum(w * x * x)
    return tape.gradient(loss, [w, x, w, x])


@_gives(6.0 + 6.0 + 1.0, jnp.full(3, 3.0))
def _several_targets_add_up(v, w, u, f, x):
    with dist.GradientTape() as tape:
        targets = {"a": w * x, "b": (w * w, w.value(), 2.0)}
    return tape.gradient(targets, [w, x])


@_gives(18.0, 1.0 + jnp.full(3, 3.0))
def _targets_from_before_and_after_the_tape_count_as_constants(v, w, u, f, x):
    before = x * w
    with dist.GradientTape() as tape:
        inside = before * w
    after = inside * w
    return tape.gradient([before, after, inside, w.value()], [w, before])


# As with TensorFlow 2.21.
@_gives(1.0, None, 5.0, 2.0, 8.0, 2.0)
def _a_variable_as_a_target_depends_on_itself_alone(v, w, u, f, x):
    with dist.GradientTape(persistent=True) as tape:
        product = v * w
    return [
        *tape.gradient(v, [v, w]),
        *tape.gradient([product, v, v], [v, w]),
        *tape.gradient([v, product], [v, w], output_gradients=[jnp.float32(5.0), None]),
    ]


@_gives({"v": 12.0, "rest": (4.0, [12.0])})
def _sources_may_be_any_nest(v, w, u, f, x):
    with dist.GradientTape() as tape:
        loss = v * v * w
    return [tape.gradient(loss, {"v": v, "rest": (w, [v])})]


@_gives(14.0 + 4.0)
def _output_gradients_weight_the_targets(v, w, u, f, x):
    with dist.GradientTape() as tape:
        first, second = v * x, v * v
    return tape.gradient([first, second], [v], output_gradients=[x, None])


@_gives(4.0, None, None, None, None, None)
def _unconnected_sources_are_none(v, w, u, f, x):
    with dist.GradientTape() as tape:
        loss = v * v
        tape.watch(w)
        w * 2.0
    return tape.gradient(loss, [v, w, u, x, jnp.ones(3), 2.0])


@_gives(2.0)
def _python_code_sees_whether_a_gradient_is_none(v, w, u, f, x):
    with dist.GradientTape() as tape:
        w.value()
        loss = v * v
    gradients = zip(tape.gradient(loss, [v, w]), [v, w], strict=True)
    return [g * 0 + source.value() for g, source in gradients if g is not None]


@_gives(4.0, jnp.zeros(3), jnp.zeros(3), 4.0, 0.0)
def _unconnected_gradients_as_zeros(v, w, u, f, x):
    with dist.GradientTape(persistent=True) as tape:
        loss = v * v
    zero = dist.UnconnectedGradients.ZERO
    return [
        *tape.gradient(loss, [v, u, x], unconnected_gradients="zero"),
        *tape.gradient(loss, [v, w], unconnected_gradients=zero),
    ]


@_gives(None, 6.0, None)
def _stop_gradient_and_rounding_disconnect(v, w, u, f, x):
    with dist.GradientTape(persistent=True) as tape:
        loss = jax.lax.stop_gradient(v * w) * w
        rounded = v.value().astype(jnp.int32).astype(jnp.float32)
    return [*tape.gradient(loss, [v, w]), tape.gradient(rounded, v)]


# Operations that give back the array that they take.
@_gives(X, 3.0, 2.0, 2 * X + 2)
def _a_value_and_itself_without_gradients(v, w, u, f, x):
    with dist.GradientTape(persistent=True) as tape:
        tape.watch(x)
        square = jnp.sum(jax.lax.stop_gradient(x) * x)
        product = v * w
        rounded = product + jax.lax.stop_gradient(jnp.round(product) - product)
        same, other = jax.jit(lambda a, b: (a, jax.lax.stop_gradient(b)))(x, x)
        both = jnp.sum(same * x + other * x + 2.0 * jax.lax.optimization_barrier(x) - other)
    return [
        tape.gradient(square, x),
        *tape.gradient(rounded, [v, w]),
        tape.gradient(both, x) - x,
    ]


@_gives(None, 4.0)
def _a_target_computed_after_the_tape_closed_is_not_connected(v, w, u, f, x):
    with dist.GradientTape(persistent=True) as tape:
        inside = v * v
    after = inside * v
    return [tape.gradient(after, v), tape.gradient(inside, v)]


@_gives(None, 10.0, 3.0, None)
def _variables_that_are_not_trainable_or_accessed_must_be_watched(v, w, u, f, x):
    with dist.GradientTape() as tape:
        square = f * f
    with dist.GradientTape() as watching:
        watching.watch(f)
        watched = f * f
    with dist.GradientTape(watch_accessed_variables=False) as choosing:
        choosing.watch([v])
        loss = v * w
    return [
        tape.gradient(square, f),
        watching.gradient(watched, f),
        *choosing.gradient(loss, [v, w]),
    ]


@_gives(32.0, 48.0, 48.0)
def _third_order(v, w, u, f, x):
    with dist.GradientTape() as a:
        with dist.GradientTape() as b:
            with dist.GradientTape() as c:
                loss = v**4
            first = c.gradient(loss, v)
        second = b.gradient(first, v)
    return [first, second, a.gradient(second, v)]


def _penalized(score, gradient):
    return score + 10.0 * (jnp.sqrt(jnp.sum(gradient**2)) - 1.0) ** 2


def _plain_penalized(u):
    return _penalized(*jax.value_and_grad(lambda x: jnp.sum(jnp.tanh(u * x)))(X / 4))


@_gives(*jax.value_and_grad(_plain_penalized)(X))
def _gradient_penalty(v, w, u, f, x):
    x = x / 4
    with dist.GradientTape() as outer:
        with dist.GradientTape() as inner:
            inner.watch(x)
            score = jnp.sum(jnp.tanh(u * x))
        loss = _penalized(score, inner.gradient(score, x))
    return [loss, outer.gradient(loss, u)]


@_gives(36.0, 8.0, 3.0, 12.0)
def _inner_tape_differentiated_after_the_outer(v, w, u, f, x):
    with dist.GradientTape() as outer:
        with dist.GradientTape() as inner:
            cube = v**3
        loss = cube * w
    return [*outer.gradient(loss, [v, w, cube]), inner.gradient(cube, v)]


# The first tape has not seen how `fourth` came about; the second has not seen `square` made.
@_gives(None, 16.0, 4.0)
def _tapes_that_close_in_another_order(v, w, u, f, x):
    first, second = dist.GradientTape(), dist.GradientTape()
    first.__enter__()
    square = v * v
    second.__enter__()
    cube = square * v
    first.__exit__(None, None, None)
    fourth = cube * v
    second.__exit__(None, None, None)
    return [first.gradient(fourth, v), *second.gradient(fourth, [v, square])]


@_gives(36.0, 12.0, 3.0, 2.0, 26.0)
def _persistent_tape_gives_gradients_of_several_targets(v, w, u, f, x):
    with dist.GradientTape(persistent=True) as tape:
        a = v * w
        b = a * a
    return [*tape.gradient(b, [v, a]), *tape.gradient(a, [v, w]), tape.gradient([a, b], w)]


@_gives(12.0, 36.0, 12.0, 12.0)
def _persistent_tape_records_a_gradient_taken_inside_the_block(v, w, u, f, x):
    with dist.GradientTape(persistent=True) as tape:
        cube = v**3
        first = tape.gradient(cube, v)
        loss = first * w
    return [first, *tape.gradient(loss, [v, w]), tape.gradient(cube, v)]


@_gives(4.0, 8.0)
def _first_gradient_inside_a_block_ends_a_tape_that_is_not_persistent(v, w, u, f, x):
    with dist.GradientTape() as outer, dist.GradientTape() as inner:
        square = v * v
        first = inner.gradient(square, v)
        loss = first * v
    return [first, outer.gradient(loss, v)]


@_gives(2.0 * 6.0 * 3.0, 4.0 * 6.0, 18.0, 12.0, None)
def _stop_recording_makes_constants(v, w, u, f, x):
    with dist.GradientTape(persistent=True) as tape:
        recorded = v * 2.0
        with tape.stop_recording():
            constant = v * w
        loss = recorded * constant * w
        hidden = constant * 3.0
    return [*tape.gradient(loss, [v, w, recorded, constant]), tape.gradient(hidden, v)]


@_gives(4.0, 16.0, 4.0)
def _gradient_inside_stop_recording_is_a_constant(v, w, u, f, x):
    with dist.GradientTape(persistent=True) as tape:
        square = v * v
        with tape.stop_recording():
            first = tape.gradient(square, v)
        loss = square * first
    with dist.GradientTape() as ended:
        square = v * v
        with ended.stop_recording():
            last = ended.gradient(square, v)
        v * 2.0
    return [first, tape.gradient(loss, v), last]


@_gives(None, 6.0)
def _reset_forgets(v, w, u, f, x):
    with dist.GradientTape() as tape:
        before = v * w
        tape.reset()
        loss = before * w
    return tape.gradient(loss, [v, w])


def test_gradients_are_those_of_tensorflow(place):
    variables = [place.variable(value) for value in (2.0, 3.0, [1.0, 2.0, 3.0])]
    frozen = place.variable(5.0, trainable=False)

    def all_steps(x):
        return {name: step(*variables, frozen, x) for name, (step, _) in STEPS.items()}

    results = place(all_steps, X)

    for name, (_, expected) in STEPS.items():
        _equal(results[name], expected, name)


def test_watched_variables_lists_what_was_read(place):
    v, w = place.variable(2.0, name="v"), place.variable(3.0, name="w")
    frozen = place.variable(1.0, trainable=False)
    seen = []

    def step():
        with dist.GradientTape() as tape:
            loss = v * frozen * v
        seen.append([variable.name for variable in tape.watched_variables()])
        return loss + w

    place(step)

    assert seen == [["v:0"]]


def test_watched_variables_of_a_jit_that_jax_had_cached(traced):
    v = traced.variable(2.0)
    forward = jax.jit(lambda x: jnp.sum(v * x))
    traced(lambda x: forward(x), X)

    def step(x):
        before = forward(x)
        with dist.GradientTape() as tape:
            loss = forward(x) * before
        return tape.gradient(loss, tape.watched_variables())

    assert traced(step, X) == (6.0 * 12.0,)


def test_many_gradients_inside_a_persistent_tape_are_traced_in_linear_time(run):
    # Each gradient that evaluated all earlier ones again would take 2**20 evaluations.
    v = run.variable(1.0)

    def step():
        with dist.GradientTape(persistent=True) as tape:
            powers = [v**i for i in range(1, 21)]
            gradients = [tape.gradient(power, v) for power in powers]
        return gradients

    _equal(run(step), [float(i) for i in range(1, 21)])


def test_integers_have_no_gradient_and_a_warning_says_so(run, caplog):
    v, n = run.variable(2.0), run.variable(3)

    def step():
        count = jnp.int32(5) + n.value()
        with dist.GradientTape(persistent=True) as tape:
            tape.watch([count, n])
            square, rounded = count * count, v.value().astype(jnp.int32)
            scaled = v * count.astype(jnp.float32)
        return (
            tape.gradient(square, count),
            tape.gradient(rounded, [v, n], unconnected_gradients="zero"),
            tape.gradient([rounded, scaled], [count, v]),
            tape.gradient(scaled, [count, v]),
            tape.jacobian(rounded, v),
        )

    # As with TensorFlow 2.21.
    _equal(run(step), (None, [0.0, 0], [None, 8.0], [None, 8.0], None))
    for role in ("watched value", "target", "source"):
        assert f"the {role} has dtype int32, so its gradient is None" in caplog.text


# Misuse


def test_inside_a_raw_jit_the_tape_says_where_it_works():
    @jax.jit
    def step(x):
        with dist.GradientTape():
            return x

    with pytest.raises(ContextError, match=r"raw jax\.jit.*distributary\.function"):
        step(1.0)


def _closed():
    with dist.GradientTape() as tape:
        pass
    return tape


def _enter(context):
    with context:
        pass


def _stopped_beside_another(v):
    with dist.GradientTape() as tape, tape.stop_recording():
        return v * 2.0


_MISUSES = {
    "second gradient": (
        lambda tape, loss, v: (tape.gradient(loss, v), tape.gradient(loss, v)),
        *(ContextError, r"second time.*persistent=True"),
    ),
    "text as target": (
        lambda tape, loss, v: tape.gradient("loss", v),
        *(InvalidTypeError, "target is 'loss', a str, expected"),
    ),
    "no source": (
        lambda tape, loss, v: tape.gradient(loss, [v, None]),
        *(InvalidTypeError, "source is None, a NoneType"),
    ),
    "watched text": (
        lambda tape, loss, v: tape.watch("loss"),
        *(InvalidTypeError, r"watch: got .*loss.*expected an array or variable"),
    ),
    "output gradient of another shape": (
        lambda tape, loss, v: tape.gradient(loss, v, output_gradients=jnp.ones(2)),
        *(InvalidValueError, r"has shape \(2,\), but its target \(3,\)"),
    ),
    "two output gradients": (
        lambda tape, loss, v: tape.gradient(loss, v, output_gradients=[jnp.ones(3)] * 2),
        *(InvalidValueError, "has 2 entries for 1 targets"),
    ),
    "unknown unconnected gradients": (
        lambda tape, loss, v: tape.gradient(loss, v, unconnected_gradients="nothing"),
        *(ValueError, "'nothing' is not a valid UnconnectedGradients"),
    ),
    "entered while it records": (
        lambda tape, loss, v: _enter(tape),
        *(InvalidValueError, "already recording"),
    ),
    "entered again": (
        lambda tape, loss, v: _enter(_closed()),
        *(UnsupportedError, "entered a second time"),
    ),
    "stopped after its end": (
        lambda tape, loss, v: _enter(_closed().stop_recording()),
        *(ContextError, "stop_recording: the tape is not recording"),
    ),
    "stopped beside another": (
        lambda tape, loss, v: _stopped_beside_another(v),
        *(UnsupportedError, "is not possible while another tape records"),
    ),
    "reset before": (
        lambda tape, loss, v: dist.GradientTape().reset(),
        *(ContextError, "reset: the tape is not recording"),
    ),
    "gradient before": (
        lambda tape, loss, v: dist.GradientTape().gradient(loss, v),
        *(ContextError, "recorded nothing in"),
    ),
}


@pytest.mark.parametrize(("use", "error", "message"), _MISUSES.values(), ids=_MISUSES)
def test_misuse_is_refused(use, error, message, run):
    v = run.variable(2.0)

    def step():
        with dist.GradientTape() as tape:
            use(tape, v * jnp.ones(3), v)

    with pytest.raises(error, match=message):
        run(step)


def test_gradient_outside_of_the_function_that_recorded(run):
    v = run.variable(2.0)
    tapes = []

    def step():
        with dist.GradientTape() as tape:
            loss = v * v
        tapes.append((tape, loss))
        return loss

    run(step)

    with pytest.raises(ContextError, match="the tape recorded nothing in this function"):
        tapes[0][0].gradient(tapes[0][1], v)


def test_one_tape_object_serves_every_trace(place):
    v = place.variable(2.0)
    tape = dist.GradientTape()

    def step(x):
        with tape:
            loss = jnp.sum(v * x)
        return tape.gradient(loss, v)

    assert place(step, jnp.ones(2)) == 2.0
    assert place(step, jnp.ones(3)) == 3.0
    assert step(jnp.ones(4)) == 4.0
    assert place(step, jnp.ones(5)) == 5.0
