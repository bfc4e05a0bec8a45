"""The devices of a strategy and their mesh."""

import functools
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from distributary.devices._jax_private import backends_started
from distributary.devices._local_devices import (
    DeviceName,
    local_devices_of,
    name_of,
    prepare_cpu_threads,
    prepare_local_devices,
    requested_cpu_devices,
    resolve_device,
    set_logical_cpu_devices,
)
from distributary.errors import DeviceError

REPLICA_AXIS = "replica"
"""The mesh axis over which replicas are spread."""
LOCAL_AXIS = "local"
"""The axis of the replicas of a host in the meshes of `sharding_on`; `"host"` has the hosts."""


def replica_devices(devices: Sequence[str | jax.Device] | None) -> tuple[jax.Device, ...]:
    """Finds the devices of this process that run one replica each; starts the JAX backends.

    If JAX has not started, CPU devices in the list are made as logical devices.

    Args:
        devices: Device strings (see `parse_device`) or `jax.Device` objects, all of one kind; None
            for all GPUs of this process, else all TPUs, else all CPU devices.

    Returns:
        The devices in replica-id order, which is the order of the list.

    Raises:
        DeviceError: if `devices` is empty or not a list, or one of the devices cannot be parsed,
            does not exist, belongs to another process, appears twice, or is of another kind than
            the rest.

    Source: argument `devices` of `tf.distribute.MirroredStrategy`.
    """
    if devices is None:
        jax_devices = _all_devices_of_the_best_kind()
    else:
        elements = _checked_list(devices)
        names = tuple(name_of(element) for element in elements)
        _check_names(elements, names)
        jax_devices = _resolve_all(elements, names)
    if jax_devices[0].platform == "cpu":
        prepare_cpu_threads(len(jax_devices))  # JAX has started by now, so this only warns
    return jax_devices


