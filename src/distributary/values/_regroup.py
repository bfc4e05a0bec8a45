"""Conversion of nests with distributed values to components, and back to plain values."""

from typing import Any

import jax

from distributary.values._distributed import DistributedValues, Mirrored
from distributary.values._indexed_slices import IndexedSlices


def is_distributed(value: Any) -> bool:
    """Returns whether `value` is a leaf with a component per replica, or rows of a table."""
    return isinstance(value, (DistributedValues, IndexedSlices))


def map_leaves(function: Any, tree: Any) -> Any:
    """Applies a function to a nest's leaves, including distributed values and `IndexedSlices`."""
    return jax.tree.map(function, tree, is_leaf=is_distributed)


def local_results(value: Any) -> tuple[Any, ...]:
    """Returns the components of this process's replicas, in order; `(value,)` if it has none.

    A nest that holds distributed values becomes one nest per replica.

    Source: `tf.distribute.Strategy.experimental_local_results`.
    """
    if isinstance(value, DistributedValues):
        return value.values
    leaves, tree = jax.tree.flatten(value, is_leaf=is_distributed)
    counts = {len(leaf.values) for leaf in leaves if isinstance(leaf, DistributedValues)}
    if not counts:
        return (value,)
    parts = [
        leaf.values if isinstance(leaf, DistributedValues) else (leaf,) * max(counts)
        for leaf in leaves
    ]
    return tuple(jax.tree.unflatten(tree, [part[i] for part in parts]) for i in range(max(counts)))


def unwrap_mirrored(tree: Any) -> Any:
    """Returns the nest with every `Mirrored` replaced by the value it holds."""
    return map_leaves(lambda leaf: leaf.value() if isinstance(leaf, Mirrored) else leaf, tree)
