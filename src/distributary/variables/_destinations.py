"""Destinations: the devices that the result of a reduction goes to."""

import jax

from distributary.devices import Nest, local_copy, resolve_device, uncommitted
from distributary.errors import InvalidValueError, shown
from distributary.tracing import current_scope


def check_destinations(destinations: object) -> None:
    """Refuses values that name no device.

    Raises:
        InvalidValueError: for None, numbers, lists, tuples and an empty string.
    """
    unusable = destinations is None or isinstance(destinations, (int, list, tuple))
    if unusable or (isinstance(destinations, str) and not destinations):
        raise InvalidValueError(
            f"destinations is {shown(destinations)}, expected a device such as 'CPU:0', or a value"
            " or variable whose devices are meant."
        )


def at_device(value: Nest, device: jax.Device) -> Nest:
    """Moves a nest of arrays to one device; an array with a copy there becomes that copy."""

    def moved(leaf: jax.Array) -> jax.Array:
        if isinstance(leaf, jax.core.Tracer):
            return leaf
        if isinstance(leaf, jax.Array) and leaf.is_fully_replicated:
            for shard in leaf.addressable_shards:
                if shard.device == device:
                    return uncommitted(shard.data)
        return uncommitted(jax.device_put(local_copy(leaf), device))

    return jax.tree.map(moved, value)


def only_device(destinations: object) -> jax.Device | None:
    """Returns the one device that `destinations` names or lies on; None if it is not one.

    Also returns None in a step and in a `distributary.function`, which compute on their own
    devices.

    Raises:
        DeviceError: for a device that this process does not have.
    """
    if current_scope() is not None:
        return None
    if isinstance(destinations, (str, jax.Device)):
        return resolve_device(destinations)
    if isinstance(destinations, jax.core.Tracer):
        return None
    if isinstance(destinations, jax.Array):
        devices = destinations.devices()
        return next(iter(devices)) if len(devices) == 1 else None
    device = getattr(destinations, "device", None)  # a copy of a variable
    return device if isinstance(device, jax.Device) else None
