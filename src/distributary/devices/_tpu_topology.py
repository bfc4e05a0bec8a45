"""The places of the cores of a TPU, and the JAX device at each."""

import collections
import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, final

import jax
import numpy as np
import numpy.typing as npt

from distributary.errors import DeviceError, InvalidValueError

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
