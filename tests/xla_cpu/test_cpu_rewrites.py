"""Operations that XLA:CPU is slow at: convolutions, gradients of kernels and of max pooling."""

import functools

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh

import distributary as dist
from distributary.devices import watch_programs
from distributary.jaxprs import (
    walk,
)
from distributary.xla_cpu import rewritten_for_cpus, with_cpu_rewrites

RNG = np.random.default_rng(0)
X = RNG.standard_normal((4, 6, 8)).astype(np.float32)  # [batch, length, features]
KERNEL = RNG.standard_normal((8, 5)).astype(np.float32)
WIDE_KERNEL = RNG.standard_normal((8, 9)).astype(np.float32)


def _loss(kernel, x):
    return jnp.sum(jnp.tanh(x @ kernel))


def _checkpointed(kernel, x):
    return jax.checkpoint(_loss)(kernel, x)


def _scanned(kernel, x):
    return lax.scan(lambda total, _: (total + _loss(kernel, x), None), 0.0, length=3)[0]


def _branching(kernel, x):
    return lax.cond(x[0, 0, 0] < 100, _loss, lambda kernel, x: jnp.sum(kernel), kernel, x)


def _einsum(kernel, x):
    return jnp.sum(jnp.tanh(jnp.einsum("blf,fhu->blhu", x, kernel.reshape(8, 1, -1))))


def _num_barriers(closed):
    return sum(eqn.primitive.name == "optimization_barrier" for eqn in walk(closed.jaxpr.eqns))


# Fewer units than features, and more: the smaller operand of the product is transposed.
@pytest.mark.parametrize(
    ("loss", "kernel"),
    [
        (_loss, WIDE_KERNEL),
        *[
            (loss, KERNEL)
            for loss in (jax.jit(_loss), _checkpointed, _scanned, _branching, _einsum)
        ],
    ],
)
def test_gradients_of_kernels_are_fast_products(loss, kernel):
    gradient = jax.grad(loss)

    closed = rewritten_for_cpus(jax.make_jaxpr(gradient)(kernel, X))

    assert _num_barriers(closed) == 1
    (actual,) = jax.jit(jax.extend.core.jaxpr_as_fun(closed))(kernel, X)
    np.testing.assert_allclose(actual, gradient(kernel, X), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "precision"), [((4, 6, 2, 3), None), ((4, 6, 5, 7), ("highest", "default"))]
)
def test_products_of_half_precision_keep_their_type_and_order(shape, precision):
    x, y = (jnp.asarray(RNG.standard_normal(s), jnp.bfloat16) for s in ((4, 6, 2, 8), shape))

    def product(x, y):
        made = lax.dot_general(
            x, y, (((1, 0), (1, 0)), ((), ())), precision, preferred_element_type=jnp.float32
        )
        return made.transpose(2, 1, 3, 0)

    closed = rewritten_for_cpus(jax.make_jaxpr(product)(x, y))

    assert _num_barriers(closed) == 1
    (actual,) = jax.extend.core.jaxpr_as_fun(closed)(x, y)
    expected = np.einsum("blij,blkm->kjmi", np.float64(x), np.float64(y))
    assert actual.dtype == jnp.float32
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def _seen_twice(x, y):
    product = jnp.tensordot(x, y, ((0, 1), (0, 1)))
    return product.T, product


def _of_batches(x, y):
    x, y = x.reshape(2, 2, 6, 8), y.reshape(2, 2, 6, 8)
    return jnp.einsum("ablf,ablg->afg", x, y).transpose(2, 0, 1)


def test_they_can_be_switched_off_and_are_for_cpus(monkeypatch):
    gradient, kernel = jax.grad(_loss), KERNEL
    assert with_cpu_rewrites(gradient, AbstractMesh((2,), ("replica",))) is gradient
    closed = jax.make_jaxpr(gradient)(kernel, X)
    rewritten = with_cpu_rewrites(gradient, None)
    assert _num_barriers(rewritten_for_cpus(closed)) == 1

    monkeypatch.setenv("DISTRIBUTARY_CPU_REWRITES", "0")

    assert with_cpu_rewrites(gradient, None) is gradient
    assert rewritten_for_cpus(closed) is closed
    # A program that was made before stays rewritten; its numbers agree.
    assert _num_barriers(jax.make_jaxpr(rewritten)(kernel, X)) == 1
    np.testing.assert_allclose(rewritten(kernel, X), gradient(kernel, X), rtol=1e-5, atol=1e-5)


