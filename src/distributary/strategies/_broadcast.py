"""Broadcasts arrays of the chief to every worker."""

import functools
from typing import Any

import jax
import numpy as np

from distributary.devices import (
    JobEvent,
    dispatcher_for,
    job_programs,
    num_local_replicas,
    put_stacked,
)
from distributary.job import consensus

# Up to this size, sending through the host is faster, also because nothing is compiled.
_MAX_HOST_BYTES = 1 << 16


def broadcast(values: list[np.ndarray], what: str, sharding: object) -> list[np.ndarray]:
    """Returns the chief's arrays on every worker.

    Args:
        values: Arrays of the same shapes and dtypes on all workers.
        what: Name of the arrays, for people.
        sharding: Sharding of values `[replica, ...]`.

    Raises:
        WorkerMismatchError: if another worker does something else, or its arrays have other shapes
            or dtypes.
    """
    num_bytes = sum(value.nbytes for value in values)
    own = b"".join([np.ascontiguousarray(v).tobytes() for v in values])
    place = f"{what}, {', '.join(f'{v.dtype}{list(v.shape)}' for v in values)}"
    job = consensus()
    assert job is not None
    if num_bytes <= _MAX_HOST_BYTES:
        received = np.frombuffer(job.broadcast(place, lambda: own), np.uint8)
    else:
        job_programs.begin(JobEvent(place))
        received = _sum(own if job.number == 0 else b"", num_bytes, sharding)
    results, at = [], 0
    for value in values:
        part = received[at : at + value.nbytes]
        results.append(part.view(value.dtype).reshape(value.shape).copy())
        at += value.nbytes
    return results


def _sum(own: bytes, num_bytes: int, sharding: Any) -> np.ndarray:
    """Sums bytes over workers, of which only the chief has any; returns at least `num_bytes`."""
    # A power of two of words, so that only a few sizes are compiled.
    num_words = 1 << max(4, (max(1, -(-num_bytes // 4)) - 1).bit_length())
    rows = np.zeros((num_local_replicas(sharding), num_words), np.uint32)
    rows[0].view(np.uint8)[: len(own)] = np.frombuffer(own, np.uint8)
    total = dispatcher_for(tuple(sharding.mesh.devices.flat)).run(
        lambda: np.asarray(_sum_of_rows(sharding)(put_stacked(rows, sharding)).addressable_data(0)),
        lambda result: None,
    )
    return total.view(np.uint8)


@functools.lru_cache(maxsize=8)
def _sum_of_rows(sharding: Any) -> Any:
    replicated = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())

    def sum_of_rows(rows: Any) -> Any:
        return rows.sum(axis=0, dtype=rows.dtype)

    return jax.jit(sum_of_rows, out_shardings=replicated)
