import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist
from distributary.errors import InvalidTypeError, InvalidValueError

X = jnp.array([1.0, 2.0, 3.0])


def _equal(actual, expected):
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-6), actual, expected)


def _scaled(v):
    return lambda x, *, scale: (jnp.sum(v * x) * scale, {"scaled": x * scale})


# Of variables v = 2 and u = [1, 2, 3], of f = 3, which is not trainable, and of x = [1, 2, 3].
CASES = {
    "several": (
        lambda v, u, f, x: dist.value_and_grad(lambda x: jnp.sum(v * u * x), [v, u])(x),
        (28.0, [14.0, 2.0 * X]),
    ),
    "auxiliary result and keywords": (
        lambda v, u, f, x: dist.value_and_grad(_scaled(v), v, has_aux=True)(x, scale=2.0),
        ((24.0, {"scaled": 2.0 * X}), 12.0),
    ),
    "gradient alone": (
        lambda v, u, f, x: dist.grad(_scaled(v), v, has_aux=True)(x, scale=2.0),
        (12.0, {"scaled": 2.0 * X}),
    ),
    "structure of the variables": (
        lambda v, u, f, x: dist.value_and_grad(lambda: v**2 * f, {"a": v, "b": (f, [u])})(),
        (12.0, {"a": 12.0, "b": (4.0, [jnp.zeros(3)])}),
    ),
    "not trainable": (lambda v, u, f, x: dist.grad(lambda: f**3, f)(), 27.0),
    "nested": (
        lambda v, u, f, x: dist.value_and_grad(lambda: dist.grad(lambda: v**4, v)(), v)(),
        (32.0, 48.0),
    ),
}


def test_values_and_gradients(place):
    variables = place.variable(2.0), place.variable(X), place.variable(3.0, trainable=False)

    results = place(lambda x: {n: use(*variables, x) for n, (use, _) in CASES.items()}, X)

    _equal(results, {name: expected for name, (_, expected) in CASES.items()})


def test_assignments_take_effect_once(place):
    v, count = place.variable(2.0), place.variable(0, trainable=False)

    def loss(x):
        count.assign_add(1)
        return jnp.sum(v * x)

    place(lambda x: dist.value_and_grad(loss, v)(x), X)

    assert count.numpy() == 1


def test_eager_calls_are_compiled_once_and_keep_the_name():
    v = dist.Variable(2.0)
    traces = []

    def loss(x):
        """The loss."""
        traces.append(x.shape)
        return jnp.sum(v * x)

    function = dist.value_and_grad(loss, v)
    assert (function.__name__, dist.grad(loss, v).__doc__) == ("loss", "The loss.")
    results = [function(x) for x in (X, 2 * X, jnp.ones(2))]

    assert traces == [(3,), (2,)]
    _equal(results, [(12.0, 6.0), (24.0, 12.0), (4.0, 2.0)])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (lambda: [jnp.float32(1)], r"an array float32.*expected variables, distributary\.Variable"),
        (lambda: dist.Variable(1, name="count"), "'count:0' has dtype int32; only floating point"),
    ],
)
def test_what_has_no_gradient_is_refused(source, message):
    with pytest.raises(InvalidTypeError, match=message):
        dist.value_and_grad(lambda: 1.0, source())


@pytest.mark.parametrize(
    ("loss", "has_aux", "error", "message"),
    [
        (lambda v: v * X, False, InvalidValueError, r"value of shape \(3,\), expected a scalar"),
        (lambda v: v * v, True, InvalidTypeError, r"must return \(value, aux\)"),
        (lambda v: v.value().astype(int), False, InvalidTypeError, "int32.*expected a floating"),
    ],
)
def test_values_that_are_no_scalars_are_refused(loss, has_aux, error, message, place):
    v = place.variable(2.0)

    with pytest.raises(error, match=message):
        place(lambda: dist.value_and_grad(lambda: loss(v), v, has_aux)())
