"""Checksums tell copies of arrays apart, on the host as on a device."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from distributary.job import _copies

_DTYPES = ["bool", "int8", "uint16", "int32", "float32", "complex64", "bfloat16", "float8_e4m3fn"]


def _sums(arrays):
    """Returns checksums of arrays, after a comparison with those that a device computes."""
    arrays = [jnp.asarray(array) for array in arrays]
    ((*sums,),) = _copies.checksums(arrays)
    assert sums == np.asarray(_copies._checksums_on_device(arrays)).tolist()
    return sums


@pytest.mark.parametrize("dtype", _DTYPES)
def test_values_and_their_order_count(dtype):
    array = np.arange(12).reshape(3, 4).astype(jnp.dtype(dtype))
    changed, swapped = array.copy(), array.copy()
    changed[2, 3] = 0
    swapped[0, 0], swapped[0, 1] = array[0, 1], array[0, 0]

    one, other, *different = _sums([array, array.copy(), changed, swapped])

    assert one == other
    assert one not in different


def test_all_nans_are_one():
    usual, other = np.array([0x7FC00000, 0xFFC00001], np.uint32).view(np.float32)

    first, second, number = _sums([np.array([1, usual]), np.array([1, other]), np.ones(2, "f")])

    assert first == second != number
    assert len(set(_sums(np.array([[np.nan, 1], [1, np.nan]], ml_dtypes.bfloat16)))) == 2


def test_keys_and_numbers_without_dims_count():
    assert len(set(_sums([np.float32(1), np.float32(2)]))) == 2
    keys = [jax.random.key(0), jax.random.key(1)]
    assert len(set(*_copies.checksums(keys))) == 2


def test_large_arrays_are_summed_in_parts(monkeypatch):
    array = np.random.default_rng(0).integers(0, 2**32, 1000, np.uint32)
    whole = _sums([array])
    monkeypatch.setattr(_copies, "_WORDS_AT_A_TIME", 7)

    assert _sums([array]) == whole
