"""What the first worker holds, or every one, on every worker."""

import functools
from typing import Any

import jax
import numpy as np

from distributary.topology import dispatcher_for, job_programs, num_local_replicas, put_stacked


def broadcast(values: list[np.ndarray], sharding: Any) -> list[np.ndarray]:
    """What the first worker holds, on every worker.

    Args:
        values: Arrays of the same shapes and dtypes on all workers.
        sharding: Sharding of values `[replica, ...]`.
    """
    num_bytes = sum(value.nbytes for value in values)
    own = [np.ascontiguousarray(v).tobytes() for v in values] if jax.process_index() == 0 else ()
    received = _combined(b"".join(own), 0, num_bytes, sharding)
    results, at = [], 0
    for value in values:
        part = received[at : at + value.nbytes]
        results.append(part.view(value.dtype).reshape(value.shape).copy())
        at += value.nbytes
    return results


def all_workers(value: np.ndarray, sharding: Any) -> np.ndarray:
    """What each worker holds, `[worker, ...]`, on every worker.

    Args:
        value: Array of the same shape and dtype on all workers.
        sharding: Sharding of values `[replica, ...]`.
    """
    data = np.ascontiguousarray(value).tobytes()
    count, number = jax.process_count(), jax.process_index()
    received = _combined(data, number * len(data), count * len(data), sharding)
    return received[: count * len(data)].view(value.dtype).reshape(count, *value.shape)


def _combined(own: bytes, at: int, num_bytes: int, sharding: Any) -> np.ndarray:
    """Bytes to which each worker gives its own, from place `at`; at least `num_bytes`."""
    # A power of two of words, so that few sizes are compiled.
    num_words = 1 << max(4, (max(1, -(-num_bytes // 4)) - 1).bit_length())
    rows = np.zeros((num_local_replicas(sharding), num_words), np.uint32)
    rows[0].view(np.uint8)[at : at + len(own)] = np.frombuffer(own, np.uint8)
    job_programs.begin()
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
