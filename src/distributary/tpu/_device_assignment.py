"""Assignment of the cores of a TPU to replicas."""

import enum
import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np

from distributary.errors import InvalidTypeError, InvalidValueError
from distributary.tpu._topology import Topology

__all__ = ["DeviceAssignment", "DeviceOrderMode"]


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

    Raises:
        InvalidValueError: if `topology` is not a topology, the shape is wrong, there is no device
            at a place, or a place is used twice.

    Source: `tf.tpu.experimental.DeviceAssignment`.
    """

    def __init__(self, topology: Topology, core_assignment: Any) -> None:
        self._topology = _checked_topology(topology)
        places = np.asarray(core_assignment, np.int32)
        if places.ndim != 3 or places.shape[-1] != topology.mesh_rank or not places.size:
            raise InvalidValueError(
                f"DeviceAssignment: core_assignment has the shape {list(places.shape)}, expected"
                f" [replica, core, {topology.mesh_rank}] without a 0."
            )
        self._core_assignment = places
        #: Ids of replicas by task and logical core.
        self._replicas: dict[tuple[int, int], list[int]] = {}
        users: dict[tuple[int, ...], int] = {}
        for replica, cores in enumerate(places):
            for core, place in enumerate(cores.tolist()):
                if tuple(place) in users:
                    raise InvalidValueError(
                        f"DeviceAssignment: the device at {place} is used by replica"
                        f" {users[tuple(place)]} and by replica {replica}, expected one use."
                    )
                users[tuple(place)] = replica
                task = topology.task_ordinal_at_coordinates(place)
                self._replicas.setdefault((task, core), []).append(replica)

    @staticmethod
    def build(
        topology: Topology | bytes,
        computation_shape: Sequence[int] | None = None,
        computation_stride: Sequence[int] | None = None,
        num_replicas: int = 1,
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
        grid = _Grid(_checked_topology(topology), computation_shape, computation_stride)
        mode = DeviceOrderMode(device_order_mode)
        count = _whole_number(num_replicas, "num_replicas")
        grid.check_room(count)
        if topology.missing_devices.size:
            replicas = grid.in_task_order(count)
        elif mode is not DeviceOrderMode.MESH and grid.has_rings(count):
            replicas = grid.in_rings(count)
        elif mode is DeviceOrderMode.RING:
            raise InvalidValueError(
                "DeviceAssignment.build: device_order_mode is RING, which needs replicas that fill"
                " the whole topology with all cores of their chips and without a stride; use AUTO."
            )
        else:
            replicas = grid.in_mesh_order(count)
        # The sort is stable: on one host, replicas keep their order.
        replicas.sort(key=lambda cores: topology.task_ordinal_at_coordinates(cores[0]))
        return DeviceAssignment(topology, replicas)

    @property
    def topology(self) -> Topology:
        """Topology in which the cores lie."""
        return self._topology

    @property
    def num_replicas(self) -> int:
        """Number of replicas."""
        return int(self._core_assignment.shape[0])

    @property
    def num_cores_per_replica(self) -> int:
        """Number of logical cores of each replica."""
        return int(self._core_assignment.shape[1])

    @property
    def core_assignment(self) -> np.ndarray:
        """Place of every logical core of every replica, int32 `[replica, core, 4]`."""
        return self._core_assignment

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
        return tuple(self._core_assignment[replica, logical_core].tolist())

    def lookup_replicas(self, task_id: int, logical_core: int) -> list[int]:
        """Returns the replicas whose logical core `logical_core` is on a host, in ascending order.

        Raises:
            InvalidValueError: if there are none.
        """
        try:
            return self._replicas[task_id, logical_core]
        except KeyError:
            raise InvalidValueError(
                f"DeviceAssignment: no replica has logical core {logical_core!r} on task"
                f" {task_id!r}; there are {self._topology.num_tasks} tasks and"
                f" {self.num_cores_per_replica} cores per replica."
            ) from None

    def tpu_ordinal(self, replica: int = 0, logical_core: int = 0) -> int:
        """Returns the number of a logical core's device on its host."""
        place = self.coordinates(replica, logical_core)
        return self._topology.tpu_device_ordinal_at_coordinates(place)

    def host_device(self, replica: int = 0, logical_core: int = 0, job: str | None = None) -> str:
        """Returns the name of the CPU of a logical core's host."""
        place = self.coordinates(replica, logical_core)
        return self._topology.cpu_device_name_at_coordinates(place, job)

    def tpu_device(self, replica: int = 0, logical_core: int = 0, job: str | None = None) -> str:
        """Returns the name of a logical core's device."""
        place = self.coordinates(replica, logical_core)
        return self._topology.tpu_device_name_at_coordinates(place, job)

    def __repr__(self) -> str:
        return (
            f"<DeviceAssignment: {self.num_replicas} replicas x {self.num_cores_per_replica} cores"
            f" on {self._topology!r}>"
        )


_Place = tuple[int, ...]


