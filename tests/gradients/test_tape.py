import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist
from distributary.errors import (
    ContextError,
    InvalidTypeError,
    InvalidValueError,
    UnsupportedError,
)

X = jnp.array([1.0, 2.0, 3.0])


def _equal(actual, expected):
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-6), actual, expected)


# What is differentiated with respect to what


def test_gradient_of_variables(place):
    v, w = place.variable(2.0), place.variable([1.0, 2.0, 3.0])

    def step(x):
        with dist.GradientTape() as tape:
            loss = jnp.sum(v * w * x) + v * v
        return tape.gradient(loss, [v, w])

    _equal(place(step, X), jax.grad(lambda p: jnp.sum(p[0] * p[1] * X) + p[0] ** 2)([2.0, X]))


def test_gradient_of_a_watched_argument(place):
    def step(x):
        with dist.GradientTape() as tape:
            tape.watch(x)
            loss = jnp.sum(x**3)
        return tape.gradient(loss, x)

    _equal(place(step, X), 3 * X**2)


def test_gradient_of_values_computed_before_and_inside_the_tape(place):
    v = place.variable(3.0)

    def step(x):
        before = x * 2.0
        with dist.GradientTape() as tape:
            inside = before * v
            loss = jnp.sum(inside**2)
        return tape.gradient(loss, [before, inside, v])

    before, inside = 2 * X, 6 * X
    _equal(place(step, X), [2 * inside * 3.0, 2 * inside, jnp.sum(2 * inside * before)])


def test_gradient_of_an_intermediate_and_of_what_it_was_computed_from(place):
    v = place.variable(3.0)

    def step():
        with dist.GradientTape() as tape:
            square = v * v
            cube = square * v
        return tape.gradient(cube, [square, v])

    _equal(place(step), [3.0, 27.0])


@pytest.mark.parametrize("constant", [jnp.array([3.0, 4.0]), jnp.array(3.0)], ids=["[2]", "[]"])
def test_gradient_of_a_watched_constant_of_the_closure(constant, place):
    def step():
        with dist.GradientTape() as tape:
            tape.watch(constant)
            loss = jnp.sum(constant**2)
        return tape.gradient(loss, constant)

    _equal(place(step), 2 * constant)


def test_gradient_of_an_unrelated_constant_is_none(place):
    v = place.variable(3.0)

    def step():
        with dist.GradientTape() as tape:
            loss = v * v
        return tape.gradient(loss, [jnp.ones(3), 2.0, v])

    _equal(place(step), [None, None, 6.0])


def test_several_reads_of_one_variable_add_up(place):
    v = place.variable(3.0)

    def step():
        with dist.GradientTape() as tape:
            first, second = v.value(), v.value()
            loss = first * second + v.read_value() * v
        return tape.gradient(loss, v)

    _equal(place(step), 12.0)


def test_one_source_given_twice(place):
    v = place.variable(3.0)

    def step(x):
        with dist.GradientTape() as tape:
            loss = jnp.sum(v * x * x)
        return tape.gradient(loss, [v, x, v, x])

    _equal(place(step, X), [jnp.sum(X * X), 6 * X, jnp.sum(X * X), 6 * X])


def test_several_targets_add_up(place):
    v = place.variable(3.0)

    def step(x):
        with dist.GradientTape() as tape:
            targets = {"a": v * x, "b": (v * v, v.value(), 2.0)}
        return tape.gradient(targets, [v, x])

    _equal(place(step, X), [jnp.sum(X) + 6.0 + 1.0, 3.0 * jnp.ones(3)])


def test_targets_from_before_and_after_the_tape_count_as_constants(place):
    v = place.variable(3.0)

    def step(x):
        before = x * v
        with dist.GradientTape() as tape:
            inside = before * v
        after = inside * v
        return tape.gradient([before, after, inside, v], [v, before])

    _equal(place(step, X), [3.0 * jnp.sum(X), 1.0 + 3.0 * jnp.ones(3)])


