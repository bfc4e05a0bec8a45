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
from distributary.programs.xla_cpu import rewritten_for_cpus, with_cpu_rewrites
from distributary.tracing import walk

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


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (jax.grad(_loss), (KERNEL, X[0])),  # matrices
        (lambda x, y: jnp.tensordot(x, y, ((0, 1), (0, 1))), (X, X)),  # nothing is transposed
        (_seen_twice, (X, X)),
        (_of_batches, (X, X)),
        (jax.jit(lambda x, y: jnp.sum(x) * y), (X, X)),
        (lambda a, b: jnp.linalg.solve(a, b), (np.eye(3), np.ones(3))),  # a tuple of jaxprs
    ],
)
def test_other_programs_stay_the_same_object(function, args):
    closed = jax.make_jaxpr(function)(*args)

    assert rewritten_for_cpus(closed) is closed


# Fails when XLA does not do that any more: then the rule can go.
def test_xla_transposes_both_operands_otherwise():
    both_transposed = "lhs_contracting_dims={0}, rhs_contracting_dims={1}"
    gradient = jax.grad(_loss)

    def compiled(function):
        return jax.jit(function).lower(KERNEL, X).compile().as_text()

    assert both_transposed in compiled(gradient)
    assert both_transposed not in compiled(with_cpu_rewrites(gradient, None))


def test_programs_of_other_platforms_stay_as_they_are():
    gradient = jax.grad(_loss)

    assert with_cpu_rewrites(gradient, AbstractMesh((2,), ("replica",))) is gradient


def test_they_can_be_switched_off(monkeypatch):
    gradient, kernel = jax.grad(_loss), KERNEL
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
        ((130, 33, 34, 2), (3, 2), {"padding": "SAME"}),
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


@pytest.mark.parametrize(
    ("images", "kernel"),
    [
        ((20, 12, 12, 32), (3, 3)),  # few channels
        ((2, 12, 12, 128), (3, 3)),  # few products
        ((20, 16, 16, 96), (7, 4)),  # a large kernel and not many channels
    ],
)
def test_gradients_of_small_depthwise_kernels_stay_as_they_are(images, kernel):
    gradient = functools.partial(
        _gradient_of_convolution,
        window_strides=(1, 1),
        padding="VALID",
        feature_group_count=images[-1],
    )
    weights = np.ones((*kernel, 1, images[-1]), np.float32)
    closed = jax.make_jaxpr(gradient)(weights, np.ones(images, np.float32))

    names = _names(rewritten_for_cpus(closed))

    assert names.count("conv_general_dilated") == 1  # the forward one is rewritten


@pytest.mark.parametrize(("window_strides", "kernel"), [((1, 1), (3, 3)), ((2, 3), (3, 4))])
def test_convolutions_without_padding_get_a_row(window_strides, kernel):
    x = RNG.standard_normal((8, 33, 16, 32)).astype(np.float32)
    weights = RNG.standard_normal((*kernel, 32, 33)).astype(np.float32)
    options = {"window_strides": window_strides, "padding": "VALID"}
    convolution = functools.partial(_convolution, **options)

    after = rewritten_for_cpus(jax.make_jaxpr(convolution)(weights, x))

    (padding,) = [
        eqn.params["padding"] for eqn in walk(after.jaxpr.eqns) if "padding" in eqn.params
    ]
    assert padding == ((0, window_strides[0]), (0, 0))
    (actual,) = jax.jit(jax.extend.core.jaxpr_as_fun(after))(weights, x)
    with jax.enable_x64():
        expected = convolution(np.float64(weights), np.float64(x))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("images", "kernel", "options"),
    [
        ((16, 15, 16, 32), (3, 3, 32, 32), {"padding": "SAME"}),
        ((2, 8, 8, 32), (3, 3, 32, 32), {}),  # small
        ((64, 32, 32, 16), (3, 3, 16, 32), {}),  # few channels
        ((64, 8, 32, 32), (3, 3, 32, 32), {}),  # few rows
        ((64, 32, 32, 32), (1, 1, 32, 128), {}),  # a product
        ((64, 32, 32, 32), (3, 3, 32, 32), {"rhs_dilation": (2, 2)}),
        ((64, 32, 32, 32), (3, 3, 16, 32), {"feature_group_count": 2}),
        ((64, 32, 32, 32), (3, 3, 1, 64), {"feature_group_count": 32}),  # two filters per channel
        ((64, 600, 32), (3, 32, 32), {}),  # one dimension
    ],
)
def test_convolutions_that_xla_is_fast_at_stay_as_they_are(images, kernel, options):
    options = {"window_strides": (1,) * (len(images) - 2), "padding": "VALID", **options}
    args = [jax.ShapeDtypeStruct(shape, np.float32) for shape in (kernel, images)]
    closed = jax.make_jaxpr(functools.partial(_convolution, **options))(*args)

    assert rewritten_for_cpus(closed) is closed


