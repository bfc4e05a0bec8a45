"""Devices of another machine, for which programs are compiled and which cannot run them.

`distributary compile` sets a target before it runs a script. From then on this process has the
target's devices and no others; values lie on one CPU device, and every program goes to the target
instead of to its devices. Without a target the functions here change nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import jax
import numpy as np

__all__ = [
    "ProgramKind",
    "Target",
    "aim_at",
    "compile_ahead",
    "current_target",
    "devices_are_given",
    "devices_of_all_hosts",
    "for_target",
    "mesh_of_values",
    "watch_programs",
]


@final
@dataclass(frozen=True)
class ProgramKind:
    """What a program is, for a target that compiles one of several.

    Args:
        name: Name of the function that the user wrote, or of the Keras method.
        trains: Whether it updates a trainable variable.
    """

    name: str
    trains: bool


@final
class Target:
    """The devices of another machine.

    Args:
        name: What messages call it, such as `"v5e:2x4"`.
        kind: Kind of the devices, as in `DeviceName`.
        hosts: The devices, host by host.
        wrap: Called with a jitted function, the mesh it is written for and what it is; returns what
            is called, with arrays of `home`, in its place.

    Attributes:
        home: The one CPU device on which all values lie.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        hosts: tuple[tuple[jax.Device, ...], ...],
        wrap: Callable[[Any, jax.sharding.Mesh, ProgramKind], Any],
    ) -> None:
        self.name = name
        self.kind = kind
        self.hosts = hosts
        self.wrap = wrap
        self.home = jax.local_devices(backend="cpu")[0]
        self._num_hosts_here = 1

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """The devices of all hosts, host by host."""
        return tuple(device for host in self.hosts for device in host)

    def local_devices(self, kind: str) -> tuple[jax.Device, ...]:
        """The devices that this process has of one kind."""
        if kind != self.kind:
            return ()
        return tuple(d for host in self.hosts[: self._num_hosts_here] for d in host)

    def stand_for_all_hosts(self) -> tuple[jax.Device, ...]:
        """Gives this process the devices of all hosts; returns them."""
        self._num_hosts_here = len(self.hosts)
        return self.devices


_target: Target | None = None
_watcher: Callable[[Any, jax.sharding.Mesh | None, ProgramKind], Any] | None = None


def aim_at(target: Target | None) -> None:
    """Compiles for a target from now on; None goes back to the devices of this machine."""
    global _target
    _target = target


def current_target() -> Target | None:
    """The target, None without one."""
    return _target


def devices_are_given() -> bool:
    """Whether who runs the script has decided which devices it gets: with a target or a watcher."""
    return _target is not None or _watcher is not None


def devices_of_all_hosts() -> tuple[jax.Device, ...] | None:
    """With a target, the devices of the whole job, which become those of this process; else None.

    For strategies whose processes would connect now.
    """
    return None if _target is None else _target.stand_for_all_hosts()


def mesh_of_values(mesh: jax.sharding.Mesh) -> jax.sharding.Mesh:
    """The mesh on which values lie that programs on `mesh` take: `mesh` itself without a target.

    Shardings of both have the same specs.
    """
    if _target is None:
        return mesh
    home = np.empty((1,) * mesh.devices.ndim, dtype=object)
    home.fill(_target.home)
    return jax.sharding.Mesh(home, mesh.axis_names)


def for_target(call: Any, mesh: jax.sharding.Mesh | None, kind: ProgramKind) -> Any:
    """What to call instead of a jitted function: itself without a target and a watcher.

    Args:
        call: The jitted function.
        mesh: The mesh it is written for; None if it runs on JAX's default device.
        kind: What it is.
    """
    if _target is not None and mesh is not None:
        return _target.wrap(call, mesh, kind)
    return call if _watcher is None else _watcher(call, mesh, kind)


def watch_programs(
    watcher: Callable[[Any, jax.sharding.Mesh | None, ProgramKind], Any] | None,
) -> None:
    """Puts something in the place of every program made from now on, on the devices here.

    Args:
        watcher: Called with the arguments of `for_target`; returns what is called instead, which
            has the method `lower` of the jitted function. None ends it.
    """
    global _watcher
    _watcher = watcher


def compile_ahead(call: Any, *args: Any) -> Any:
    """Compiles a jitted function before it is called; a target compiles when it is called.

    Returns:
        What JAX has traced, a `jax.stages.Traced`; None for a target and where a watcher has put
        something in the place of the function.
    """
    if _target is not None:
        return None
    if not hasattr(call, "trace"):
        call.lower(*args).compile()
        return None
    traced = call.trace(*args)
    traced.lower().compile()
    return traced
