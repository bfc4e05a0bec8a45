"""`GradientTape` outside of traced functions; tests/gradients/test_tape.py has what is the same."""

import gc
import weakref

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import distributary as dist
from distributary.errors import ContextError, UnsupportedError

_X = np.linspace(-1.0, 2.0, 12, dtype=np.float32).reshape(4, 3)


def test_values_are_those_of_jax_and_python_can_look_at_them():
    v = dist.Variable([2.0, 3.0])

    with dist.GradientTape() as tape:
        loss = v[0] * 2 if v[0] > v[1] else v[1] ** 2
        assert isinstance(float(loss), float)

    np.testing.assert_array_equal(tape.gradient(loss, v), [0.0, 6.0])


def test_loops_of_a_training_give_the_gradients_of_jax():
    """The first turn runs operation by operation, the later ones are compiled."""

    @jax.custom_vjp
    def doubled(x):
        return 2 * x

    doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (7 * g,))
    w, b = dist.Variable(np.ones((3, 2), np.float32)), dist.Variable(np.zeros(2, np.float32))

    def loss_of(w, b, x):
        hidden = jax.nn.softmax(jax.nn.relu(x @ w + b))
        noise = jax.random.normal(jax.random.key(0), b.shape)
        return jnp.mean(jax.checkpoint(jnp.tanh)(hidden)[:, 0]) + jnp.sum(doubled(b * 1.0) * noise)

    for turn in range(4):
        x = jnp.asarray(_X[: 3 + turn % 2] + turn)
        expected = jax.value_and_grad(loss_of, (0, 1))(w.value(), b.value(), x)
        with dist.GradientTape() as tape:
            loss = loss_of(w, b, x)
        gradients = tape.gradient(loss, (w, b))

        assert jnp.allclose(loss, expected[0], rtol=1e-6)
        for found, wanted in zip(gradients, expected[1], strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-7)
        w.assign_sub(0.1 * gradients[0])
        b.assign_sub(0.1 * gradients[1])


