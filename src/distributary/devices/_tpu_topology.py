"""The places of the cores of a TPU, the JAX device at each, and their assignment to replicas."""

import collections
import enum
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, SupportsIndex, TypeVar, final

import jax
import numpy as np
import numpy.typing as npt

from distributary.errors import DeviceError, InvalidValueError, checked_int

_MESH_RANK = 4

# x, y and z of a chip, and the number of a core on it.
Coordinates = tuple[int, int, int, int]


@final
class Topology:
    """The places of devices in a grid of chips with cores.

    Get one from `distributary.tpu.experimental.initialize_tpu_system`, or make one with
    `of_devices`.

    Args:
        serialized: Bytes from `serialized()`. If you pass them, the other arguments are ignored.
        mesh_shape: Size of the grid: three numbers for the chips, and one for the cores of a chip.
        device_coordinates: Integers `[task, device, 4]`: the place of every device of every task.
            All tasks have the same number of devices.

    Attributes:
        mesh_shape: Size of the grid, int32 `[4]`.
        device_coordinates: Place of every device of every task, int32 `[task, device, 4]`.

    Raises:
        InvalidValueError: if the shapes do not describe a topology, or coordinates lie outside of
            the grid or appear twice.

    Source: `tf.tpu.experimental.Topology`; `serialized()` uses a format of its own.
    """

    def __init__(
        self,
        serialized: bytes | None = None,
        mesh_shape: Sequence[int] | None = None,
        device_coordinates: npt.ArrayLike | None = None,
    ) -> None:
        if serialized:
            mesh_shape, device_coordinates = _parsed(serialized)
        self.mesh_shape = checked_sizes(mesh_shape, "Topology: mesh_shape").astype(np.int32)
        places = _integers(device_coordinates, "Topology: device_coordinates")
        if places.ndim != 3 or places.shape[-1] != _MESH_RANK or not places.size:
            raise InvalidValueError(
                f"Topology: device_coordinates has the shape {list(places.shape)}, expected [task,"
                f" device, {_MESH_RANK}]."
            )
        self.device_coordinates = places.astype(np.int32)
        self._places: dict[Coordinates, tuple[int, int]] = {}
        for task, ordinal in np.ndindex(places.shape[:2]):
            place = _coordinates(self.device_coordinates[task, ordinal])
            inside = all(0 <= at < size for at, size in zip(place, self.mesh_shape, strict=True))
            if not inside or place in self._places:
                raise InvalidValueError(
                    f"Topology: device {ordinal} of task {task} has the coordinates {list(place)},"
                    f" {'which another one has' if inside else 'outside of the grid'}; mesh_shape"
                    f" is {self.mesh_shape.tolist()}."
                )
            self._places[place] = (task, ordinal)
        self._devices: dict[Coordinates, jax.Device] = {}

    @classmethod
    def of_devices(
        cls, devices: Sequence[jax.Device], mesh_shape: Sequence[int] | None = None
    ) -> "Topology":
        """Makes the topology of devices that JAX has; tf.distribute has no such method.

        With it, programs for several cores per replica run on any devices, even on logical CPU
        devices.

        Args:
            devices: The devices, the same number from every process.
            mesh_shape: Size of the grid. The devices fill it in their order, with the last number
                changing fastest. None uses the places that TPU devices report (the slices of a job
                lie behind each other along z), and `[number, 1, 1, 1]` for other devices.

        Raises:
            DeviceError: if the processes have different numbers of devices, or there are no
                devices.
            InvalidValueError: if the grid has another size than the number of devices.
        """
        all_devices = list(devices)
        processes = [device.process_index for device in all_devices]
        counts = sorted(set(collections.Counter(processes).values()))
        if len(counts) != 1:
            raise DeviceError(
                f"Topology.of_devices: the processes have {counts} devices, expected as many of"
                " every process, and at least one."
            )
        if mesh_shape is None and all(hasattr(device, "coords") for device in all_devices):
            shape, places = _places_of_tpus(all_devices)
        else:
            shape = checked_sizes(mesh_shape, "Topology: mesh_shape", [len(all_devices), 1, 1, 1])
            if int(np.prod(shape)) != len(all_devices):
                raise InvalidValueError(
                    f"Topology.of_devices: mesh_shape is {shape.tolist()}, which has"
                    f" {np.prod(shape)} places for {len(all_devices)} devices."
                )
            places = np.stack(np.unravel_index(np.arange(len(all_devices)), shape), axis=-1)
        # The sort is stable: the devices of a process keep their order.
        rows = np.argsort(processes, stable=True).reshape(-1, counts[0])
        topology = cls(mesh_shape=shape.tolist(), device_coordinates=places[rows])
        topology._devices = {
            _coordinates(place): device for place, device in zip(places, all_devices, strict=True)
        }
        return topology

    @property
    def mesh_rank(self) -> int:
        """Number of dims of the grid."""
        return len(self.mesh_shape)

    @property
    def missing_devices(self) -> np.ndarray:
        """Places of the grid without a device, int64 `[number, 4]`."""
        present = np.zeros(self.mesh_shape, bool)
        present[tuple(np.moveaxis(self.device_coordinates, -1, 0))] = True
        return np.argwhere(~present)

    @property
    def num_tasks(self) -> int:
        """Number of hosts."""
        return int(self.device_coordinates.shape[0])

    @property
    def num_tpus_per_task(self) -> int:
        """Number of devices of each host."""
        return int(self.device_coordinates.shape[1])

    def task_ordinal_at_coordinates(self, device_coordinates: Sequence[int]) -> int:
        """Returns the number of the host to which a place belongs.

        Raises:
            InvalidValueError: if there is no device at these coordinates. The next methods raise it
                too.
        """
        return self._place(device_coordinates)[0]

    def tpu_device_ordinal_at_coordinates(self, device_coordinates: Sequence[int]) -> int:
        """Returns the number of the device on its host."""
        return self._place(device_coordinates)[1]

    def cpu_device_name_at_coordinates(
        self, device_coordinates: Sequence[int], job: str | None = None
    ) -> str:
        """Returns the name of the CPU of a device's host: `"/task:0/device:CPU:0"`."""
        task, _ = self._place(device_coordinates)
        return f"{_job(job)}/task:{task}/device:CPU:0"

    def tpu_device_name_at_coordinates(
        self, device_coordinates: Sequence[int], job: str | None = None
    ) -> str:
        """Returns the name of a device: `"/task:0/device:TPU:1"`."""
        task, ordinal = self._place(device_coordinates)
        return f"{_job(job)}/task:{task}/device:TPU:{ordinal}"

    @property
    def has_devices(self) -> bool:
        """True if the topology was made from JAX devices."""
        return bool(self._devices)

    def jax_device(self, device_coordinates: Sequence[int]) -> jax.Device:
        """Returns the device at a place; only if the topology was made from devices."""
        self._place(device_coordinates)
        return self._devices[_coordinates(device_coordinates)]

    def serialized(self) -> bytes:
        """Returns the topology as bytes, which `Topology(serialized)` reads.

        The bytes do not include the JAX devices.
        """
        content = {
            "mesh_shape": self.mesh_shape.tolist(),
            "device_coordinates": self.device_coordinates.tolist(),
        }
        return json.dumps(content).encode()

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.mesh_shape.tolist()))
        return f"<Topology: {shape}, {self.num_tasks} x {self.num_tpus_per_task} devices>"

    def _place(self, coordinates: Sequence[int]) -> tuple[int, int]:
        try:
            return self._places[_coordinates(coordinates)]
        except (KeyError, TypeError, ValueError):
            raise InvalidValueError(
                f"There is no device at the coordinates {coordinates!r} of {self!r}."
            ) from None