@pytest.fixture
def compiled_programs():
    """The StableHLO of each program that is made from now on, once it has run."""
    texts = []

    class Watched:
        def __init__(self, call):
            self._call = call
            self.lower = call.lower

        def __call__(self, *args):
            texts.append(self.lower(*args).as_text())
            return self._call(*args)

    watch_programs(lambda call, mesh, kind: Watched(call))
    yield texts
    watch_programs(None)


def test_steps_of_run_are_rewritten(strategy, compiled_programs):
    with strategy.scope():
        kernel = dist.Variable(KERNEL)

    def step(x):
        gradient = jax.grad(_loss)(kernel.value(), x)
        kernel.assign_sub(dist.get_replica_context().all_reduce("SUM", gradient))

    strategy.run(step, args=(jnp.asarray(X),))

    assert sum(text.count("optimization_barrier") for text in compiled_programs) == 1
    expected = KERNEL - 2 * jax.grad(_loss)(KERNEL, X)
    np.testing.assert_allclose(kernel.numpy(), expected, rtol=1e-5, atol=1e-5)


def _names(closed):
    return [eqn.primitive.name for eqn in walk(closed.jaxpr.eqns)]


def _convolution(kernel, x, **options):
    spatial = "DHW"[-(x.ndim - 2) :]
    numbers = (f"N{spatial}C", f"{spatial}IO", f"N{spatial}C")
    return lax.conv_general_dilated(x, kernel, dimension_numbers=numbers, **options)


def _gradient_of_convolution(kernel, x, **options):
    return jax.grad(lambda kernel: jnp.sum(jnp.sin(_convolution(kernel, x, **options))))(kernel)


@pytest.mark.parametrize(
    ("images", "kernel", "options"),
    [
        ((64, 32, 32, 3), (3, 3), {"padding": "VALID"}),
        ((6, 9, 9, 3), (1, 1), {"window_strides": (2, 3), "padding": "VALID"}),
        ((130, 68, 102, 2), (3, 3), {"window_strides": (2, 3), "padding": "SAME"}),
        ((130, 34, 34, 2), (3, 3), {"rhs_dilation": (2, 1), "padding": ((3, 0), (1, 4))}),
        ((4, 6, 7, 8, 2), (3, 2, 3), {"padding": "SAME"}),  # small, of three dimensions
    ],
)
def test_gradients_of_kernels_of_convolutions_are_products(images, kernel, options):
    options = {"window_strides": (1,) * len(kernel), **options}
    gradient = functools.partial(_gradient_of_convolution, **options)
    x = RNG.standard_normal(images).astype(np.float32)
    weights = RNG.standard_normal((*kernel, images[-1], 16)).astype(np.float32)

    before = jax.make_jaxpr(gradient)(weights, x)
    after = rewritten_for_cpus(before)

    assert _names(before).count("conv_general_dilated") == 2
    assert _names(after).count("conv_general_dilated") == 1  # the one forward
    (actual,) = jax.jit(jax.extend.core.jaxpr_as_fun(after))(weights, x)
    with jax.enable_x64():
        expected = gradient(np.float64(weights), np.float64(x))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-3)