def test_keras_models_of_a_strategy(strategy_of):
    with strategy_of(2).scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, activation="relu")])
        optimizer = keras.optimizers.SGD(0.1)
    alone = keras.models.clone_model(model)
    alone.set_weights(model.get_weights())

    def loss_of(weights):
        return jnp.mean(alone.stateless_call(weights, [], _X)[0] ** 2)

    for _ in range(3):
        weights = [jnp.asarray(w) for w in model.get_weights()]
        with dist.GradientTape() as tape:
            loss = keras.ops.mean(model(_X) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        for weight, before, wanted in zip(
            model.get_weights(), weights, jax.grad(loss_of)(weights), strict=True
        ):
            np.testing.assert_allclose(weight, before - 0.1 * wanted, rtol=1e-4, atol=1e-6)


def test_a_variable_read_in_half_precision_has_gradients_of_its_own_dtype():
    dense = keras.layers.Dense(2, dtype="mixed_float16")
    dense.build((None, 3))

    with dist.GradientTape() as tape:
        loss = keras.ops.sum(dense(_X))
    kernel, bias = tape.gradient(loss, dense.trainable_variables)

    assert (kernel.dtype, bias.dtype) == (np.float32, np.float32)
    np.testing.assert_allclose(kernel, np.repeat(_X.sum(0)[:, None], 2, 1), rtol=1e-2)


def test_variables_with_one_array_are_different_sources():
    array = jnp.asarray([1.0, 2.0])
    v, w = dist.Variable(array), dist.Variable(array)
    w.assign(v.value())

    with dist.GradientTape() as tape:
        loss = jnp.sum(3 * v.value() + 5 * w.value() * array)

    of_v, of_w, of_array = tape.gradient(loss, [v, w, array])
    np.testing.assert_array_equal(of_v, [3.0, 3.0])
    np.testing.assert_array_equal(of_w, [5.0, 10.0])
    np.testing.assert_array_equal(of_array, [5.0, 10.0])


def test_a_function_in_the_block_is_differentiated_and_a_step_is_refused(strategy):
    v = dist.Variable(3.0)
    cube = dist.function(lambda x: x * v * v)

    with dist.GradientTape() as tape:
        loss = cube(jnp.float32(2.0))
    assert float(tape.gradient(loss, v)) == 12.0
    with pytest.raises(ContextError, match="Open the tape in the step"), dist.GradientTape():
        strategy.run(lambda: v * 2)
    assert not isinstance(jnp.ones(2) + 1, jax.core.Tracer)


def _with_own_gradient(y):
    function = jax.custom_vjp(lambda q: q * y)
    function.defvjp(lambda q: (q * y, None), lambda _, g: (g * y,))
    return function


_TAKES_FROM_OUTSIDE = {
    "jit": lambda x, y: jax.jit(lambda q: q * y)(x),
    "jit in jit": lambda x, y: jax.jit(lambda q: jax.jit(lambda p: p * y)(q))(x),
    "jit in a loop": lambda x, y: jax.lax.map(jax.jit(lambda q: jnp.sum(q * y)), x),
    "own gradient": lambda x, y: _with_own_gradient(y)(x),
}


@pytest.mark.parametrize("name", _TAKES_FROM_OUTSIDE)
def test_what_a_compiled_function_takes_from_outside_is_no_constant(name):
    function, v = _TAKES_FROM_OUTSIDE[name], dist.Variable([2.0, 3.0])
    x = jnp.float32([1, 2])
    with dist.GradientTape(persistent=True) as tape:
        tape.watch(x)
        loss = jnp.sum(function(x, v * 2.0))
        constant = jnp.sum(function(x, jnp.float32([5, 6])))

    with pytest.raises(UnsupportedError, match="Pass the array as an argument"):
        tape.gradient(loss, v)
    expected = jax.grad(lambda x: jnp.sum(function(x, jnp.float32([5, 6]))))(x)
    np.testing.assert_allclose(tape.gradient(constant, x), expected)


def test_jacobians():
    x = jnp.asarray(_X)

    with dist.GradientTape(persistent=True) as tape:
        y = jnp.sin(x) * jnp.sum(x, axis=1, keepdims=True)

    jacobian = jax.jacobian(lambda x: jnp.sin(x) * jnp.sum(x, axis=1, keepdims=True))(x)
    np.testing.assert_allclose(tape.jacobian(y, x), jacobian, rtol=1e-5, atol=1e-6)
    own = np.stack([jacobian[i, :, i] for i in range(len(x))])
    np.testing.assert_allclose(tape.batch_jacobian(y, x), own, rtol=1e-5, atol=1e-6)
    assert tape.jacobian(y, jnp.ones(2)) is None

    inside = dist.function(lambda x: _jacobian_of_square(x))(jnp.asarray([1.0, 3.0]))
    np.testing.assert_allclose(inside, [[2.0, 0.0], [0.0, 6.0]])


def _jacobian_of_square(x):
    with dist.GradientTape() as tape:
        y = x * x
    return tape.jacobian(y, x)


def test_a_tape_that_is_dropped_frees_what_it_recorded():
    with dist.GradientTape() as tape:
        held = jnp.ones(3) * 2
    reference = weakref.ref(held)
    del held
    assert reference() is not None
    del tape
    gc.collect()

    assert reference() is None


def test_programs_that_are_kept_for_later_turns_free_the_arrays_of_their_own():
    w = dist.Variable(np.ones(3, np.float32))
    held = []
    for turn in range(3):  # the second turn compiles
        x = jnp.full(3, turn, jnp.float32)
        with dist.GradientTape() as tape:
            loss = jnp.sum(w * x)
        w.assign_sub(tape.gradient(loss, w))
        held.append(weakref.ref(x))
    del x, loss, tape
    gc.collect()

    assert [reference() for reference in held] == [None] * 3
