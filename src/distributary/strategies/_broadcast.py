"""Broadcasts arrays of the chief to every worker."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from distributary.devices import JobEvent, dispatcher_for, job_programs, local_replicas, put_stacked
from distributary.job import consensus

# Up to this size, sending through the host is faster, also because nothing is compiled.
_MAX_HOST_BYTES = 1 << 16
# Every device gets a copy of each piece.
_PIECE_BYTES = 32 << 20
_NOTHING = np.empty(0, np.uint8)


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
    place = f"{what}, {', '.join(f'{v.dtype}{list(v.shape)}' for v in values)}"
    job = consensus()
    assert job is not None
    buffers = [_bytes_of(np.ascontiguousarray(value)) for value in values]
    results = [np.empty(value.shape, value.dtype) for value in values]
    targets = [_bytes_of(result) for result in results]
    if num_bytes <= _MAX_HOST_BYTES:
        sent = job.broadcast(place, lambda: np.concatenate([*buffers, _NOTHING]).tobytes())
        _fill(targets, np.frombuffer(sent, np.uint8))
        return results
    job_programs.begin(JobEvent(place))
    for piece in _pieces([target.size for target in targets]):
        sources = [buffers[i][part] for i, part in piece] if job.number == 0 else []
        size = sum(part.stop - part.start for _, part in piece)
        received = _sum(np.concatenate([*sources, _NOTHING]), size, sharding)
        _fill([targets[i][part] for i, part in piece], received)
    return results


def _bytes_of(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def _fill(targets: list[np.ndarray], received: np.ndarray) -> None:
    at = 0
    for target in targets:
        target[...] = received[at : at + target.size]
        at += target.size


def _pieces(sizes: list[int]) -> Iterator[list[tuple[int, slice]]]:
    """Yields groups of parts of arrays with these sizes; each group has at most `_PIECE_BYTES`."""
    piece: list[tuple[int, slice]] = []
    free = _PIECE_BYTES
    for i, size in enumerate(sizes):
        start = 0
        while start < size:
            stop = min(size, start + free)
            piece.append((i, slice(start, stop)))
            free -= stop - start
            start = stop
            if not free:
                yield piece
                piece, free = [], _PIECE_BYTES
    if piece:
        yield piece


def _sum(data: np.ndarray, num_bytes: int, sharding: Any) -> np.ndarray:
    """Sums bytes over workers, of which only the chief has any; returns at least `num_bytes`."""
    # A power of two of words, so that only a few sizes are compiled.
    num_words = 1 << max(4, (max(1, -(-num_bytes // 4)) - 1).bit_length())
    rows = np.zeros((len(local_replicas(sharding)), num_words), np.uint32)
    rows[0].view(np.uint8)[: data.size] = data
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
