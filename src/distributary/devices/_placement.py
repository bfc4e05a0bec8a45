"""Arrays on all devices of a mesh, even if the mesh spans processes: whole on each, or in parts.

A part is a slice along one dim over the replicas, and along others over the logical devices of each
replica. If the size of the dim over the replicas is not a multiple of their number, the array is
stored with zeros at its end. Only code that runs in a program sees this padding.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import (
    Mesh,
    NamedSharding,
    PartitionSpec as P,
    Sharding,
    SingleDeviceSharding,
)

from distributary.devices._discovery import LOCAL_AXIS, REPLICA_AXIS, num_logical_devices
from distributary.devices._dispatcher import JobEvent, Nest, dispatcher_for, job_programs
from distributary.devices._jax_private import put_rows

_CALLS_BEFORE_COMPILING = 3  # shapes that come rarely are not worth a program

HOST_MEMORY = "pinned_host"
"""JAX's memory kind for the part of the host's memory that a device can access directly."""
_Array = TypeVar("_Array", jax.Array, np.ndarray)


def has_host_memory(device: jax.Device) -> bool:
    """Returns whether arrays of a device can be stored in the memory of its host."""
    return any(memory.kind == HOST_MEMORY for memory in device.addressable_memories())


def in_host_memory(sharding: Sharding | None) -> bool:
    """Returns whether arrays with this sharding are in the memory of their device's host."""
    return getattr(sharding, "memory_kind", None) == HOST_MEMORY


def in_device_memory(value: object) -> Any:
    """Returns an array that JAX can compute with: for one in host memory, a copy on its device.

    For a sharding, returns the sharding of such a copy.
    """
    if isinstance(value, Sharding):
        return value.with_memory_kind("device") if in_host_memory(value) else value
    if isinstance(value, jax.core.Tracer):
        return value
    sharding = getattr(value, "sharding", None)
    return jax.device_put(value, in_device_memory(sharding)) if in_host_memory(sharding) else value


@functools.lru_cache(maxsize=64)
def local_devices(sharding: NamedSharding) -> list[jax.Device]:
    """Returns the devices of a mesh that belong to this process, in the order of the mesh."""
    this_process = jax.process_index()
    return [d for d in sharding.mesh.devices.flat if d.process_index == this_process]


@functools.lru_cache(maxsize=64)
def local_replicas(sharding: NamedSharding) -> range:
    """Returns the numbers of the replicas of a mesh that belong to this process."""
    devices, size = local_devices(sharding), num_logical_devices(sharding.mesh)
    first = list(sharding.mesh.devices.flat).index(devices[0]) // size
    return range(first, first + len(devices) // size)


def own_copies(arrays: list[jax.Array]) -> list[jax.Array]:
    """Copies arrays into buffers that nothing else refers to.

    The runtime copies them; `jnp.copy` would compile a program for each shape. With several
    processes, each one copies its own parts, because jax 0.10.2 cannot copy arrays that are not
    fully addressable.
    """
    parts = [
        array if array.is_fully_addressable else [shard.data for shard in array.addressable_shards]
        for array in arrays
    ]
    return [
        jax.make_array_from_single_device_arrays(array.shape, array.sharding, copies)
        if isinstance(copies, list)
        else copies
        for array, copies in zip(arrays, jax.device_put(parts, may_alias=False), strict=True)
    ]


@functools.lru_cache(maxsize=64)
def _transfer_of(
    sharding: Sharding, shapes: tuple[Any, ...]
) -> Callable[[list[np.ndarray]], Sequence[jax.Array]]:
    """Returns a function that moves arrays of these shapes from NumPy to a CPU."""
    num_calls = itertools.count(1)
    # A program takes NumPy arrays for a quarter of what `device_put` costs.
    program = jax.jit(lambda *arrays: arrays, out_shardings=sharding)

    def transfer(arrays: list[np.ndarray]) -> Sequence[jax.Array]:
        if next(num_calls) <= _CALLS_BEFORE_COMPILING:
            return jax.device_put(arrays, sharding)
        return program(*arrays)

    return transfer


def _put(value: Nest, sharding: Any) -> Nest:
    (device, *others) = sharding.device_set
    leaves, tree = jax.tree.flatten(value)
    if others or device.platform != "cpu" or not all(type(x) is np.ndarray for x in leaves):
        return jax.device_put(value, sharding)
    transfer = _transfer_of(sharding, tuple([(x.shape, x.dtype) for x in leaves]))
    return jax.tree.unflatten(tree, transfer(leaves))


def put_replicated(value: Nest, sharding: Sharding) -> Nest:
    """Puts a value on every device of a sharding; all processes of the mesh pass the same value.

    Args:
        value: Array, or nest of arrays, that this process can read.
        sharding: Sharding without a partitioned dim.
    """
    if sharding.is_fully_addressable:
        return _put(value, sharding)
    assert isinstance(sharding, NamedSharding)  # only these span processes
    devices = local_devices(sharding)

    def put(leaf: object) -> jax.Array:
        if isinstance(leaf, jax.Array) and leaf.sharding == sharding:
            return leaf
        host = np.asarray(local_copy(leaf))
        host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)
        copies = [jax.device_put(host, device) for device in devices]
        return jax.make_array_from_single_device_arrays(host.shape, sharding, copies)

    return jax.tree.map(put, value)


