"""Assignment of the cores of a TPU to replicas."""

import enum
import math
from collections.abc import Sequence
from typing import SupportsIndex, TypeVar, final

import numpy as np
import numpy.typing as npt

from distributary.devices._tpu_topology import Topology, checked_sizes
from distributary.errors import InvalidValueError, checked_int

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