class TPUSystemMetadata(NamedTuple):
    """The TPU cores of a job: how many there are, and where.

    Attributes:
        num_cores: Number of cores (JAX devices) of the job.
        num_hosts: Number of hosts.
        num_of_cores_per_host: Number of cores of each host.
        topology: Places of the cores.
        devices: The JAX devices, host by host.

    Source: `tf.tpu.experimental.TPUSystemMetadata`.
    """

    num_cores: int
    num_hosts: int
    num_of_cores_per_host: int
    topology: Topology | None
    devices: tuple[jax.Device, ...]


def _coordinates(place: Iterable[int]) -> Coordinates:
    x, y, z, core = (int(at) for at in place)
    return x, y, z, core


def _job(job: str | None) -> str:
    return "" if job is None else f"/job:{job}"


def _places_of_tpus(devices: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the size of the grid of TPU devices, and the place of each, `[device, 4]`."""
    places = np.array([(*d.coords, getattr(d, "core_on_chip", 0)) for d in devices], np.int32)
    slices = np.array([getattr(d, "slice_index", None) or 0 for d in devices], np.int32)
    # Coordinates need not start at 0: one host of a larger TPU may run alone.
    shape = places.max(axis=0) - places.min(axis=0) + 1
    places -= places.min(axis=0)
    places[:, 2] += shape[2] * slices
    shape[2] *= slices.max() + 1
    return shape, places


def _parsed(serialized: bytes) -> tuple[list[int], list[list[list[int]]]]:
    try:
        content = json.loads(serialized)
        return content["mesh_shape"], content["device_coordinates"]
    except (ValueError, TypeError, KeyError):
        raise InvalidValueError(
            f"Topology: serialized is {serialized!r}, expected what Topology.serialized() returned."
        ) from None


def checked_sizes(
    sizes: Sequence[int] | None, field: str, default: Sequence[int] | None = None
) -> np.ndarray:
    """Returns the sizes of a grid or of a block in it, `[4]`, after checking them.

    Args:
        sizes: Along x, y and z of the chips, and on a chip; None for `default`.
        field: Name of the argument, for messages.
        default: Sizes if the user has given none. Without it, there must be some.

    Raises:
        InvalidValueError: if they are not 4 positive integers.
    """
    integers = _integers(sizes if sizes is not None else default, field)
    if integers.shape != (_MESH_RANK,) or (integers < 1).any():
        raise InvalidValueError(
            f"{field} is {sizes!r}, expected {_MESH_RANK} positive integers: along x, y and z of"
            " the chips, and on a chip."
        )
    return integers


def _integers(values: npt.ArrayLike | None, field: str) -> np.ndarray:
    try:
        integers = np.asarray(values)
    except ValueError:  # parts of different length
        integers = np.asarray(None)
    if integers.dtype.kind not in "iu":
        raise InvalidValueError(f"{field} is {values!r}, expected integers.")
    return integers.astype(int)


_BUILD = "DeviceAssignment.build"

_T = TypeVar("_T")


class DeviceOrderMode(enum.IntEnum):
    """The order in which the cores of a topology become logical devices and replicas.

    * `AUTO`: `RING` if it is possible, else `MESH`.
    * `RING`: every core is next to the one before. If the sizes of the grid are even, the last core
      is next to the first.
    * `MESH`: the order of the coordinates.

    Source: `tf.tpu.experimental.DeviceOrderMode`.
    """

    AUTO = 0
    RING = 1
    MESH = 2


@final
class DeviceAssignment:
    """The cores of every replica; usually made with `build`.

    Args:
        topology: The topology.
        core_assignment: Integers `[replica, core, 4]`: the place in the topology of every logical
            core of every replica.

    Attributes:
        topology: Topology in which the cores lie.
        core_assignment: Place of every logical core of every replica, int32 `[replica, core, 4]`.

    Raises:
        InvalidValueError: if `topology` is not a topology, the shape is wrong, there is no device
            at a place, or a place is used twice.

    Source: `tf.tpu.experimental.DeviceAssignment`.
    """

    def __init__(self, topology: Topology, core_assignment: npt.ArrayLike) -> None:
        self.topology = _checked_topology(topology)
        places = np.asarray(core_assignment, np.int32)
        if places.ndim != 3 or places.shape[-1] != topology.mesh_rank or not places.size:
            raise InvalidValueError(
                f"DeviceAssignment: core_assignment has the shape {list(places.shape)}, expected"
                f" [replica, core, {topology.mesh_rank}] without a 0."
            )
        self.core_assignment = places
        users: dict[tuple[int, ...], int] = {}
        for replica, cores in enumerate(places.tolist()):
            for place in cores:
                topology.task_ordinal_at_coordinates(place)  # raises if there is no device
                if tuple(place) in users:
                    raise InvalidValueError(
                        f"DeviceAssignment: the device at {place} is used by replica"
                        f" {users[tuple(place)]} and by replica {replica}, expected one use."
                    )
                users[tuple(place)] = replica

    @staticmethod
    def build(
        topology: Topology | bytes,
        computation_shape: Sequence[int] | None = None,
        computation_stride: Sequence[int] | None = None,
        num_replicas: SupportsIndex = 1,
        device_order_mode: DeviceOrderMode = DeviceOrderMode.AUTO,
    ) -> "DeviceAssignment":
        """Places replicas on a topology, each on a block of neighboring cores.

        Args:
            topology: A `Topology`, or bytes from its `serialized()`.
            computation_shape: Size of the block of one replica, 4 numbers; None for one core.
            computation_stride: Distance between the cores of a replica, 4 numbers; None for 1.
            num_replicas: Number of replicas.
            device_order_mode: Order of logical devices and replicas. Replicas are always counted
                host by host.

        Raises:
            InvalidValueError: if the arguments do not fit together, or do not fit the topology.
        """
        if isinstance(topology, bytes):
            topology = Topology(serialized=topology)
        mesh = _checked_topology(topology).mesh_shape
        shape = checked_sizes(computation_shape, f"{_BUILD}: computation_shape", [1] * 4)
        stride = checked_sizes(computation_stride, f"{_BUILD}: computation_stride", [1] * 4)
        footprint = shape * stride
        if (footprint > mesh).any():
            raise InvalidValueError(
                f"{_BUILD}: computation_shape {shape.tolist()} with"
                f" computation_stride {stride.tolist()} takes {footprint.tolist()}, and the"
                f" topology has the size {mesh.tolist()}."
            )
        mode = DeviceOrderMode(device_order_mode)
        count = checked_int(f"{_BUILD}: num_replicas", num_replicas, minimum=1)
        room = mesh // footprint * stride  # number of replicas that fit along each dim
        num_missing = len(topology.missing_devices)
        most = (mesh.prod() - num_missing) // shape.prod() if num_missing else room.prod()
        if count > most:
            raise InvalidValueError(
                f"{_BUILD}: num_replicas is {count}, but only {most} of shape"
                f" {shape.tolist()} and stride {stride.tolist()} fit into {topology!r}."
            )
        is_full = count == room.prod() and shape[-1] == mesh[-1] and stride.prod() == 1
        if num_missing:
            # Host by host; blocks may have holes.
            places = topology.device_coordinates.reshape(-1, len(mesh))
            replicas = places[: count * shape.prod()].reshape(count, -1, len(mesh))
        elif mode is not DeviceOrderMode.MESH and is_full:
            # The chips of a replica lie along a ring, and the replicas along another.
            starts = np.pad(_ring(room[:3]), [(0, 0), (0, 1)]) * footprint
            chips = np.pad(_ring(shape[:3]), [(0, 0), (0, 1)])
            cores = np.arange(shape[-1])[:, None] * [0, 0, 0, 1]
            block = (chips[:, None] + cores).reshape(-1, len(mesh))
            replicas = starts[:, None] + block
        elif mode is DeviceOrderMode.RING:
            raise InvalidValueError(
                f"{_BUILD}: device_order_mode is RING, which needs replicas that fill"
                " the whole topology with all cores of their chips and without a stride; use AUTO."
            )
        else:
            at = _in_mesh_order(room, count)
            starts = at // stride * footprint + at % stride
            replicas = starts[:, None] + np.argwhere(np.ones(shape)) * stride
        # The sort is stable: on one host, replicas keep their order.
        tasks = [topology.task_ordinal_at_coordinates(cores[0]) for cores in replicas]
        return DeviceAssignment(topology, replicas[np.argsort(tasks, stable=True)])

    @property
    def num_replicas(self) -> int:
        """Number of replicas."""
        return int(self.core_assignment.shape[0])

    @property
    def num_cores_per_replica(self) -> int:
        """Number of logical cores of each replica."""
        return int(self.core_assignment.shape[1])

    def coordinates(self, replica: int, logical_core: int) -> tuple[int, ...]:
        """Returns the place of a logical core in the topology.

        Raises:
            InvalidValueError: if there is no such replica or core. The next methods raise it too.
        """
        for number, end, what in (
            (replica, self.num_replicas, "replica"),
            (logical_core, self.num_cores_per_replica, "logical_core"),
        ):
            if not 0 <= number < end:
                raise InvalidValueError(
                    f"DeviceAssignment: {what} is {number!r}, expected 0 to {end - 1}."
                )
        return tuple(self.core_assignment[replica, logical_core].tolist())

    def lookup_replicas(self, task_id: int, logical_core: int) -> list[int]:
        """Returns the replicas whose logical core `logical_core` is on a host, in ascending order.

        Raises:
            InvalidValueError: if there are none.
        """
        replicas = [
            replica
            for replica, cores in enumerate(self.core_assignment)
            if 0 <= logical_core < len(cores)
            and self.topology.task_ordinal_at_coordinates(cores[logical_core]) == task_id
        ]
        if not replicas:
            raise InvalidValueError(
                f"DeviceAssignment: no replica has logical core {logical_core!r} on task"
                f" {task_id!r}; there are {self.topology.num_tasks} tasks and"
                f" {self.num_cores_per_replica} cores per replica."
            )
        return replicas

    def tpu_ordinal(self, replica: int = 0, logical_core: int = 0) -> int:
        """Returns the number of a logical core's device on its host."""
        place = self.coordinates(replica, logical_core)
        return self.topology.tpu_device_ordinal_at_coordinates(place)

    def host_device(self, replica: int = 0, logical_core: int = 0, job: str | None = None) -> str:
        """Returns the name of the CPU of a logical core's host."""
        place = self.coordinates(replica, logical_core)
        return self.topology.cpu_device_name_at_coordinates(place, job)

    def tpu_device(self, replica: int = 0, logical_core: int = 0, job: str | None = None) -> str:
        """Returns the name of a logical core's device."""
        place = self.coordinates(replica, logical_core)
        return self.topology.tpu_device_name_at_coordinates(place, job)

    def __repr__(self) -> str:
        return (
            f"<DeviceAssignment: {self.num_replicas} replicas x {self.num_cores_per_replica} cores"
            f" on {self.topology!r}>"
        )


def _in_mesh_order(room: np.ndarray, count: int) -> np.ndarray:
    """Returns places for `count` replicas, nearly a cube, `[replica, 4]`.

    The cores of a chip are filled first, then x, y and z.

    Args:
        room: Number of replicas that fit along each dim.
        count: Number of replicas.
    """
    sizes = [1] * len(room)
    num_left = count
    # Dims with the least room limit the cube first.
    order = sorted(range(len(room)), key=lambda dim: (room[dim], dim != len(room) - 1, dim))
    for position, dim in enumerate(order):
        # Rounded, because the root may come out slightly above a whole number.
        target = math.ceil(round(num_left ** (1 / (len(order) - position)), 9))
        sizes[dim] = min(target, int(room[dim]))
        num_left = -(-num_left // sizes[dim])
    x, y, z, core = sizes
    z_at, y_at, x_at, core_at = np.unravel_index(np.arange(count), (z, y, x, core))
    return np.stack([x_at, y_at, z_at, core_at], axis=-1)


def _ring(box: np.ndarray) -> np.ndarray:
    """Returns all places of a box `[x, y, z]`, `[place, 3]`, in the order of a ring.

    Each place is next to the one before, and the last next to the first. If the box has an odd size
    other than 1, or is a line, the places are in the order of z, y, x.
    """
    # Dims of size 1 come last, so that a flat box is a single layer.
    dims = sorted(range(3), key=lambda dim: box[dim] == 1)
    width, depth, height = (int(box[dim]) for dim in dims)
    if depth == 1 or (box[box > 1] % 2).any():
        return np.argwhere(np.ones(box[::-1]))[:, ::-1]
    # The way out visits each layer without its corner; the way back visits the corners.
    layer = [(x, y) for y in range(depth) for x in _to_and_fro(range(1, width), y)]
    layer += [(0, y) for y in range(depth - 1, 0, -1)]
    path = [(0, 0, 0)]
    for z in range(height):
        path += [(x, y, z) for x, y in _to_and_fro(layer, z)]
    path += [(0, 0, z) for z in range(height - 1, 0, -1)]
    places = np.empty((len(path), 3), int)
    places[:, dims] = path
    return places


def _to_and_fro(places: Sequence[_T], row: int) -> Sequence[_T]:
    return places[::-1] if row % 2 else places


def _checked_topology(topology: object) -> Topology:
    if not isinstance(topology, Topology):
        raise InvalidValueError(
            f"DeviceAssignment: topology is {topology!r}, expected a Topology, as"
            " initialize_tpu_system returns it."
        )
    return topology
