import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist
from distributary.errors import InvalidTypeError, InvalidValueError
from tests.collectives.conftest import tape_gradient

DTYPES = ["float16", "bfloat16", "float32", "int8", "uint8", "int32", "uint32", "complex64"]


def _all_reduce(op, value, options=None):
    return dist.get_replica_context().all_reduce(op, value, options)


def _jax_gradient(function, x):
    return jax.grad(lambda x: jnp.sum(function(x)))(x)


def test_sum_and_mean_of_every_dtype(on_replicas):
    num_replicas = 3
    host = {d: np.arange(6).reshape(2, 3) for d in DTYPES}
    components = [
        {d: jnp.asarray(value + r, d) for d, value in host.items()} | {"empty": jnp.zeros((0, 2))}
        for r in range(num_replicas)
    ]

    results = on_replicas(lambda x: (_all_reduce("SUM", x), _all_reduce("MEAN", x)), components)

    total = np.arange(6).reshape(2, 3) * num_replicas + sum(range(num_replicas))
    for sums, means in results:
        assert sums["empty"].shape == means["empty"].shape == (0, 2)
        for dtype in DTYPES:
            assert sums[dtype].dtype == dtype
            np.testing.assert_array_equal(np.asarray(sums[dtype], np.complex64), total)
            is_float = jnp.issubdtype(dtype, jnp.inexact)
            assert means[dtype].dtype == (dtype if is_float else jnp.float32)
            rtol = 1e-2 if dtype == "bfloat16" else 1e-3 if dtype == "float16" else 1e-6
            mean = np.asarray(means[dtype], np.complex64)
            np.testing.assert_allclose(mean, total / num_replicas, rtol=rtol)


def test_nests_keep_their_structure_and_operations_have_names(strategy_of):
    value = {"a": 1.0, "b": [2.0, (3.0,)], "c": [], "d": {}}

    def step(x):
        scaled = jax.tree.map(lambda leaf: leaf * x, value)
        return [_all_reduce(op, scaled) for op in ("sum", "Sum", "SUM", dist.ReduceOp.SUM)]

    results = strategy_of(2).run(step, (jnp.float32(1.0),))

    for component in strategy_of(2).experimental_local_results(results):
        assert component == [jax.tree.map(lambda leaf: 2 * leaf, value)] * 4


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_values_that_all_replicas_share_count_once_per_replica(num_replicas, strategy_of):
    strategy = strategy_of(num_replicas)
    constant = jnp.arange(3.0)
    with strategy.scope():
        v = dist.Variable(5.0)

    def step(x):
        return _all_reduce("SUM", [constant, np.float32(2), 3, 1.5, v, x.shape[0]])

    result = strategy.run(step, (jnp.zeros(4),))
    values = strategy.experimental_local_results(result)[-1]

    for value, once in zip(values, [constant, 2, 3, 1.5, 5.0, 4], strict=True):
        np.testing.assert_array_equal(value, np.asarray(once) * num_replicas)


_HIGH = {
    "float16": 60000.0,
    "bfloat16": 3e38,
    "float32": 3e38,
    "int8": 127,
    "uint8": 255,
    "int32": 2**31 - 1,
    "uint32": 2**32 - 1,
}
# Components of three replicas and their mean.
MEANS = {
    **{name: ([np.asarray(x, jnp.dtype(name))] * 3, x) for name, x in _HIGH.items()},
    "negative": ([np.int32(x) for x in (-7, 2, -4)], -3.0),
    "lowest": ([np.int32(-(2**31))] * 3, -(2.0**31)),
    "small half": ([np.float16(6e-8)] * 3, np.float16(6e-8)),
    "small": ([np.float32(1e-37)] * 3, 1e-37),
    "not a number": ([np.float32(x) for x in (np.nan, 1, 1)], np.nan),
    "infinite": ([np.float32(x) for x in (np.inf, 1, 1)], np.inf),
}