# Half of the rows or images of a turn of the loop, all of them, and rows that do not divide.
@pytest.mark.parametrize(
    ("images", "kernel", "options"),
    [
        ((20, 12, 12, 128), (3, 3), {"padding": "VALID"}),
        ((9, 21, 22, 128), (5, 4), {"window_strides": (2, 3), "padding": "SAME"}),
        ((8, 19, 20, 128), (3, 3), {"window_strides": (1, 2), "padding": ((2, -1), (0, 3))}),
        ((7, 21, 20, 128), (3, 3), {"rhs_dilation": (2, 3), "padding": "VALID"}),
        ((96, 40, 128), (5,), {"padding": "SAME"}),
    ],
)
def test_depthwise_convolutions_and_their_gradients_are_sums(images, kernel, options):
    options = {"window_strides": (1,) * len(kernel), **options}
    num_channels = images[-1]
    x = RNG.standard_normal(images).astype(np.float32)
    weights = RNG.standard_normal((*kernel, 1, num_channels)).astype(np.float32)

    def results(kernel, x):
        made = functools.partial(_convolution, feature_group_count=num_channels, **options)
        values, of_errors = jax.vjp(made, kernel, x)
        return values, *of_errors(jnp.cos(values))

    before = jax.make_jaxpr(results)(weights, x)
    after = rewritten_for_cpus(before)

    assert _names(before).count("conv_general_dilated") == 3
    assert "conv_general_dilated" not in _names(after)
    actual = jax.jit(jax.extend.core.jaxpr_as_fun(after))(weights, x)
    with jax.enable_x64():
        expected = results(np.float64(weights), np.float64(x))
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)


def test_convolutions_without_padding_get_a_row():
    x = RNG.standard_normal((8, 33, 16, 32)).astype(np.float32)
    weights = RNG.standard_normal((3, 4, 32, 33)).astype(np.float32)
    convolution = functools.partial(_convolution, window_strides=(2, 3), padding="VALID")

    after = rewritten_for_cpus(jax.make_jaxpr(convolution)(weights, x))

    (padding,) = [
        eqn.params["padding"] for eqn in walk(after.jaxpr.eqns) if "padding" in eqn.params
    ]
    assert padding == ((0, 2), (0, 0))
    (actual,) = jax.jit(jax.extend.core.jaxpr_as_fun(after))(weights, x)
    with jax.enable_x64():
        expected = convolution(np.float64(weights), np.float64(x))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-3)


def _gradient_of_pooling(x, errors, size, strides, padding, kind):
    init = {lax.max: -np.inf, lax.min: np.inf}[kind]

    def pool(x):
        return lax.reduce_window(x, x.dtype.type(init), kind, size, strides, padding)

    return jax.vjp(pool, x)[1](errors)[0]


@pytest.mark.parametrize(
    ("size", "strides", "padding", "kind"),
    [
        ((1, 2, 2, 1), (1, 2, 2, 1), "VALID", lax.max),
        ((1, 3, 3, 1), (1, 2, 2, 1), "SAME", lax.min),
        ((1, 2, 3, 1), (1, 1, 2, 1), "VALID", lax.max),
        ((1, 2, 2, 1), (1, 3, 3, 1), "VALID", lax.min),
        ((1, 3, 3, 1), (1, 3, 3, 1), ((0, 0), (2, 1), (1, 2), (0, 0)), lax.max),
        ((2, 1, 2, 2), (1, 1, 2, 2), "VALID", lax.max),
    ],
)
def test_gradients_of_max_pooling_choose_as_xla_does(size, strides, padding, kind):
    # Few different values: most windows have several largest elements, some of them infinite. XLA
    # loses the gradient of a padded window with nothing but the infinity that never wins.
    values = [-1, 0, 2, np.inf if kind is lax.max else -np.inf]
    if padding == "VALID":
        values.append(-values[-1])
    x = RNG.choice(np.array(values, np.float32), (3, 11, 10, 4))
    shape = jax.eval_shape(
        lambda x: lax.reduce_window(x, np.float32(0), kind, size, strides, padding), x
    ).shape
    errors = RNG.integers(-9, 9, shape).astype(np.float32)  # sums are exact
    gradient = functools.partial(
        _gradient_of_pooling, size=size, strides=strides, padding=padding, kind=kind
    )

    before = jax.make_jaxpr(gradient)(x, errors)
    after = rewritten_for_cpus(before)

    assert "select_and_scatter_add" in _names(before)
    assert "select_and_scatter_add" not in _names(after)
    (actual,) = jax.jit(jax.extend.core.jaxpr_as_fun(after))(x, errors)
    np.testing.assert_array_equal(actual, jax.jit(gradient)(x, errors))