def test_sources_may_be_any_nest(place):
    v, w = place.variable(2.0), place.variable(5.0)

    def step():
        with dist.GradientTape() as tape:
            loss = v * v * w
        return tape.gradient(loss, {"v": v, "rest": (w, [v])})

    _equal(place(step), {"v": 20.0, "rest": (4.0, [20.0])})


def test_a_value_is_a_target_of_itself(place):
    v = place.variable(2.0)

    def step(x):
        with dist.GradientTape() as tape:
            value = v.value()
        return tape.gradient([value, x], [v, value, x])

    _equal(place(step, X), [1.0, 1.0, jnp.ones(3)])


def test_output_gradients_weight_the_targets(place):
    v = place.variable(2.0)

    def step(x):
        with dist.GradientTape() as tape:
            first, second = v * x, v * v
        return tape.gradient([first, second], v, output_gradients=[x, None])

    _equal(place(step, X), jnp.sum(X * X) + 4.0)


# What is not connected


def test_unconnected_sources_are_none(place):
    v, w, unused = place.variable(2.0), place.variable(3.0), place.variable(1.0)

    def step(x):
        with dist.GradientTape() as tape:
            loss = v * v
            tape.watch(w)
            w * 2.0
        return tape.gradient(loss, [v, w, unused, x])

    assert place(step, X) == [4.0, None, None, None]


@pytest.mark.parametrize("zero", ["zero", dist.UnconnectedGradients.ZERO])
def test_unconnected_gradients_as_zeros(zero, place):
    v, w = place.variable(2.0), place.variable([3.0, 4.0])

    def step(x):
        with dist.GradientTape() as tape:
            loss = v * v
        return tape.gradient(loss, [v, w, x, jnp.ones(2)], unconnected_gradients=zero)

    _equal(place(step, X), [4.0, jnp.zeros(2), jnp.zeros(3), jnp.zeros(2)])


def test_stop_gradient_disconnects(place):
    v, w = place.variable(2.0), place.variable(3.0)

    def step():
        with dist.GradientTape() as tape:
            loss = jax.lax.stop_gradient(v * w) * w
        return tape.gradient(loss, [v, w])

    assert place(step) == [None, 6.0]


def test_integers_disconnect(place):
    v = place.variable(2.6)

    def step():
        with dist.GradientTape() as tape:
            loss = v.value().astype(jnp.int32).astype(jnp.float32)
        return tape.gradient(loss, v)

    assert place(step) is None


def test_a_target_computed_after_the_tape_closed_is_not_connected(place):
    v = place.variable(2.0)

    def step():
        with dist.GradientTape(persistent=True) as tape:
            inside = v * v
        after = inside * v
        return tape.gradient(after, v), tape.gradient(inside, v)

    assert place(step) == (None, 4.0)


def test_python_code_sees_whether_a_gradient_is_none(place):
    v, w = place.variable(2.0), place.variable(3.0)

    def step():
        with dist.GradientTape() as tape:
            w.value()
            loss = v * v
        gradients = zip(tape.gradient(loss, [v, w]), [v, w], strict=True)
        return [g * 0 + u.value() for g, u in gradients if g is not None]

    assert place(step) == [2.0]


# Which variables are watched


def test_variables_that_are_not_trainable_must_be_watched(place):
    v = place.variable(2.0, trainable=False)

    def step(watch):
        with dist.GradientTape() as tape:
            if watch:
                tape.watch(v)
            loss = v * v
        return tape.gradient(loss, v)

    assert place(step, False) is None
    assert place(step, True) == 4.0


def test_watch_accessed_variables_false_watches_what_it_is_told(place):
    v, w = place.variable(2.0), place.variable(3.0)

    def step():
        with dist.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([v])
            loss = v * w
        return tape.gradient(loss, [v, w])

    assert place(step) == [3.0, None]


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


# Order of gradients


def test_second_order(place):
    v = place.variable(3.0)

    def step():
        with dist.GradientTape() as outer:
            with dist.GradientTape() as inner:
                loss = v**3
            first = inner.gradient(loss, v)
        return first, outer.gradient(first, v)

    _equal(place(step), (27.0, 18.0))