def test_means_neither_overflow_nor_get_lost(on_replicas):
    components = [{name: values[i] for name, (values, _) in MEANS.items()} for i in range(3)]

    (means, *_) = on_replicas(lambda x: _all_reduce("MEAN", x), components)

    for name, (values, mean) in MEANS.items():
        expected = np.asarray(mean, values[0].dtype if name in _HIGH else np.float64)
        found = np.asarray(means[name], np.float64)
        np.testing.assert_allclose(found, expected.astype(np.float64), rtol=1e-6, err_msg=name)


# What cannot be reduced


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("text", "all_reduce: got 'text', expected an array of numbers"),
        (object(), "an object; expected an array of numbers"),
        (True, "got a boolean array of shape"),
        (np.array([None]), "expected an array of numbers"),
        (jax.random.key(0), r"all_reduce: got an array key<fry>\[\]"),
    ],
)
def test_what_is_no_number_is_refused(value, message, strategy_of):
    for num_replicas in (1, 2):
        with pytest.raises(InvalidTypeError, match=message):
            strategy_of(num_replicas).run(lambda: _all_reduce("SUM", value))


@pytest.mark.parametrize(
    ("op", "error", "message"),
    [
        ("MAX", InvalidValueError, "reduce_op is 'MAX', which is not a valid ReduceOp"),
        (None, InvalidTypeError, r"reduce_op is None, expected ReduceOp\.SUM or ReduceOp\.MEAN"),
    ],
)
def test_unknown_operations(op, error, message, strategy_of):
    with pytest.raises(error, match=f"all_reduce: {message}"):
        strategy_of(2).run(lambda: _all_reduce(op, 1.0))


# Gradients, as in tf.distribute


def test_replicas_that_ask_for_different_operations_are_refused(strategy_of):
    def step():
        context = dist.get_replica_context()
        op = "SUM" if int(context.replica_id_in_sync_group) == 0 else "MEAN"
        return context.all_reduce(op, jnp.float32(1))

    with pytest.raises(dist.errors.ReplicaMismatchError, match="asks for SUM, but replica 1 for M"):
        strategy_of(2).run(step)


@pytest.mark.parametrize("gradient_of", [tape_gradient, _jax_gradient], ids=["tape", "jax.grad"])
@pytest.mark.parametrize(("op", "expected"), [("SUM", 16.0), ("MEAN", 4.0)])
def test_upstream_gradients_that_differ_between_replicas(op, expected, gradient_of, on_replicas):
    # The upstream gradient of replica r is weight r, so each gets 3 + 5 of them, or their mean.
    def step(inputs):
        x, weight = inputs
        return gradient_of(lambda x: weight * _all_reduce(op, 2.0 * x), x)

    results = on_replicas(step, [(1.0, 3.0), (2.0, 5.0)])

    assert results == ((expected * (1 if op == "SUM" else 2)),) * 2


def test_gradient_of_the_other_dtypes(on_replicas):
    def step(x):
        def loss(x):
            means = _all_reduce("MEAN", x)
            return sum(jnp.sum(jnp.real(mean).astype(jnp.float32)) for mean in means.values())

        return jax.grad(loss)(x)

    components = [{d: jnp.ones(2, d) for d in ("float16", "bfloat16", "complex64")}] * 2

    for gradients in on_replicas(step, components):
        for gradient in gradients.values():
            np.testing.assert_array_equal(gradient, np.ones(2))


def test_second_order_through_a_reduction(on_replicas):
    # y = (x0² + x1²)²; each replica's y counts once per replica.
    def step(x):
        first = tape_gradient(lambda x: _all_reduce("SUM", x * x) ** 2, x)
        second = jax.grad(
            lambda x: jnp.sum(_jax_gradient(lambda x: _all_reduce("SUM", x * x) ** 2, x))
        )(x)
        return first, second

    results = on_replicas(step, [1.0, 2.0])

    def total(x):
        return 2.0 * jnp.sum(x * x) ** 2

    x = jnp.array([1.0, 2.0])
    first = jax.grad(total)(x)
    second = jax.hessian(total)(x) @ jnp.ones(2)
    np.testing.assert_allclose([r[0] for r in results], first)
    np.testing.assert_allclose([r[1] for r in results], second)
