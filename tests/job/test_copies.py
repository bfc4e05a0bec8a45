"""Checksums tell copies of arrays apart, on the host as on a device."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from distributary.job import _consensus

_DTYPES = ["bool", "int8", "uint16", "int32", "float32", "complex64", "bfloat16", "float8_e4m3fn"]


@pytest.fixture(params=["host", "device"])
def sums_of(request):
    """A function that returns the checksums of arrays."""

    def sums_of(arrays):
        arrays = [jnp.asarray(array) for array in arrays]
        if request.param == "host":
            return _consensus.checksums(arrays)[0]
        return np.asarray(_consensus.checksums_on_device(arrays)).tolist()

    return sums_of


@pytest.mark.parametrize("dtype", _DTYPES)
def test_values_and_their_order_count(dtype, sums_of):
    array = np.arange(12).reshape(3, 4).astype(jnp.dtype(dtype))
    changed, swapped = array.copy(), array.copy()
    changed[2, 3] = 0
    swapped[0, 0], swapped[0, 1] = array[0, 1], array[0, 0]

    one, other, *different = sums_of([array, array.copy(), changed, swapped])

    assert one == other
    assert one not in different


def test_all_nans_are_one_and_keys_and_numbers_without_dims_count(sums_of):
    usual, other = np.array([0x7FC00000, 0xFFC00001], np.uint32).view(np.float32)
    moved = np.array([[np.nan, 1], [1, np.nan]], ml_dtypes.bfloat16)
    keys = [jax.random.key(0), jax.random.key(1)]
    arrays = [np.array([1, usual]), np.array([1, other]), np.ones(2, "f"), *moved, *keys]

    first, second, *others = sums_of([*arrays, np.float32(1), np.float32(2)])

    assert first == second
    assert len({first, *others}) == 1 + len(others)
