"""What a merged function does with values of replicas; the call itself is in tests/context/."""

import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist
from distributary.errors import InvalidValueError


def _merge(function, *args, **kwargs):
    return dist.get_replica_context().merge_call(function, args, kwargs)


def test_gather_inside(on_replicas):
    results = on_replicas(
        lambda x: _merge(lambda s, x: s.gather(x, 0), x), [np.ones(2), np.full(2, 3.0)]
    )

    np.testing.assert_array_equal(results[0], [1, 1, 3, 3])


def test_gradient_through_merge_call(on_replicas):
    def step(x):
        with dist.GradientTape() as tape:
            tape.watch(x)
            y = _merge(lambda s, x: s.reduce("SUM", x, None), x * x)
        return tape.gradient(y, x)

    assert on_replicas(step, [1.0, 2.0]) == (4.0, 8.0)


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_indexed_slices_are_reduced_by_concatenation(op, on_replicas):
    def step(rows):
        slices = dist.IndexedSlices(rows, jnp.array([0]), (3, 2))
        return _merge(lambda s, g: s.extended.reduce_to(op, g, "CPU:0"), slices)

    results = on_replicas(step, [np.full((1, 2), 1.0), np.full((1, 2), 3.0)])

    scale = 1.0 if op == "SUM" else 0.5
    np.testing.assert_array_equal(results[0].indices, [0, 0])
    np.testing.assert_array_equal(results[0].values, np.array([[1, 1], [3, 3]]) * scale)


def test_summing_what_is_the_same_everywhere_is_refused(on_replicas):
    with pytest.raises(InvalidValueError, match=r"cannot SUM .* over 2 replicas"):
        on_replicas(lambda x: _merge(lambda s, n: s.reduce("SUM", n, None), 3), [1.0, 2.0])
