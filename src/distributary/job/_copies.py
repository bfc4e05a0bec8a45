"""Comparisons of the copies that workers hold of values that must be the same on all of them."""

import math
import time
import zlib
from collections.abc import Sequence
from typing import Any, final

import google_crc32c
import jax
import jax.numpy as jnp
import numpy as np

from distributary.devices import job_programs
from distributary.errors import InvalidValueError
from distributary.job._consensus import consensus

# Share of the time of steps that comparisons may take.
_SHARE = 0.002
# Bounds of the number of programs between two comparisons.
_MIN_INTERVAL, _MAX_INTERVAL = 32, 1 << 16


@final
class Copies:
    """A comparison of copies now and then, because they can drift apart.

    Rounding, broken hardware or a mistake can cause that. Every worker counts the same programs, so
    all of them compare at the same time.

    Attributes:
        num_left: Number of programs until the next comparison.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Counts from the beginning, as all workers do after a difference between them."""
        self.num_left = self._interval = _MIN_INTERVAL
        self._compared_at = time.perf_counter()

    @property
    def is_half_due(self) -> bool:
        """True if half of the programs between two comparisons are over, or none was made yet."""
        return self.num_left <= self._interval // 2 or self._interval == _MIN_INTERVAL

    def compare(self, what: str, names: Sequence[str], arrays: Sequence[Any]) -> None:
        """Compares copies, on all workers together.

        Args:
            what: Name of the moment, for people.
            names: Names of the values.
            arrays: The values, the same on every device of every worker.

        Raises:
            WorkerMismatchError: on every worker, if they differ.
        """
        job = consensus()
        if job is None or not arrays:
            return
        try:
            jax.block_until_ready(arrays)
        except (ValueError, jax.errors.JaxRuntimeError) as error:  # from the previous program
            raise job_programs.explained(error) from error
        begin = time.perf_counter()
        step_seconds = (begin - self._compared_at) / max(1, self._interval - self.num_left)
        sums = checksums(arrays)
        reports = job.agree(
            f"a comparison of variables {what}",
            lambda: [sums, time.perf_counter() - begin, step_seconds],
        )
        seconds = max(of_worker[1] for of_worker in reports)
        shortest = max(1e-6, min(of_worker[2] for of_worker in reports))
        interval = math.ceil(seconds / (_SHARE * shortest))
        self.num_left = self._interval = min(max(_MIN_INTERVAL, interval), _MAX_INTERVAL)
        self._compared_at = time.perf_counter()
        seen = [of_worker[0] for of_worker in reports]
        if any(row != seen[0][0] for of_worker in seen for row in of_worker):
            raise job.mismatch(_drifted(what, names, job.names, seen))


def _drifted(what: str, names: Sequence[str], workers: Sequence[str], seen: Sequence[Any]) -> str:
    columns = [[row[i] for rows in seen for row in rows] for i in range(len(names))]
    drifted = [i for i, column in enumerate(columns) if len(set(column)) > 1]
    first = columns[drifted[0]]
    usual = max(first, key=first.count)
    others = [
        worker
        for worker, rows in zip(workers, seen, strict=True)
        if any(row[drifted[0]] != usual for row in rows)
    ]
    example = next((worker for worker in workers if worker not in others), "another device")
    more = f" (and those of {len(drifted) - 1} more variables)" if len(drifted) > 1 else ""
    return (
        f"The copies of variable {names[drifted[0]]!r}{more} have drifted apart, found {what}:"
        f" {', '.join(others)} holds other values than {example}."
        " Continue from the last checkpoint. Possible causes are something that only one worker"
        " computes, machines of different kinds, and broken hardware."
    )


copies = Copies()


def checksums(arrays: Sequence[jax.Array]) -> list[list[int]]:
    """Returns a checksum of every array, on each device of this process."""
    shards = zip(*([s.data for s in array.addressable_shards] for array in arrays), strict=True)
    sums = [_checksums(list(parts)) for parts in shards]
    return [np.asarray(one).tolist() for one in sums]


def _checksums(arrays: list[jax.Array]) -> Any:
    if all(device.platform == "cpu" for array in arrays for device in array.devices()):
        # Arrays of CPUs need not be copied, and a program for all of them takes long to compile.
        return [_checksum_on_host(array) for array in map(_without_keys, arrays)]
    return checksums_on_device(arrays)


def _checksum_on_host(array: jax.Array) -> int:
    values = np.ascontiguousarray(_with_one_nan(np.asarray(array), np))
    return int(google_crc32c.value(values.reshape(-1).view(np.uint8)))


@jax.jit
def checksums_on_device(arrays: list[jax.Array]) -> jax.Array:
    """Returns a checksum of every array, computed where the arrays lie."""
    sums = []
    for array in map(_without_keys, arrays):
        words = _words(_with_one_nan(array, jnp))
        # An odd weight for each word, so that the sum depends on all of their bits.
        weights = 2 * jnp.arange(words.size, dtype=jnp.uint32) + 1
        sums.append(jnp.sum(words * weights, dtype=jnp.uint32))
    return jnp.stack(sums)


def _without_keys(array: jax.Array) -> jax.Array:
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(array) if is_key else array


def _with_one_nan(array: Any, numpy: Any) -> Any:
    """Returns an array in which all NaNs are the same, with complex numbers as pairs.

    The bits of a sum of two NaNs depend on their order.

    Args:
        array: The array.
        numpy: The module that computes: `numpy` or `jax.numpy`.
    """
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = numpy.stack([array.real, array.imag])
    if jnp.issubdtype(array.dtype, jnp.floating):
        array = numpy.where(numpy.isnan(array), numpy.asarray(np.nan, array.dtype), array)
    return array


def _words(array: jax.Array) -> jax.Array:
    """Returns the bits of an array as a vector of words."""
    bits = jax.dtypes.itemsize_bits(array.dtype)
    if bits < 8 or array.dtype == np.bool_:
        return array.astype(np.float32).astype(np.int32).astype(np.uint32).ravel()
    unsigned = jnp.dtype(f"uint{min(bits, 32)}")  # 64-bit numbers become pairs of words
    return array.ravel().view(unsigned).astype(np.uint32)


# Data that all workers were given


def check_same_data(what: str, fingerprints: Sequence[int]) -> None:
    """Checks that all workers, each of which takes its rows, were given the same data.

    Args:
        what: Name of the data, for the error.
        fingerprints: That of each worker's data.

    Raises:
        InvalidValueError: if a worker has other data than worker 0.
    """
    others = [worker for worker, seen in enumerate(fingerprints) if seen != fingerprints[0]]
    if others:
        names = ", ".join(f"worker {number}" for number in others)
        raise InvalidValueError(
            f"{what} is not the same on all workers: {names} got another one than worker 0. Every"
            " worker is given all of the data, in the same order, and takes its own rows. Load the"
            " same files, and seed what shuffles or draws (keras.utils.set_random_seed). To give"
            " each worker its own part of the data, use"
            " strategy.distribute_datasets_from_function."
        )


def fingerprint(nest: object) -> int:
    """Returns a number that tells nests with other arrays, or of another structure, apart."""
    leaves, tree = jax.tree.flatten(nest)
    seen = zlib.crc32(str(tree).encode())
    for array in map(np.asarray, leaves):
        # The bytes of an array of objects are addresses.
        content = repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes()
        seen = zlib.crc32(f"{array.shape}{array.dtype}".encode(), seen)
        seen = zlib.crc32(content, seen)
    return seen
