"""Products of several dimensions, whose results are transposed, on CPUs."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh

import distributary as dist
from distributary.topology import watch_programs
from distributary.tracing import fast_products, with_fast_products
from distributary.tracing._markers import walk

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
@pytest.mark.parametrize("kernel", [KERNEL, WIDE_KERNEL])
@pytest.mark.parametrize(
    "loss", [_loss, jax.jit(_loss), _checkpointed, _scanned, _branching, _einsum]
)
def test_gradients_of_kernels_are_fast_products(loss, kernel):
    gradient = jax.grad(loss)

    closed = fast_products(jax.make_jaxpr(gradient)(kernel, X))

    assert _num_barriers(closed) == 1
    (actual,) = jax.jit(jax.extend.core.jaxpr_as_fun(closed))(kernel, X)
    np.testing.assert_allclose(actual, gradient(kernel, X), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(4, 6, 2, 3), (4, 6, 5, 7)])
@pytest.mark.parametrize("precision", [None, "highest", ("highest", "default")])
def test_products_of_half_precision_keep_their_type_and_order(shape, precision):
    x, y = (jnp.asarray(RNG.standard_normal(s), jnp.bfloat16) for s in ((4, 6, 2, 8), shape))

    def product(x, y):
        made = lax.dot_general(
            x, y, (((1, 0), (1, 0)), ((), ())), precision, preferred_element_type=jnp.float32
        )
        return made.transpose(2, 1, 3, 0)

    closed = fast_products(jax.make_jaxpr(product)(x, y))

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

    assert fast_products(closed) is closed


# Fails when XLA does not do that any more: then the pass can go.
@pytest.mark.parametrize("kernel", [KERNEL, WIDE_KERNEL])
def test_xla_transposes_both_operands_otherwise(kernel):
    both_transposed = "lhs_contracting_dims={0}, rhs_contracting_dims={1}"
    gradient = jax.grad(_loss)

    def compiled(function):
        return jax.jit(function).lower(kernel, X).compile().as_text()

    assert both_transposed in compiled(gradient)
    assert both_transposed not in compiled(with_fast_products(gradient, None))


def test_programs_of_other_platforms_stay_as_they_are():
    gradient = jax.grad(_loss)

    assert with_fast_products(gradient, AbstractMesh((2,), ("replica",))) is gradient


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


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_steps_of_run_have_fast_products(strategy_of, compiled_programs, num_replicas):
    strategy = strategy_of(num_replicas)
    with strategy.scope():
        kernel = dist.Variable(KERNEL)

    def step(x):
        gradient = jax.grad(_loss)(kernel.value(), x)
        kernel.assign_sub(dist.get_replica_context().all_reduce("SUM", gradient))

    strategy.run(step, args=(jnp.asarray(X),))

    assert sum(text.count("optimization_barrier") for text in compiled_programs) == 1
    expected = KERNEL - num_replicas * jax.grad(_loss)(KERNEL, X)
    np.testing.assert_allclose(kernel.numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_steps_of_fit_have_fast_products(strategy_of, compiled_programs, num_replicas):
    with strategy_of(num_replicas).scope():
        model = keras.Sequential([keras.Input((6, 8)), keras.layers.Dense(5, use_bias=False)])
        model.compile("sgd", "mse")

    model.fit(X, np.zeros((4, 6, 5), np.float32), batch_size=4, verbose=0)

    assert any("optimization_barrier" in text for text in compiled_programs)
