"""The order of the keys in dicts, which JAX sorts."""

from typing import Any

from distributary.devices import Nest


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
