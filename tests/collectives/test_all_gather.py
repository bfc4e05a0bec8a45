import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist
from distributary.errors import InvalidTypeError, InvalidValueError, ReplicaMismatchError
from tests.collectives.conftest import tape_gradient


def _all_gather(value, axis=0):
    return dist.get_replica_context().all_gather(value, axis)


@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 0)])
def test_every_dim(shape, on_replicas):
    components = [np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + r for r in range(3)]
    axes = range(-2, len(shape))

    results = on_replicas(lambda x: [_all_gather(x, axis) for axis in axes], components)

    for result, axis in zip(results[1], axes, strict=True):
        np.testing.assert_array_equal(result, np.concatenate(components, axis))


@pytest.mark.parametrize("sizes", [(1, 1), (2, 0)], ids=["even", "uneven"])
def test_every_dtype_in_one_nest(sizes, on_replicas):
    dtypes = ["bfloat16", "uint8", "bool", "complex64"]
    components = [
        {d: jnp.arange(r, r + 2 * size, dtype=jnp.int32).reshape(size, 2).astype(d) for d in dtypes}
        for r, size in enumerate(sizes)
    ]

    results = on_replicas(_all_gather, components)

    for result in results:
        for dtype in dtypes:
            assert result[dtype].dtype == dtype
            expected = np.concatenate([np.asarray(c[dtype]) for c in components])
            np.testing.assert_array_equal(result[dtype], expected)


@pytest.mark.parametrize(("sizes", "axis"), [((2, 1), 0), ((1, 0, 3), -1), ((0, 0, 0, 5), 0)])
def test_uneven_sizes(sizes, axis, on_replicas):
    components = [
        np.random.default_rng(r).normal(size=(size, 2)).astype(np.float32)
        for r, size in enumerate(sizes)
    ]
    components = [c if axis == 0 else c.T for c in components]

    def step(x):
        gathered = _all_gather(x, axis)
        return gathered, _all_gather(jnp.concatenate([x * 2, gathered], axis), axis)

    results = on_replicas(step, components)

    whole = np.concatenate(components, axis)
    for first, second in results:
        np.testing.assert_array_equal(first, whole)
        parts = [part for own in components for part in (2 * own, whole)]
        np.testing.assert_array_equal(second, np.concatenate(parts, axis))


@pytest.mark.parametrize(
    ("components", "expected"),
    [
        (([1.0], [2.0, 2.0]), ([4.0], [8.0, 8.0])),
        (([1.0, 3.0], [2.0, 2.0]), ([4.0, 12.0], [8.0, 8.0])),
        (([], [2.0]), ([], [8.0])),
    ],
)
def test_gradient_is_the_own_slice_of_the_summed_upstream_gradients(
    components, expected, on_replicas
):
    def step(x):
        loss = lambda x: jnp.sum(_all_gather(x) ** 2)
        return tape_gradient(loss, x), jax.grad(loss)(x)

    results = on_replicas(step, [np.array(c, np.float32) for c in components])

    for gradients, own in zip(results, expected, strict=True):
        for gradient in gradients:
            np.testing.assert_array_equal(gradient, own)


def test_inside_jit_and_scan(on_replicas):
    def step(x):
        def body(total, row):
            return total + jnp.sum(_all_gather(row[None])), None

        gathered = jax.jit(_all_gather)(x)
        return gathered, jax.lax.scan(body, 0.0, x)[0]

    results = on_replicas(step, [np.array([1.0, 2.0]), np.array([3.0, 4.0])])

    for gathered, total in results:
        np.testing.assert_array_equal(gathered, [1, 2, 3, 4])
        assert total == 10.0


@pytest.mark.parametrize(
    ("parts", "axis", "error", "message"),
    [
        ([np.float32(1.0)] * 2, 0, InvalidValueError, "a component is a scalar"),
        ([np.ones(3)] * 2, 1, InvalidValueError, r"axis 1 is out of range .* shape \(3,\)"),
        ([np.ones(3)] * 2, True, InvalidTypeError, "axis is True, expected an int"),
        ([np.ones(3)] * 2, 0.0, InvalidTypeError, r"axis is 0\.0, expected an int"),
        (
            [np.ones((2, 3)), np.ones((4, 1))],
            *(0, ReplicaMismatchError, r"^all_gather: .* \(4, 1\),.* \(2, 3\);.* dim 0"),
        ),
    ],
)
def test_misuse(parts, axis, error, message, on_replicas):
    with pytest.raises(error, match=message):
        on_replicas(lambda x: _all_gather(x, axis), parts)
