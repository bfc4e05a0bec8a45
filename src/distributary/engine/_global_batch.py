"""Batches of the global view, whose rows are sharded over the replicas."""

import functools
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from distributary.devices import Nest, local_copy, local_devices, local_replicas, put_rows
from distributary.engine._placement import Placement


@final
@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["num_rows", "dim"]
)
@dataclass(frozen=True, eq=False, slots=True)
class GlobalBatch:
    """A batch of all replicas as a step gets it: one array per leaf, its rows sharded over them.

    Attributes:
        arrays: Nest of arrays `[num_rows, ...]`, or `[step, num_rows, ...]`, padded to a multiple
            of the number of replicas.
        num_rows: For every array, the number of rows without padding; None for an array without
            rows, which every device has as a whole.
        dim: The dim that counts rows.
    """

    arrays: Nest
    num_rows: tuple[int | None, ...]
    dim: int


def global_batch(batch: Nest, placement: Placement, dim: int, is_own: bool) -> GlobalBatch:
    """Lays a batch out for a step of the global view; its program drops the padding again.

    Args:
        batch: Nest of arrays. Arrays may differ in their number of rows.
        placement: The devices.
        dim: The dim that counts rows.
        is_own: Whether the arrays have only the rows of this process's replicas, equally many for
            each; else every process has the whole batch.
    """
    num_replicas, stacked = placement.num_replicas, placement.stacked
    assert stacked is not None
    own = local_replicas(stacked) if placement.is_of_job else range(num_replicas)
    leaves, tree = jax.tree.flatten(batch)
    num_rows: list[int | None] = []
    for i, leaf in enumerate(leaves):
        if np.ndim(leaf) <= dim:
            num_rows.append(None)
            leaves[i] = placement.place_alone(leaf)
            continue
        size = leaf.shape[dim]
        if is_own:
            num_rows.append(size // len(own) * num_replicas)
        else:
            num_rows.append(size)
            missing = -size % num_replicas
            if missing:
                pad = jnp.pad if isinstance(leaf, jax.Array) else np.pad
                leaf = pad(leaf, [(0, missing if k == dim else 0) for k in range(leaf.ndim)])
            if len(own) < num_replicas:
                each = leaf.shape[dim] // num_replicas
                rows = slice(own.start * each, own.stop * each)
                leaf = np.asarray(local_copy(leaf))[(*[slice(None)] * dim, rows)]
        leaves[i] = _placed(leaf, placement, dim)
    return GlobalBatch(jax.tree.unflatten(tree, leaves), tuple(num_rows), dim)


def _placed(rows: Any, placement: Placement, dim: int) -> Any:
    """Puts the rows of this process's replicas on their devices, unless the program does it."""
    sharding = placement.of_rows(dim)
    if isinstance(rows, jax.Array):
        if sharding.is_fully_addressable:
            return jax.device_put(rows, sharding)
        rows = np.asarray(local_copy(rows))
    if placement.takes_host_arrays:
        return rows
    return put_rows(rows, sharding, local_devices(sharding), dim)
