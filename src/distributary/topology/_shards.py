"""Arrays that are stored in parts, one on every device of a mesh.

A part is a slice along one dim. If the size of the dim is not a multiple of the number of devices,
the array is stored with zeros at its end. Only code that runs in a program sees this padding.
"""

import math
from collections.abc import Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from distributary.topology._discovery import REPLICA_AXIS
from distributary.topology._placement import local_copy

__all__ = [
    "padded",
    "put_sharded",
    "shard_dim",
    "shard_spec",
    "stored_shards",
    "unpadded",
    "whole_shards",
]


_Array = TypeVar("_Array", jax.Array, np.ndarray)


def shard_spec(shape: Sequence[int], num_shards: int) -> P:
    """Returns the sharding with the smallest parts: along the dim that needs the least padding.

    Scalars and empty arrays are not partitioned.
    """
    if num_shards == 1 or not shape or 0 in shape:
        return P()
    sizes = [math.ceil(size / num_shards) / size for size in shape]
    return P(*(None,) * sizes.index(min(sizes)), REPLICA_AXIS)


def shard_dim(sharding: object) -> int | None:
    """Returns the dim that a sharding or its spec partitions over the replicas; None if none."""
    spec = getattr(sharding, "spec", sharding)
    if not isinstance(spec, P) or REPLICA_AXIS not in spec:
        return None
    return tuple(spec).index(REPLICA_AXIS)


def stored_shards(value: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Returns a whole value as it is stored, with the partitioned dim padded; call in a program."""
    dim = shard_dim(sharding)
    stored = value if dim is None else padded(value, dim, sharding.mesh.shape[REPLICA_AXIS])
    return jax.lax.with_sharding_constraint(stored, sharding)


def whole_shards(stored: jax.Array, shape: Sequence[int], sharding: NamedSharding) -> jax.Array:
    """Returns the whole value without its padding; its parts do not move. Call in a program."""
    if shard_dim(sharding) is None or stored.shape == tuple(shape):
        return stored
    return jax.lax.with_sharding_constraint(unpadded(stored, shape), sharding)


def padded(value: jax.Array, dim: int, num_shards: int) -> jax.Array:
    """Appends zeros to `dim`, so that `num_shards` divides its size; call in a program."""
    return jnp.pad(value, _padding(value.shape, dim, num_shards))


def put_sharded(value: jax.Array | np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Stores a whole value, which is the same in all processes, in parts.

    Args:
        value: Array that this process can read, or one that is already stored in this way.
        sharding: Sharding that partitions one dim.
    """
    if isinstance(value, jax.Array) and value.sharding == sharding:
        return value
    dim = shard_dim(sharding)
    assert dim is not None
    host = np.asarray(local_copy(value))
    stored = np.pad(host, _padding(host.shape, dim, sharding.mesh.shape[REPLICA_AXIS]))
    return jax.make_array_from_callback(stored.shape, sharding, lambda part: stored[part])


def _padding(shape: Sequence[int], dim: int, num_shards: int) -> list[tuple[int, int]]:
    return [(0, -size % num_shards if i == dim else 0) for i, size in enumerate(shape)]


def unpadded(stored: _Array, shape: Sequence[int]) -> _Array:
    """Returns a stored array without the padding at its end."""
    return stored[tuple([slice(size) for size in shape])]