def test_third_order(place):
    v = place.variable(2.0)

    def step():
        with dist.GradientTape() as a:
            with dist.GradientTape() as b:
                with dist.GradientTape() as c:
                    loss = v**4
                first = c.gradient(loss, v)
            second = b.gradient(first, v)
        return first, second, a.gradient(second, v)

    _equal(place(step), (32.0, 48.0, 48.0))


def test_gradient_penalty(place):
    w = place.variable([0.5, -1.0, 2.0])

    def step(x):
        with dist.GradientTape() as outer:
            with dist.GradientTape() as inner:
                inner.watch(x)
                score = jnp.sum(jnp.tanh(w * x))
            norm = jnp.sqrt(jnp.sum(inner.gradient(score, x) ** 2))
            loss = score + 10.0 * (norm - 1.0) ** 2
        return loss, outer.gradient(loss, w)

    def plain(w):
        score, g = jax.value_and_grad(lambda x: jnp.sum(jnp.tanh(w * x)))(X)
        return score + 10.0 * (jnp.sqrt(jnp.sum(g**2)) - 1.0) ** 2

    loss, gradient = place(step, X)
    expected = jax.value_and_grad(plain)(jnp.array([0.5, -1.0, 2.0]))
    np.testing.assert_allclose(loss, expected[0], rtol=1e-5)
    np.testing.assert_allclose(gradient, expected[1], rtol=1e-5)


def test_inner_tape_differentiated_after_the_outer(place):
    v, w = place.variable(2.0), place.variable(3.0)

    def step():
        with dist.GradientTape() as outer:
            with dist.GradientTape() as inner:
                cube = v**3
            loss = cube * w
        outer_gradients = outer.gradient(loss, [v, w, cube])
        return outer_gradients, inner.gradient(cube, v)

    _equal(place(step), ([36.0, 8.0, 3.0], 12.0))


def test_overlapping_tapes_of_two_players(place):
    g, d = place.variable(2.0), place.variable(3.0)

    def step(x):
        with dist.GradientTape() as g_tape, dist.GradientTape() as d_tape:
            fake = g * x
            g_loss = jnp.sum(jnp.sin(d * fake))
            d_loss = jnp.sum(jnp.cos(d * fake)) + jnp.sum(d * x)
        return g_tape.gradient(g_loss, [g]), d_tape.gradient(d_loss, [d])

    def g_loss(g):
        return jnp.sum(jnp.sin(3.0 * g * X))

    def d_loss(d):
        return jnp.sum(jnp.cos(d * 2.0 * X)) + jnp.sum(d * X)

    actual = place(step, X)
    np.testing.assert_allclose(actual[0][0], jax.grad(g_loss)(2.0), rtol=1e-5)
    np.testing.assert_allclose(actual[1][0], jax.grad(d_loss)(3.0), rtol=1e-5)


def test_tapes_that_close_in_another_order(place):
    v = place.variable(2.0)

    def step():
        first, second = dist.GradientTape(), dist.GradientTape()
        first.__enter__()
        square = v * v
        second.__enter__()
        cube = square * v
        first.__exit__(None, None, None)
        fourth = cube * v
        second.__exit__(None, None, None)
        return (
            first.gradient(fourth, v),
            second.gradient(fourth, [v, square]),
        )

    # The first tape has not seen how `fourth` came about; the second has not seen `square` made.
    _equal(place(step), (None, [16.0, 4.0]))


def test_persistent_tape_gives_gradients_of_several_targets(place):
    v, w = place.variable(2.0), place.variable(3.0)

    def step():
        with dist.GradientTape(persistent=True) as tape:
            a = v * w
            b = a * a
        return tape.gradient(b, [v, a]), tape.gradient(a, [v, w]), tape.gradient([a, b], w)

    _equal(place(step), ([36.0, 12.0], [3.0, 2.0], 2.0 + 24.0))