@final
class _Grid:
    """A topology into which blocks of cores are fitted."""

    def __init__(self, topology: Topology, shape: Any, stride: Any) -> None:
        self._topology = topology
        self._mesh: list[int] = topology.mesh_shape.tolist()
        self._shape = _four(shape, "computation_shape")
        self._stride = _four(stride, "computation_stride")
        footprint = [a * b for a, b in zip(self._shape, self._stride, strict=True)]
        if any(a > b for a, b in zip(footprint, self._mesh, strict=True)):
            raise InvalidValueError(
                f"DeviceAssignment.build: computation_shape {self._shape} with computation_stride"
                f" {self._stride} takes {footprint}, and the topology has the size {self._mesh}."
            )
        self._footprint = footprint
        #: Number of replicas that fit along each dim.
        self._room = [
            mesh // size * stride
            for mesh, size, stride in zip(self._mesh, footprint, self._stride, strict=True)
        ]

    def check_room(self, num_replicas: int) -> None:
        room = math.prod(self._room)
        missing = len(self._topology.missing_devices)
        if missing:
            room = (math.prod(self._mesh) - missing) // math.prod(self._shape)
        if num_replicas > room:
            raise InvalidValueError(
                f"DeviceAssignment.build: num_replicas is {num_replicas}, but only {room} of shape"
                f" {self._shape} and stride {self._stride} fit into {self._topology!r}."
            )

    def in_task_order(self, num_replicas: int) -> list[list[_Place]]:
        """Places replicas host by host; if devices are missing, blocks may have holes."""
        size = math.prod(self._shape)
        places = self._topology.device_coordinates.reshape(-1, len(self._mesh)).tolist()
        return [[tuple(p) for p in places[i * size : (i + 1) * size]] for i in range(num_replicas)]

    def in_mesh_order(self, num_replicas: int) -> list[list[_Place]]:
        """Fills the cores of a chip first, then x, y and z; the replicas form nearly a cube."""
        sizes = _cube(self._room, num_replicas)
        steps = [range(0, a * b, b) for a, b in zip(self._shape, self._stride, strict=True)]
        block = list(itertools.product(*steps))
        replicas = []
        for replica in range(num_replicas):
            rest, at = replica, [0] * len(sizes)
            for dim in (-1, *range(len(sizes) - 1)):
                rest, at[dim] = divmod(rest, sizes[dim])
            start = [
                number // stride * size + number % stride
                for number, stride, size in zip(at, self._stride, self._footprint, strict=True)
            ]
            replicas.append([tuple(map(operator.add, start, offset)) for offset in block])
        return replicas

    def has_rings(self, num_replicas: int) -> bool:
        full = num_replicas == math.prod(self._room)
        return full and self._shape[-1] == self._mesh[-1] and math.prod(self._stride) == 1

    def in_rings(self, num_replicas: int) -> list[list[_Place]]:
        """Places the chips of a replica along a ring, and the replicas along another."""
        chips = list(_ring(self._shape[0], self._shape[1], self._shape[2]))
        blocks = _ring(self._room[0], self._room[1], self._room[2])
        return [
            [
                (*(b * size + c for b, c, size in zip(at, chip, self._shape, strict=False)), core)
                for chip in chips
                for core in range(self._shape[-1])
            ]
            for at in itertools.islice(blocks, num_replicas)
        ]


def _cube(room: list[int], count: int) -> list[int]:
    """Returns sizes, at most `room`, of a block for `count` replicas, as equal as possible.

    Dims with the least room are filled first. Among equal ones, the cores of a chip come first,
    then x, y and z.
    """
    last = len(room) - 1
    sizes = [1] * len(room)
    order = sorted(range(len(room)), key=lambda dim: (room[dim], dim != last, dim))
    for position, dim in enumerate(order):
        # Rounded, because the root may come out slightly above a whole number.
        target = math.ceil(round(count ** (1 / (len(order) - position)), 9))
        sizes[dim] = min(target, room[dim])
        count = -(-count // sizes[dim])
    return sizes


def _ring(num_x: int, num_y: int, num_z: int) -> Iterator[tuple[int, int, int]]:
    """Yields all places of a box, each next to the one before; a ring if even sizes allow it."""
    wide = [size for size in (num_x, num_y, num_z) if size > 1]
    if len(wide) < 2 or any(size % 2 for size in wide):
        # A line, or a box that has no ring of this form.
        for z, y, x in itertools.product(range(num_z), range(num_y), range(num_x)):
            yield x, y, z
    elif num_x == 1:
        yield from ((0, y, z) for y, z, _ in _ring(num_y, num_z, 1))
    elif num_y == 1:
        yield from ((x, 0, z) for x, z, _ in _ring(num_x, num_z, 1))
    else:
        # The way out visits each layer without its corner; the way back visits the corners.
        layer = [(x, y) for y in range(num_y) for x in _snake(1, num_x, y)]
        layer += [(0, y) for y in range(num_y - 1, 0, -1)]
        yield 0, 0, 0
        for z in range(num_z):
            yield from ((x, y, z) for x, y in (layer[::-1] if z % 2 else layer))
        yield from ((0, 0, z) for z in range(num_z - 1, 0, -1))


def _snake(start: int, stop: int, row: int) -> range:
    return range(stop - 1, start - 1, -1) if row % 2 else range(start, stop)


def _checked_topology(topology: Any) -> Topology:
    if not isinstance(topology, Topology):
        raise InvalidValueError(
            f"DeviceAssignment: topology is {topology!r}, expected a Topology, as"
            " initialize_tpu_system returns it."
        )
    return topology


def _whole_number(value: Any, what: str) -> int:
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        raise InvalidTypeError(
            f"DeviceAssignment.build: {what} is {value!r}, expected an int."
        ) from None
    if number < 1:
        raise InvalidValueError(
            f"DeviceAssignment.build: {what} is {value!r}, expected a number >= 1."
        )
    return number


def _four(values: Any, what: str) -> list[int]:
    found = np.ones(4, np.int32) if values is None else np.asarray(values)
    if found.shape != (4,) or found.dtype.kind not in "iu" or (found < 1).any():
        raise InvalidValueError(
            f"DeviceAssignment.build: {what} is {values!r}, expected 4 positive integers: along x,"
            " y and z of the chips, and on a chip."
        )
    return [int(value) for value in found]