def put_stacked(rows: jax.Array | np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Makes an array `[replica, ...]`, with every row on the devices of its replica.

    Args:
        rows: The rows of this process's replicas, or of all replicas.
        sharding: Sharding with one replica per row.
    """
    if isinstance(rows, np.ndarray):
        own = local_replicas(sharding)
        if not sharding.is_fully_addressable and len(rows) > len(own):
            rows = rows[own.start : own.stop]
        return put_rows(rows, sharding, local_devices(sharding))
    if sharding.is_fully_addressable:
        placed: jax.Array = jax.device_put(rows, sharding)
        return placed
    if rows.sharding == sharding:
        return rows
    return put_stacked(np.asarray(local_copy(rows)), sharding)


def local_copy(value: object) -> Any:
    """Returns this process's copy of an array that is replicated across processes."""
    if isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer):
        spans_processes = not value.is_fully_addressable
        return value.addressable_data(0) if spans_processes and value.is_fully_replicated else value
    return value


def shard_spec(shape: Sequence[int], num_shards: int, spec: P = P(), axis: str = REPLICA_AXIS) -> P:
    """Returns the sharding with the smallest parts: along the dim that needs the least padding.

    Of four dims and more, those before the last two, such as the window of a convolution, are taken
    if parts are then less than half as large. Scalars and empty arrays are not partitioned.

    Args:
        shape: Shape of the array.
        num_shards: Number of parts.
        spec: A sharding over logical devices, whose dims are not divided once more. If it divides
            over replicas as well, it is returned.
        axis: `REPLICA_AXIS`, or `LOCAL_AXIS`, along which arrays are not padded: without a dim that
            divides, `spec` is returned.
    """
    axes = [*spec, *[None] * (len(shape) - len(spec))]
    free = [i for i, used in enumerate(axes) if used is None]
    if axis == LOCAL_AXIS:
        free = [i for i in free if shape[i] % num_shards == 0]
    if num_shards == 1 or 0 in shape or not free or is_gathered(spec):
        return spec
    weights = [2 if 3 < len(shape) > i + 2 else 1 for i in range(len(shape))]
    axes[min(free, key=lambda i: weights[i] * math.ceil(shape[i] / num_shards) / shape[i])] = axis
    return spec_of_axes(axes)


def spec_of_axes(axes: Sequence[Any]) -> P:
    """Returns the spec for the mesh axes of each dim, without those of whole dims at its end."""
    last = max((i for i, axis in enumerate(axes) if axis is not None), default=-1)
    return P(*axes[: last + 1])


def is_divided(sharding: object) -> bool:
    """Returns whether a sharding or its spec leaves a device only a part of an array."""
    spec = getattr(sharding, "spec", sharding)
    return isinstance(spec, P) and any(axis is not None for axis in spec)


def is_gathered(sharding: object) -> bool:
    """Returns whether a step puts the parts of replicas together before it computes with them."""
    spec = getattr(sharding, "spec", sharding)
    return shard_dim(spec) is not None or (isinstance(spec, P) and LOCAL_AXIS in spec)


