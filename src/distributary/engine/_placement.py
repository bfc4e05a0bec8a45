"""The devices of a strategy, and where values lie on them."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec as P, Sharding

from distributary.devices import (
    HOST_MEMORY,
    REPLICA_AXIS,
    Dispatcher,
    Nest,
    dispatcher_for,
    make_mesh,
    mesh_of_values,
    put_replicated,
    put_stacked,
)
from distributary.variables import PerReplica


@final
@dataclass(frozen=True, eq=False)
class Placement:
    """The devices on which replicas compute and variables lie; a part of every strategy.

    Attributes:
        num_replicas: Number of replicas in all processes.
        mesh: Mesh with the axis `"replica"` on which programs run; None for JAX's default device.
        replicated: Sharding of values that all replicas share; None for JAX's default device.
        stacked: Sharding of `[replica, *shape]`; None on one device.
        home: Sharding of the device of the variables; None if they lie where the replicas compute.
        storage: Sharding of the variables on that device.
        workers_mesh: Mesh of the replicas of functions that are traced for other processes. Other
            functions run all replicas side by side on the device of `mesh`.
    """

    num_replicas: int
    mesh: Mesh | None = None
    replicated: Sharding | None = None
    stacked: NamedSharding | None = None
    home: NamedSharding | None = None
    storage: NamedSharding | None = None
    workers_mesh: AbstractMesh | None = None

    @classmethod
    def on_one_device(cls, device: jax.Device) -> "Placement":
        """Returns the placement of one replica and its variables on a device."""
        mesh = make_mesh([device])
        (of_values,) = mesh_of_values(mesh).devices.flat
        return cls(1, mesh, jax.sharding.SingleDeviceSharding(of_values))

    @classmethod
    def on_each(
        cls, replicas: Sequence[jax.Device] | Sequence[Sequence[jax.Device]]
    ) -> "Placement":
        """Returns the placement of replicas that each have a copy of the variables.

        Args:
            replicas: The device of each replica, or its logical devices, in replica order, of all
                processes.
        """
        mesh = make_mesh(replicas)
        of_values = mesh_of_values(mesh)
        replicated = NamedSharding(of_values, P())
        stacked = NamedSharding(of_values, P(REPLICA_AXIS))
        return cls(len(replicas), mesh, replicated, stacked)

    @classmethod
    def around_home(
        cls, devices: Sequence[jax.Device], home: jax.Device, in_host_memory: bool
    ) -> "Placement":
        """Returns the placement of replicas whose variables lie on one device, `home`.

        Args:
            devices: One device per replica.
            home: The device of the variables.
            in_host_memory: Whether the variables lie in the host memory of `home`.
        """
        around = cls.on_each(devices)
        at_home = NamedSharding(make_mesh([home]), P())
        return replace(
            around,
            stacked=around.stacked if len(devices) > 1 else None,
            home=at_home,
            storage=at_home.with_memory_kind(HOST_MEMORY) if in_host_memory else at_home,
        )

    @classmethod
    def on_workers(cls, device: jax.Device, workers_mesh: AbstractMesh) -> "Placement":
        """Returns the placement of replicas on other processes; `device` is that of this one."""
        here = cls.on_each([device])
        return replace(here, num_replicas=workers_mesh.size, workers_mesh=workers_mesh)

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """The first device of each replica; () for JAX's default device."""
        if self.mesh is None:
            return ()
        grid = self.mesh.devices
        return tuple(grid.reshape(len(grid), -1)[:, 0])

    @property
    def of_variables(self) -> Sharding | None:
        """Sharding of variables that all replicas share; None for JAX's default device."""
        return self.storage or self.replicated

    @property
    def is_of_job(self) -> bool:
        """True if the devices belong to several processes."""
        return self.replicated is not None and not self.replicated.is_fully_addressable

    @property
    def adds_in_any_order(self) -> bool:
        """True if a scatter may add rows that go to the same place in a different order each time.

        On CPUs and TPUs it has one order; on GPUs it adds with atomic instructions.
        """
        return self.mesh is not None and self.mesh.devices.flat[0].platform not in ("cpu", "tpu")

    @property
    def takes_host_arrays(self) -> bool:
        """True if programs can take NumPy arrays `[replica, ...]` and split them themselves."""
        return self.stacked is not None and not self.is_of_job and self.stacked.mesh is self.mesh

    @functools.cached_property
    def dispatcher(self) -> Dispatcher:
        """The dispatcher of programs on the mesh."""
        return dispatcher_for(() if self.mesh is None else tuple(self.mesh.devices.flat))

    def of_rows(self, dim: int) -> NamedSharding:
        """Returns the sharding of arrays of several replicas whose rows are along `dim`."""
        assert self.stacked is not None
        return _sharded_along(self.stacked.mesh, dim)

    def place_rows(self, value: PerReplica) -> PerReplica:
        """Puts every row of a stacked `PerReplica` on the device of its replica."""
        stacked = self.stacked
        if stacked is None:
            return value
        rows = jax.tree.map(lambda leaf: put_stacked(leaf, stacked), value.payload)
        return PerReplica.from_stacked(rows, self.num_replicas)

    def place_alone(self, value: Nest) -> Nest:
        """Puts the nest of one replica, or of the only one, on every device."""
        return value if self.replicated is None else put_replicated(value, self.replicated)


@functools.lru_cache(maxsize=64)
def _sharded_along(mesh: Mesh, dim: int) -> NamedSharding:
    return NamedSharding(mesh, P(*[None] * dim, REPLICA_AXIS))