def test_persistent_tape_records_a_gradient_taken_inside_the_block(place):
    v, w = place.variable(2.0), place.variable(3.0)

    def step():
        with dist.GradientTape(persistent=True) as tape:
            cube = v**3
            first = tape.gradient(cube, v)
            loss = first * w
        return first, tape.gradient(loss, [v, w]), tape.gradient(cube, v)

    _equal(place(step), (12.0, [36.0, 12.0], 12.0))


def test_many_gradients_inside_a_persistent_tape_are_traced_in_linear_time(run):
    # Each gradient that evaluated all earlier ones again would take 2**20 evaluations.
    v = run.variable(1.0)

    def step():
        with dist.GradientTape(persistent=True) as tape:
            powers = [v**i for i in range(1, 21)]
            gradients = [tape.gradient(power, v) for power in powers]
        return gradients

    _equal(run(step), [float(i) for i in range(1, 21)])


def test_first_gradient_inside_a_block_ends_a_tape_that_is_not_persistent(place):
    v = place.variable(2.0)

    def step():
        with dist.GradientTape() as outer, dist.GradientTape() as inner:
            square = v * v
            first = inner.gradient(square, v)
            loss = first * v
        return first, outer.gradient(loss, v)

    _equal(place(step), (4.0, 8.0))


# stop_recording and reset


def test_stop_recording_makes_constants(place):
    v, w = place.variable(2.0), place.variable(3.0)

    def step():
        with dist.GradientTape() as tape:
            recorded = v * 2.0
            with tape.stop_recording():
                constant = v * w
            loss = recorded * constant * w
        return tape.gradient(loss, [v, w, recorded, constant])

    _equal(place(step), [2.0 * 6.0 * 3.0, 4.0 * 6.0, 18.0, 12.0])


def test_only_what_stop_recording_hides_is_none(place):
    v = place.variable(2.0)

    def step():
        with dist.GradientTape() as tape:
            with tape.stop_recording():
                constant = v * v
            loss = constant * 3.0
        return tape.gradient(loss, v)

    assert place(step) is None


def test_gradient_of_a_persistent_tape_inside_stop_recording_is_a_constant(place):
    v = place.variable(2.0)

    def step():
        with dist.GradientTape(persistent=True) as tape:
            square = v * v
            with tape.stop_recording():
                first = tape.gradient(square, v)
            loss = square * first
        return first, tape.gradient(loss, v)

    _equal(place(step), (4.0, 16.0))


def test_gradient_inside_stop_recording_ends_a_tape_that_is_not_persistent(place):
    v = place.variable(2.0)

    def step():
        with dist.GradientTape() as tape:
            square = v * v
            with tape.stop_recording():
                first = tape.gradient(square, v)
            v * 2.0
        return first

    assert place(step) == 4.0


def test_stop_recording_beside_another_tape_is_refused(run):
    v = run.variable(2.0)

    def step():
        with dist.GradientTape(), dist.GradientTape() as tape, tape.stop_recording():
            return v * 2.0

    with pytest.raises(UnsupportedError, match="stop_recording is not possible while another tape"):
        run(step)


def test_reset_forgets(place):
    v, w = place.variable(2.0), place.variable(3.0)

    def step():
        with dist.GradientTape() as tape:
            before = v * w
            tape.reset()
            loss = before * w
        return tape.gradient(loss, [v, w])

    assert place(step) == [None, 6.0]


# Misuse


def test_inside_a_raw_jit_the_tape_says_where_it_works():
    @jax.jit
    def step(x):
        with dist.GradientTape():
            return x

    with pytest.raises(ContextError, match=r"raw jax\.jit.*distributary\.function"):
        step(1.0)


def test_second_gradient_of_a_tape_that_is_not_persistent(place):
    v = place.variable(2.0)

    def step():
        with dist.GradientTape() as tape:
            loss = v * v
        return tape.gradient(loss, v), tape.gradient(loss, v)

    with pytest.raises(ContextError, match=r"second time.*persistent=True"):
        place(step)