def _channels_first(kernel, x, numbers=("NCHW", "HWIO", "NCHW"), groups=1):
    return lax.conv_general_dilated(
        x, kernel, (1, 1), "VALID", dimension_numbers=numbers, feature_group_count=groups
    )


def _plain(function, kernel, images, dtype=np.float32, **options):
    options = {"window_strides": (1,) * (len(images) - 2), "padding": "VALID", **options}
    return functools.partial(function, **options), kernel, images, dtype


_FIRST = (16, 32, 32, 32)
_GRADIENT = _gradient_of_convolution
_OVERLAPPING = functools.partial(
    _gradient_of_pooling, size=(1, 3, 3, 1), strides=(1,) * 4, padding="SAME", kind=lax.max
)
# Functions that the rules do not fit; shapes of their arguments, and the dtype.
_LEFT_ALONE = {
    "product seen twice": (_seen_twice, X.shape, X.shape, np.float32),
    "product of batches": (_of_batches, X.shape, X.shape, np.float32),
    "tuple of jaxprs": (jnp.linalg.solve, (3, 3), (3,), np.float32),
    "channels first": (_channels_first, (3, 3, 32, 32), _FIRST, np.float32),
    "channels first, apart": (
        functools.partial(_channels_first, groups=32),
        *((3, 3, 1, 32), _FIRST, np.float32),
    ),
    "channels last to first": (
        functools.partial(_channels_first, numbers=("NHWC", "HWIO", "NCHW")),
        *((3, 3, 32, 32), _FIRST, np.float32),
    ),
    "overlapping windows": (_OVERLAPPING, (2, 6, 6, 3), (2, 6, 6, 3), np.float32),
    "dilation": _plain(_convolution, (3, 3, 32, 32), (64, 32, 32, 32), rhs_dilation=(2, 2)),
    "groups": _plain(_convolution, (3, 3, 16, 32), (64, 32, 32, 32), feature_group_count=2),
    "two filters": _plain(_convolution, (3, 3, 1, 64), (64, 32, 32, 32), feature_group_count=32),
    "gradient of groups": _plain(_GRADIENT, (3, 3, 2, 16), (64, 40, 40, 4), feature_group_count=2),
    "gradient of no images": _plain(_GRADIENT, (3, 3, 3, 16), (0, 9, 9, 3)),
    "half precision": _plain(_GRADIENT, (3, 3, 3, 16), (1200, 9, 9, 3), jnp.bfloat16),
    "half precision, apart": _plain(
        *(_GRADIENT, (3, 3, 1, 128), (20, 12, 12, 128), jnp.bfloat16), feature_group_count=128
    ),
}


@pytest.mark.parametrize(
    ("function", "one", "other", "dtype"), _LEFT_ALONE.values(), ids=_LEFT_ALONE
)
def test_other_programs_stay_the_same_object(function, one, other, dtype):
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape in (one, other)]
    closed = jax.make_jaxpr(function)(*args)

    assert rewritten_for_cpus(closed) is closed


def test_fit_of_a_small_cnn_learns_as_without_a_strategy(strategy, compiled_programs):
    def build():
        keras.utils.set_random_seed(3)
        model = keras.Sequential(
            [
                keras.Input((12, 12, 2)),
                keras.layers.Conv2D(16, 3, activation="relu"),
                keras.layers.MaxPooling2D(),
                keras.layers.SeparableConv2D(8, 3),
                keras.layers.Flatten(),
                keras.layers.Dense(3),
            ]
        )
        model.compile(keras.optimizers.SGD(0.05), "mse")
        return model

    x = RNG.standard_normal((20, 12, 12, 2)).astype(np.float32)
    y = RNG.standard_normal((20, 3)).astype(np.float32)
    alone = build()
    alone.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0)
    with strategy.scope():
        model = build()

    model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0)

    assert compiled_programs
    assert not any("select_and_scatter" in text for text in compiled_programs)
    assert not any("feature_group_count = 16" in text for text in compiled_programs)
    for actual, expected in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