def make_mesh(
    devices: Sequence[jax.Device] | Sequence[Sequence[jax.Device]],
) -> jax.sharding.Mesh:
    """Makes a mesh with the axis `REPLICA_AXIS`; replica `i` is on `devices[i]`.

    Args:
        devices: One device per replica, or the same number of logical devices for each. The devices
            may belong to several processes, and have to be in the same order in each. Logical
            devices lie along further axes, one for each prime factor of their number, so that
            arrays can be split over them in every possible way.
    """
    grid = np.array(devices, dtype=object)
    factors = _prime_factors(grid.size // len(grid))
    axes = (REPLICA_AXIS, *(f"core{i}" for i in range(len(factors))))
    # Explicit, because JAX changes its defaults: since 0.11, abstract meshes default to `Explicit`.
    axis_types = (AxisType.Auto,) * len(axes)
    return jax.sharding.Mesh(grid.reshape(len(grid), *factors), axes, axis_types)


def sharding_on(mesh: jax.sharding.Mesh, spec: P) -> NamedSharding:
    """Returns a sharding over the devices of a mesh, whose spec may use `LOCAL_AXIS` as well."""
    return NamedSharding(_by_host(mesh) if LOCAL_AXIS in spec else mesh, spec)


@functools.lru_cache(maxsize=32)
def _by_host(mesh: jax.sharding.Mesh) -> jax.sharding.Mesh:
    grid, (_, *others) = mesh.devices, mesh.axis_names
    axes = ("host", LOCAL_AXIS, *others)
    shape = (num_hosts(mesh), -1, *grid.shape[1:])
    return jax.sharding.Mesh(grid.reshape(shape), axes, (AxisType.Auto,) * len(axes))


def num_hosts(mesh: jax.sharding.Mesh) -> int:
    """Returns the number of processes that have devices of a mesh, the same number each."""
    return len({device.process_index for device in mesh.devices.flat})


def make_abstract_mesh(num_replicas: int) -> jax.sharding.AbstractMesh:
    """Returns the mesh of `make_mesh` for devices of another process, one per replica."""
    return jax.sharding.AbstractMesh((num_replicas,), (REPLICA_AXIS,), (AxisType.Auto,))


def num_logical_devices(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> int:
    """Returns the number of devices that each replica has in a mesh."""
    return int(mesh.size // mesh.shape[REPLICA_AXIS])


def _prime_factors(number: int) -> list[int]:
    factors = []
    factor = 2
    while number > 1:
        while number % factor == 0:
            factors.append(factor)
            number //= factor
        factor += 1
    return factors


def host_groups(devices: Sequence[jax.Device]) -> tuple[tuple[int, ...], ...]:
    """Groups replicas that are close to each other, if devices have two levels of distance.

    Args:
        devices: One device per replica, in replica-id order.

    Returns:
        The replica ids of each slice, or of each process if there is one slice. Empty unless there
        are several groups of the same size, which is at least 2. The hosts of one TPU slice are not
        groups, because its chips are connected directly.
    """
    is_tpu = bool(devices) and devices[0].platform == "tpu"
    for attribute in ("slice_index",) if is_tpu else ("slice_index", "process_index"):
        groups: dict[int | None, list[int]] = {}
        for replica_id, device in enumerate(devices):
            groups.setdefault(getattr(device, attribute, None), []).append(replica_id)
        if len(groups) > 1:
            sizes = {len(group) for group in groups.values()}
            return tuple(map(tuple, groups.values())) if len(sizes) == 1 and min(sizes) > 1 else ()
    return ()


def _all_devices_of_the_best_kind() -> tuple[jax.Device, ...]:
    if not backends_started():
        prepare_local_devices()
    for kind in ("GPU", "TPU", "CPU"):
        if devices := local_devices_of(kind):
            return devices
    raise DeviceError(
        f"This process has no GPU, TPU or CPU device, only {jax.local_devices()}. Pass the devices"
        " to use as a list."
    )


def _checked_list(devices: Sequence[str | jax.Device]) -> tuple[str | jax.Device, ...]:
    if isinstance(devices, (str, jax.Device)):
        name_of(devices)  # or there is more to say
        raise DeviceError(
            f"devices is {devices!r}, expected a list with one device per replica: pass"
            f" [{devices!r}]."
        )
    if not isinstance(devices, (Sequence, np.ndarray)):
        raise DeviceError(
            f"devices is {devices!r} ({type(devices).__name__}), expected a list with one device"
            " per replica, such as ['GPU:0', 'GPU:1'], or None for all devices."
        )
    if len(devices) == 0:
        raise DeviceError(
            "devices is an empty list, expected one device per replica; pass None (or no devices)"
            " to use all devices of this process."
        )
    return tuple(devices)


def _check_names(elements: Sequence[str | jax.Device], names: Sequence[DeviceName]) -> None:
    """Checks that devices are distinct and of one kind."""
    first_replica_on: dict[DeviceName, int] = {}
    for replica_id, name in enumerate(names):
        earlier = first_replica_on.setdefault(name, replica_id)
        if earlier != replica_id:
            raise DeviceError(
                f"Replicas {earlier} and {replica_id} are both on {name}:"
                f" {elements[earlier]!r} and {elements[replica_id]!r} are the same device. Name"
                " each device once."
            )
        if name.kind != names[0].kind:
            raise DeviceError(
                f"{elements[replica_id]!r} is a {name.kind} and {elements[0]!r} is a"
                f" {names[0].kind}: the replicas of one strategy run one program, so all devices"
                f" must be of one kind. Remove the devices that are no {names[0].kind}."
            )


def _resolve_all(
    elements: Sequence[str | jax.Device], names: Sequence[DeviceName]
) -> tuple[jax.Device, ...]:
    num_cpu_devices = 1 + max(name.index for name in names) if names[0].kind == "CPU" else 1
    if not backends_started():
        if num_cpu_devices > requested_cpu_devices():
            set_logical_cpu_devices(num_cpu_devices)
        else:
            prepare_local_devices()
    return tuple(
        resolve_device(element, num_cpu_devices_wanted=num_cpu_devices) for element in elements
    )