def shard_dim(sharding: object) -> int | None:
    """Returns the dim that a sharding or its spec partitions over the replicas; None if none."""
    spec = getattr(sharding, "spec", sharding)
    if not isinstance(spec, P) or REPLICA_AXIS not in spec:
        return None
    return tuple(spec).index(REPLICA_AXIS)


def stored_shape(shape: Sequence[int], sharding: NamedSharding) -> tuple[int, ...]:
    """Returns the shape of an array as it is stored, with the partitioned dim padded."""
    dim = shard_dim(sharding)
    num_shards = sharding.mesh.shape.get(REPLICA_AXIS, 1)
    return tuple([n + (-n % num_shards if i == dim else 0) for i, n in enumerate(shape)])


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
    missing = -value.shape[dim] % num_shards
    return jnp.pad(value, [(0, missing if i == dim else 0) for i in range(value.ndim)])


def local_box(shape: Sequence[int], sharding: NamedSharding) -> tuple[slice, ...]:
    """Returns the smallest box of an array that has all parts of this process."""
    stored = stored_shape(shape, sharding)
    parts = [part or () for part in sharding.addressable_devices_indices_map(stored).values()]
    box = []
    for size, whole, spans in zip(shape, stored, zip(*parts, strict=True), strict=True):
        ends = [whole if part.stop is None else part.stop for part in spans]
        box.append(slice(min(size, *(part.start or 0 for part in spans)), min(size, max(ends))))
    return tuple(box)


def put_sharded(
    value: jax.Array | np.ndarray,
    sharding: NamedSharding,
    shape: Sequence[int] | None = None,
    box: tuple[slice, ...] | None = None,
) -> jax.Array:
    """Stores a value, which is the same in all processes, in parts.

    Args:
        value: Array that this process can read, or one that is already stored in this way.
        sharding: Sharding that partitions dims.
        shape: Shape of the whole value, if this process has only a box of it.
        box: What `value` is of the whole value; at least `local_box`.
    """
    if isinstance(value, jax.Array) and value.sharding == sharding:
        return value
    array = np.asarray(local_copy(value))
    sizes = array.shape if shape is None else shape
    begin = [0] * array.ndim if box is None else [part.start for part in box]
    stored_as = stored_shape(sizes, sharding)
    part_shape = sharding.shard_shape(stored_as)

    def part_at(place: tuple[slice, ...] | None) -> np.ndarray:
        starts = zip(place or (), begin, strict=False)
        values = array[tuple([slice((dim.start or 0) - b, None) for dim, b in starts])]
        values = values[tuple([slice(size) for size in part_shape])]
        if values.shape == part_shape:
            return values
        part = np.zeros(part_shape, array.dtype)
        part[tuple([slice(size) for size in values.shape])] = values
        return part

    places = sharding.addressable_devices_indices_map(stored_as)
    kind = sharding.memory_kind
    # Copies: JAX may keep the memory of the array it gets, and with it the whole value.
    parts = jax.device_put(
        [part_at(place) for place in places.values()],
        [SingleDeviceSharding(device, memory_kind=kind) for device in places],
        may_alias=False,
    )
    return jax.make_array_from_single_device_arrays(stored_as, sharding, parts)


def unpadded(stored: _Array, shape: Sequence[int]) -> _Array:
    """Returns a stored array without the padding at its end."""
    return stored[tuple([slice(size) for size in shape])]


# Reads arrays that are stored in parts, as a whole.


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
    whole: np.ndarray = unpadded(np.asarray(local_copy(array_of_parts(stored))), shape)
    return whole


def array_of_parts(stored: jax.Array) -> jax.Array:
    """Returns another array of the same parts, to read as a whole.

    JAX keeps what NumPy gets, the whole value, as long as the array from which NumPy got it.
    """
    parts = [shard.data for shard in stored.addressable_shards]
    return jax.make_array_from_single_device_arrays(stored.shape, stored.sharding, parts)


@functools.lru_cache(maxsize=32)
def _gather_on(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda value: value, out_shardings=NamedSharding(mesh, P()))
