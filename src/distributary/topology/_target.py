"""Devices of another machine: programs are compiled for them, but cannot run on them.

`distributary compile` sets a target before it runs a script. From then on, this process has only
the target's devices. All values lie on one CPU device, and every program goes to the target instead
of to the devices it is written for. Without a target, the functions here change nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

import jax
import numpy as np

__all__ = [
    "ProgramKind",
    "Target",
    "aim_at",
    "current_target",
    "devices_are_given",
    "devices_of_all_hosts",
    "for_target",
    "mesh_of_values",
    "watch_programs",
]


Call = Callable[..., Any]


@final
@dataclass(frozen=True)
class ProgramKind:
    """Description of a program, so that a target that compiles one of several can choose.

    Args:
        name: Name of the function that the user wrote, or of the Keras method.
        trains: Whether the program updates a trainable variable.
    """

    name: str
    trains: bool


@final
@dataclass(eq=False)
class Target:
    """The devices of another machine.

    Args:
        name: Name of the target in messages, such as `"v5e:2x4"`.
        kind: Kind of the devices, as in `DeviceName`.
        hosts: The devices, host by host.
        wrap: Called with a jitted function, the mesh it is written for and its `ProgramKind`.
            Returns the function to call in its place, whose arguments are arrays on `home`.

    Attributes:
        home: The one CPU device on which all values lie.
    """

    name: str
    kind: str
    hosts: tuple[tuple[jax.Device, ...], ...]
    wrap: Callable[[Call, jax.sharding.Mesh, ProgramKind], Call]
    _num_hosts_here: int = field(default=1, init=False)

    def __post_init__(self) -> None:
        self.home = jax.local_devices(backend="cpu")[0]

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """Devices of all hosts, host by host."""
        return tuple(device for host in self.hosts for device in host)

    def local_devices(self, kind: str) -> tuple[jax.Device, ...]:
        """Returns the devices of one kind that this process has."""
        if kind != self.kind:
            return ()
        return tuple(d for host in self.hosts[: self._num_hosts_here] for d in host)

    def stand_for_all_hosts(self) -> tuple[jax.Device, ...]:
        """Gives this process the devices of all hosts, and returns them."""
        self._num_hosts_here = len(self.hosts)
        return self.devices


Watcher = Callable[[Call, jax.sharding.Mesh | None, ProgramKind], Call]

_target: Target | None = None
_watcher: Watcher | None = None


def aim_at(target: Target | None) -> None:
    """Compiles for a target from now on; None goes back to the devices of this machine."""
    global _target
    _target = target


def current_target() -> Target | None:
    """Returns the target, or None if there is none."""
    return _target


def devices_are_given() -> bool:
    """Returns whether a target or a watcher decides which devices the script gets."""
    return _target is not None or _watcher is not None


def devices_of_all_hosts() -> tuple[jax.Device, ...] | None:
    """Gives this process the devices of the whole job, if there is a target, and returns them.

    Called by strategies at the point where their processes would connect. Returns None without a
    target.
    """
    return None if _target is None else _target.stand_for_all_hosts()


def mesh_of_values(mesh: jax.sharding.Mesh) -> jax.sharding.Mesh:
    """Returns the mesh that holds the arguments of programs on `mesh`; without a target, `mesh`.

    Shardings on the two meshes have the same specs.
    """
    if _target is None:
        return mesh
    home = np.empty((1,) * mesh.devices.ndim, dtype=object)
    home.fill(_target.home)
    return jax.sharding.Mesh(home, mesh.axis_names)


def for_target(call: Call, mesh: jax.sharding.Mesh | None, kind: ProgramKind) -> Call:
    """Returns the function to call instead of a jitted one; the same without target and watcher.

    Args:
        call: The jitted function.
        mesh: The mesh it is written for; None if it runs on JAX's default device.
        kind: Description of the program.
    """
    if _target is not None and mesh is not None:
        return _target.wrap(call, mesh, kind)
    return call if _watcher is None else _watcher(call, mesh, kind)


def watch_programs(watcher: Watcher | None) -> None:
    """Replaces every program made from now on, on the devices of this machine.

    Args:
        watcher: Called with the arguments of `for_target`. Returns the function to call instead,
            which has the method `lower` of the jitted function. None ends the watch.
    """
    global _watcher
    _watcher = watcher
