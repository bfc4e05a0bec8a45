"""NumPy arrays in dtypes that JAX can hold."""

import jax
import numpy as np

from distributary.errors import warn

_told: set[str] = set()  # dtypes


def native(array: np.ndarray) -> np.ndarray:
    """Returns an array in the byte order of this machine; a copy if it has another one."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def narrowed(array: np.ndarray, what: str) -> np.ndarray:
    """Returns a copy in the dtype that JAX holds, in the byte order of this machine.

    Warns once for each dtype of a value that does not fit.

    Args:
        array: The array.
        what: Where it comes from, for the warning.
    """
    if array.dtype.isnative and array.dtype.itemsize <= 4:
        return np.array(array)
    old_dtype = array.dtype.newbyteorder("=")
    dtype = jax.dtypes.canonicalize_dtype(old_dtype)
    with np.errstate(over="ignore"):
        held = np.array(array, dtype)
    if dtype == old_dtype or old_dtype.name in _told:
        return held
    wrong = held != array if old_dtype.kind in "iu" else np.isinf(held) & ~np.isinf(array)
    if wrong.any():
        _told.add(old_dtype.name)
        place = tuple(int(index[0]) for index in np.nonzero(np.atleast_1d(wrong)))
        warn(
            f"{what}: the value {np.atleast_1d(array)[place]} at {[*place]} of an array of dtype"
            f" {old_dtype} becomes {np.atleast_1d(held)[place]}, because JAX holds {dtype}. Choose"
            " smaller values, or call jax.config.update('jax_enable_x64', True) first."
        )
    return held
