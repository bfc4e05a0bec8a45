import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist
from distributary.errors import InvalidTypeError, InvalidValueError


def _all_gather(value, axis=0):
    return dist.get_replica_context().all_gather(value, axis)


def test_every_dim(on_replicas):
    components = [np.arange(24.0, dtype=np.float32).reshape(2, 3, 4) + 100 * r for r in range(3)]

    results = on_replicas(lambda x: [_all_gather(x, axis) for axis in (0, 2, -2)], components)

    for result, axis in zip(results[1], (0, 2, -2), strict=True):
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

    results = on_replicas(lambda x: (_all_gather(x, axis), _all_gather(x * 2, axis)), components)

    whole = np.concatenate(components, axis)
    for first, second in results:
        np.testing.assert_array_equal(first, whole)
        np.testing.assert_array_equal(second, 2 * whole)


def test_uneven_gathers_of_several_lengths_in_one_step(on_replicas):
    def step(x):
        head = x[:1]
        gathered = _all_gather(x)
        return _all_gather(head), gathered, _all_gather(jnp.concatenate([head, gathered]))

    results = on_replicas(step, [np.array([1.0, 2.0]), np.array([3.0])])

    for head, gathered, both in results:
        np.testing.assert_array_equal(head, [1, 3])
        np.testing.assert_array_equal(gathered, [1, 2, 3])
        np.testing.assert_array_equal(both, [1, 1, 2, 3, 3, 1, 2, 3])


def _tape_gradient(function, x):
    with dist.GradientTape() as tape:
        tape.watch(x)
        y = function(x)
    return tape.gradient(y, x)


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
        return _tape_gradient(loss, x), jax.grad(loss)(x)

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
    ("value", "axis", "error", "message"),
    [
        (np.float32(1.0), 0, InvalidValueError, "a component is a scalar"),
        (np.ones(3), 1, InvalidValueError, r"axis 1 is out of range .* shape \(3,\)"),
        (np.ones(3), True, InvalidTypeError, "axis is True, expected an int"),
        (np.ones(3), 0.0, InvalidTypeError, r"axis is 0\.0, expected an int"),
    ],
)
def test_misuse(value, axis, error, message, on_replicas):
    with pytest.raises(error, match=message):
        on_replicas(lambda x: _all_gather(x, axis), [value, value])


@pytest.mark.parametrize("shape", [(0, 2), (2, 0)])
def test_nothing_to_gather(shape, on_replicas):
    results = on_replicas(lambda x: (_all_gather(x, 0), _all_gather(x, 1)), [np.zeros(shape)] * 2)

    for rows, columns in results:
        assert rows.shape == (2 * shape[0], shape[1])
        assert columns.shape == (shape[0], 2 * shape[1])
