"""Conversion of nests with distributed values to components, and back to plain values."""

from collections.abc import Callable
from typing import Any

import jax

from distributary.devices import Nest
from distributary.variables._distributed import DistributedValues, Mirrored, PerReplica
from distributary.variables._indexed_slices import IndexedSlices

# The order of the keys in dicts, which JAX sorts.


def key_order(nest: Nest) -> Any:
    """Returns the order of the keys in the dicts of a nest, for `in_order`.

    None means that JAX keeps it, because the keys are sorted.
    """
    if type(nest) is dict:
        orders = {key: key_order(part) for key, part in nest.items()}
        is_sorted = len(nest) < 2 or [*nest] == sorted(nest)
        return orders if not is_sorted or any(o is not None for o in orders.values()) else None
    if isinstance(nest, (tuple, list)):
        parts = [key_order(part) for part in nest]
        return parts if any(part is not None for part in parts) else None
    return None


def in_order(nest: Nest, order: Any) -> Any:
    """Returns a nest of the same structure with its keys in an order that `key_order` returned."""
    if order is None:
        return nest
    if type(nest) is dict:
        return {key: in_order(nest[key], part) for key, part in order.items()}
    parts = [in_order(part, keys) for part, keys in zip(nest, order, strict=True)]
    return type(nest)(*parts) if hasattr(nest, "_fields") else type(nest)(parts)


# Conversion


def _is_distributed(value: object) -> bool:
    """Returns whether `value` is a leaf with a component per replica, or rows of a table."""
    return isinstance(value, (DistributedValues, IndexedSlices))


def map_leaves(function: Callable[[Any], Nest], tree: Nest) -> Nest:
    """Applies a function to a nest's leaves, including distributed values and `IndexedSlices`."""
    return jax.tree.map(function, tree, is_leaf=_is_distributed)


def component_of_traced(leaf: Any) -> Any:
    """Returns the component of the replica that is traced, and anything else unchanged."""
    if isinstance(leaf, PerReplica) and leaf.form == "local":
        return leaf.payload
    return leaf.value() if isinstance(leaf, Mirrored) else leaf


def local_results(value: Nest) -> tuple[Any, ...]:
    """Returns the components of this process's replicas, in order; `(value,)` if it has none.

    A nest that holds distributed values becomes one nest per replica.

    Source: `tf.distribute.Strategy.experimental_local_results`.
    """
    if isinstance(value, DistributedValues):
        return value.values
    leaves, tree = jax.tree.flatten(value, is_leaf=_is_distributed)
    counts = {len(leaf.values) for leaf in leaves if isinstance(leaf, DistributedValues)}
    if not counts:
        return (value,)
    parts = [
        leaf.values if isinstance(leaf, DistributedValues) else (leaf,) * max(counts)
        for leaf in leaves
    ]
    order = key_order(value)
    return tuple(
        in_order(jax.tree.unflatten(tree, [part[i] for part in parts]), order)
        for i in range(max(counts))
    )