@pytest.mark.parametrize("numbers", [("NCHW", "HWIO", "NCHW"), ("NHWC", "HWIO", "NCHW")])
def test_convolutions_with_channels_first_stay_as_they_are(numbers):
    def results(kernel, x):
        groups = {(3, 3, 1, 32): 32}.get(kernel.shape, 1)
        return lax.conv_general_dilated(
            x, kernel, (1, 1), "VALID", dimension_numbers=numbers, feature_group_count=groups
        )

    for kernel in ((3, 3, 1, 32), (3, 3, 32, 32)):
        args = [jax.ShapeDtypeStruct(shape, np.float32) for shape in (kernel, (16, 32, 32, 32))]
        closed = jax.make_jaxpr(results)(*args)
        assert rewritten_for_cpus(closed) is closed


def _gradient_of_pooling(x, errors, size, strides, padding, kind):
    init = {lax.max: -np.inf, lax.min: np.inf}[kind]

    def pool(x):
        return lax.reduce_window(x, x.dtype.type(init), kind, size, strides, padding)

    return jax.vjp(pool, x)[1](errors)[0]


@pytest.mark.parametrize(
    ("size", "strides", "padding", "kind"),
    [
        ((1, 2, 2, 1), (1, 2, 2, 1), "VALID", lax.max),
        ((1, 3, 3, 1), (1, 2, 2, 1), "SAME", lax.max),
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


@pytest.mark.parametrize(
    ("images", "kernel", "options"),
    [
        ((4, 9, 9, 3), (3, 3, 3, 16), {}),  # small
        ((256, 40, 40, 3), (3, 3, 3, 4), {}),  # few filters
        ((8, 100, 100, 3), (3, 3, 3, 16), {}),  # few images and few filters
        ((130, 33, 34, 3), (3, 3, 3, 16), {"padding": "SAME"}),  # few filters for padded images
        ((64, 1100, 3), (3, 3, 16), {}),  # one dimension
        ((64, 40, 40, 3), (8, 8, 3, 16), {}),  # a large kernel
        ((64, 40, 40, 4), (3, 3, 2, 16), {"feature_group_count": 2}),
        ((20_000, 4, 4, 3), (3, 3, 3, 16), {}),  # the gradient has more positions than the image
        ((0, 9, 9, 3), (3, 3, 3, 16), {}),
    ],
)
def test_other_convolutions_stay_as_they_are(images, kernel, options):
    options = {"window_strides": (1,) * (len(images) - 2), "padding": "VALID", **options}
    gradient = functools.partial(_gradient_of_convolution, **options)
    closed = jax.make_jaxpr(gradient)(np.ones(kernel, np.float32), np.ones(images, np.float32))

    assert rewritten_for_cpus(closed) is closed


@pytest.mark.parametrize(
    ("images", "kernel", "groups"),
    [
        ((1200, 9, 9, 3), (3, 3, 3, 16), 1),
        ((64, 26, 26, 32), (3, 3, 32, 32), 1),
        ((20, 12, 12, 128), (3, 3, 1, 128), 128),
    ],
)
def test_half_precision_convolutions_stay_as_they_are(images, kernel, groups):
    gradient = functools.partial(
        _gradient_of_convolution,
        window_strides=(1, 1),
        padding="VALID",
        feature_group_count=groups,
    )
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (kernel, images)]
    closed = jax.make_jaxpr(gradient)(*args)

    assert rewritten_for_cpus(closed) is closed


def test_max_pooling_of_many_overlapping_padded_windows_stays_as_it_is():
    gradient = functools.partial(
        _gradient_of_pooling, size=(1, 3, 3, 1), strides=(1,) * 4, padding="SAME", kind=lax.max
    )
    x = np.ones((2, 6, 6, 3), np.float32)
    closed = jax.make_jaxpr(gradient)(x, x)

    assert rewritten_for_cpus(closed) is closed


# Fails when XLA does not do that any more: then the rule can go.
def test_xla_computes_convolutions_with_windows_of_the_size_of_the_image_otherwise():
    gradient = functools.partial(_gradient_of_convolution, window_strides=(1, 1), padding="VALID")
    large_window = "window={size=7x7}"

    def compiled(function):
        args = (np.ones((3, 3, 3, 16), np.float32), np.ones((1200, 9, 9, 3), np.float32))
        return jax.jit(function).lower(*args).compile().as_text()

    assert large_window in compiled(gradient)
    assert large_window not in compiled(with_cpu_rewrites(gradient, None))


# Fails when XLA does not do that any more: then the rule can go.
def test_xla_makes_arrays_of_indices_for_max_pooling_otherwise():
    gradient = functools.partial(
        _gradient_of_pooling, size=(1, 2, 2, 1), strides=(1, 2, 2, 1), padding="VALID", kind=lax.max
    )
    indices = "s32[2,8,8,3]"

    def compiled(function):
        args = (np.ones((2, 8, 8, 3), np.float32), np.ones((2, 4, 4, 3), np.float32))
        return jax.jit(function).lower(*args).compile().as_text()

    assert indices in compiled(gradient)
    assert indices not in compiled(with_cpu_rewrites(gradient, None))


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