def test_gradient_of_a_tape_that_was_never_entered(run):
    v = run.variable(2.0)

    with pytest.raises(ContextError, match="the tape recorded nothing in this function"):
        run(lambda: dist.GradientTape().gradient(v * v, v))


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


def test_entering_twice(run):
    def nested():
        with dist.GradientTape() as tape, tape:
            pass

    def again():
        tape = dist.GradientTape()
        with tape:
            pass
        with tape:
            pass

    with pytest.raises(InvalidValueError, match="already recording"):
        run(nested)
    with pytest.raises(UnsupportedError, match="entered a second time"):
        run(again)


def test_one_tape_object_serves_every_trace(run):
    v = run.variable(2.0)
    tape = dist.GradientTape()

    def step(x):
        with tape:
            loss = jnp.sum(v * x)
        return tape.gradient(loss, v)

    assert run(step, jnp.ones(2)) == 2.0
    assert run(step, jnp.ones(3)) == 3.0


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bool_])
def test_integer_targets_are_refused(dtype, run):
    v = run.variable(2.0)

    def step():
        with dist.GradientTape() as tape:
            loss = v.value().astype(dtype)
        return tape.gradient(loss, v)

    with pytest.raises(InvalidTypeError, match=f"target has dtype {jnp.dtype(dtype).name}"):
        run(step)


def test_integer_sources_are_none(place):
    def step(n):
        with dist.GradientTape() as tape:
            loss = n * 2.0
        return tape.gradient(loss, n)

    assert place(step, jnp.int32(3)) is None


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "source is None, a NoneType"),
        ("v", "source is 'v', a str"),
        (3, "source is 3, an int"),
    ],
)
def test_sources_that_are_no_arrays(source, message, run):
    v = run.variable(2.0)

    def step():
        with dist.GradientTape() as tape:
            loss = v * v
        return tape.gradient(loss, [v, source])

    with pytest.raises(InvalidTypeError, match=message):
        run(step)


@pytest.mark.parametrize("target", ["loss", 3])
def test_targets_that_are_no_arrays(target, run):
    v = run.variable(2.0)

    def step():
        with dist.GradientTape() as tape:
            v * v
        return tape.gradient(target, v)

    with pytest.raises(
        InvalidTypeError, match=f"target is {target!r}, an? {type(target).__name__}, expected"
    ):
        run(step)


@pytest.mark.parametrize("leaf", [3, "x", np.arange(3)])
def test_watch_refuses_what_cannot_be_differentiated(leaf, run):
    def step():
        with dist.GradientTape() as tape:
            tape.watch(leaf)

    with pytest.raises(InvalidTypeError, match=r"watch: got .*expected a floating point array"):
        run(step)


def test_output_gradients_of_another_shape_or_number(run):
    v = run.variable(2.0)

    def step(output_gradients):
        with dist.GradientTape() as tape:
            loss = v * jnp.ones(3)
        return tape.gradient(loss, v, output_gradients=output_gradients)

    with pytest.raises(InvalidValueError, match=r"has shape \(2,\), but its target \(3,\)"):
        run(step, jnp.ones(2))
    with pytest.raises(InvalidValueError, match="has 2 entries for 1 targets"):
        run(step, [jnp.ones(3), jnp.ones(3)])


def test_unknown_unconnected_gradients(run):
    v = run.variable(2.0)

    def step():
        with dist.GradientTape() as tape:
            loss = v * v
        return tape.gradient(loss, v, unconnected_gradients="nothing")

    with pytest.raises(ValueError, match="'nothing' is not a valid UnconnectedGradients"):
        run(step)


def test_stop_recording_and_reset_need_a_recording_tape(run):
    def stop():
        tape = dist.GradientTape()
        with tape:
            pass
        with tape.stop_recording():
            pass

    with pytest.raises(ContextError, match="stop_recording: the tape is not recording"):
        run(stop)
    with pytest.raises(ContextError, match="reset: the tape is not recording"):
        run(lambda: dist.GradientTape().reset())
