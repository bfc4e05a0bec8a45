"""Reads arrays that are stored in parts, as a whole."""

import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from distributary.devices._dispatcher import dispatcher_for
from distributary.devices._job_events import JobEvent, job_programs
from distributary.devices._placement import local_copy, unpadded


def fetch_whole(stored: jax.Array, shape: Sequence[int]) -> np.ndarray:
    """Returns the whole value, of shape `shape`, of an array that is stored in parts.

    This is a collective: with several processes, all of them have to call it at the same point.
    """
    if not stored.is_fully_addressable and not stored.is_fully_replicated:
        # No other program may be in flight on the devices when this one meets its collectives.
        stored.block_until_ready()
        mesh = stored.sharding.mesh  # type: ignore[attr-defined]
        job_programs.begin(JobEvent(f"reading an array in parts, {stored.dtype}{list(shape)}"))
        dispatcher = dispatcher_for(tuple(mesh.devices.flat))
        stored = dispatcher.run(_gather_on(mesh), lambda out: out, stored)
    # Of another array of the same parts, because JAX keeps what NumPy gets as long as the array.
    parts = [shard.data for shard in stored.addressable_shards]
    again = jax.make_array_from_single_device_arrays(stored.shape, stored.sharding, parts)
    whole: np.ndarray = unpadded(np.asarray(local_copy(again)), shape)
    return whole


@functools.lru_cache(maxsize=32)
def _gather_on(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda value: value, out_shardings=NamedSharding(mesh, P()))
