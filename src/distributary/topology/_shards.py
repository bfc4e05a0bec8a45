"""Arrays of which every device of a mesh holds a part.

A part is a slice along one dim. Where the dim does not divide by the number of devices, the array
is stored with zeros at its end; only what is computed in a program knows that.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from distributary.topology._discovery import REPLICA_AXIS, num_logical_devices
from distributary.topology._dispatch import JobEvent, dispatcher_for, job_programs
from distributary.topology._jax_private import put_rows
from distributary.topology._placement import local_copy, local_devices

__all__ = [
    "fetch_whole",
    "padded",
    "put_sharded",
    "shard_dim",
    "shard_spec",
    "stored_shards",
    "whole_shards",
]


def shard_spec(shape: Sequence[int], num_shards: int) -> P:
    """The sharding with the smallest parts: along the dim that needs the least padding.

    Nothing is partitioned of scalars and empty arrays.
    """
    if num_shards == 1 or not shape or 0 in shape:
        return P()
    sizes = [math.ceil(size / num_shards) / size for size in shape]
    return P(*(None,) * sizes.index(min(sizes)), REPLICA_AXIS)


def shard_dim(sharding: Any) -> int | None:
    """The dim that a sharding or its spec partitions over the replicas; None for all others."""
    spec = getattr(sharding, "spec", sharding)
    if not isinstance(spec, P) or REPLICA_AXIS not in spec:
        return None
    return tuple(spec).index(REPLICA_AXIS)


def stored_shards(value: Any, sharding: NamedSharding) -> Any:
    """In a program: a whole value as it is stored, a dim that is partitioned padded."""
    dim = shard_dim(sharding)
    stored = value if dim is None else padded(value, dim, sharding.mesh.shape[REPLICA_AXIS])
    return jax.lax.with_sharding_constraint(stored, sharding)


def whole_shards(stored: Any, shape: Sequence[int], sharding: NamedSharding) -> Any:
    """In a program: the whole value, without its padding; its parts stay where they are."""
    if shard_dim(sharding) is None or stored.shape == tuple(shape):
        return stored
    return jax.lax.with_sharding_constraint(_cut(stored, shape), sharding)


def padded(value: Any, dim: int, num_shards: int) -> Any:
    """In a program: `value` with zeros at the end of `dim`, so that it divides."""
    return jnp.pad(value, _padding(value.shape, dim, num_shards))


def put_sharded(value: Any, sharding: NamedSharding) -> jax.Array:
    """A whole value, the same in all processes, stored in parts.

    Args:
        value: Array that this process can read, or that is stored like this already.
        sharding: Sharding that partitions one dim.
    """
    if isinstance(value, jax.Array) and value.sharding == sharding:
        return value
    dim = shard_dim(sharding)
    assert dim is not None
    host = np.asarray(local_copy(value))
    stored = np.pad(host, _padding(host.shape, dim, sharding.mesh.shape[REPLICA_AXIS]))
    devices = local_devices(sharding)
    cores = num_logical_devices(sharding.mesh)
    size = stored.shape[dim] // sharding.mesh.shape[REPLICA_AXIS]
    first = list(sharding.mesh.devices.flat).index(devices[0]) // cores * size
    rows = [slice(None)] * dim + [slice(first, first + len(devices) // cores * size)]
    return put_rows(stored[tuple(rows)], sharding, devices, dim)


def fetch_whole(stored: jax.Array, shape: Sequence[int]) -> np.ndarray:
    """The whole value of an array that is stored in parts; its shape is `shape`.

    With several processes all have to call it, at the same point: it is a collective.
    """
    if not stored.is_fully_addressable and not stored.is_fully_replicated:
        # No other program may be under way on the devices when this one meets its collectives.
        stored.block_until_ready()
        mesh = stored.sharding.mesh  # type: ignore[attr-defined]
        job_programs.begin(JobEvent(f"reading an array in parts, {stored.dtype}{list(shape)}"))
        dispatcher = dispatcher_for(tuple(mesh.devices.flat))
        stored = dispatcher.run(_gather_on(mesh), lambda out: out, stored)
    whole: np.ndarray = _cut(np.asarray(local_copy(stored)), shape)
    return whole


@functools.lru_cache(maxsize=32)
def _gather_on(mesh: jax.sharding.Mesh) -> Any:
    return jax.jit(lambda value: value, out_shardings=NamedSharding(mesh, P()))


def _padding(shape: Sequence[int], dim: int, num_shards: int) -> list[tuple[int, int]]:
    return [(0, -size % num_shards if i == dim else 0) for i, size in enumerate(shape)]


def _cut(stored: Any, shape: Sequence[int]) -> Any:
    return stored[tuple([slice(size) for size in shape])]
