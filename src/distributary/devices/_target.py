"""Devices of another machine: programs are compiled for them, but cannot run on them.

`distributary compile` sets a target before it runs a script. From then on, this process has only
the target's devices. All values lie on one CPU device, and every program goes to the target instead
of to the devices it is written for. `distributary bench` only replaces the programs of a script.
Without either, the functions here change nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

import jax
import numpy as np

Call = Callable[..., Any]
Wrap = Callable[[Call, jax.sharding.Mesh | None, "ProgramKind"], Call]


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

    def is_step(self, step_name: str | None) -> bool:
        """Returns whether the program is the step with a name; None takes any that trains."""
        return self.trains if step_name is None else self.name == step_name


@final
@dataclass(eq=False)
class Target:
    """The devices of another machine.

    Args:
        name: Name of the target in messages, such as `"v5e:2x4"`.
        kind: Kind of the devices, as in `DeviceName`.
        hosts: The devices, host by host.

    Attributes:
        home: The one CPU device on which all values lie.
    """

    name: str
    kind: str
    hosts: tuple[tuple[jax.Device, ...], ...]
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


_target: Target | None = None
_wrap: Wrap | None = None


def watch_programs(wrap: Wrap | None, target: Target | None = None) -> None:
    """Replaces every program made from now on.

    Args:
        wrap: Called with the arguments of `for_target`. Returns the function to call instead, which
            has the method `lower` of the jitted function. None ends the watch.
        target: The devices that the script gets, and on whose `home` the arguments of programs lie;
            None for those of this machine.
    """
    global _target, _wrap
    _target, _wrap = target, wrap


def current_target() -> Target | None:
    """Returns the target, or None if there is none."""
    return _target


def devices_are_given() -> bool:
    """Returns whether a command decides which devices the script gets."""
    return _wrap is not None


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
    """Returns the function to call instead of a jitted one; the same unless programs are watched.

    Args:
        call: The jitted function.
        mesh: The mesh it is written for; None if it runs on JAX's default device.
        kind: Description of the program.
    """
    return call if _wrap is None else _wrap(call, mesh, kind)
