"""Devices of another machine: programs are compiled for them, but cannot run on them.

`distributary compile` sets a target before it runs a script. From then on, this process has only
the target's devices. All values lie on one CPU device, and every program goes to the target instead
of to the devices it is written for. `distributary bench` only replaces the programs of a script.
Without either, the functions here change nothing.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import jax
import numpy as np
from jax.sharding import Sharding

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
@dataclass(frozen=True)
class Trial:
    """A variation of the step of a script, of which nothing but shapes matters.

    Strategies get the devices of all hosts. The variables of Keras are zeros that take no memory,
    whatever is assigned to them.

    Args:
        arguments: Arguments of strategies, in place of those that the script gives.
        prepare: Called with a model, a nest of arrays that its `fit` is about to train on, and the
            dim that counts their rows. May change the model; returns the nest to take instead.
    """

    arguments: Mapping[str, object]
    prepare: Callable[[Any, Any, int], Any] = lambda model, batch, dim: batch


@final
@dataclass(eq=False)
class Target:
    """The devices of another machine.

    Args:
        name: Name of the target in messages, such as `"v5e:2x4"`.
        kind: Kind of the devices, as in `DeviceName`.
        hosts: The devices, host by host.
        trial: What is changed in the script; None leaves it as it is.

    Attributes:
        home: The one CPU device on which all values lie.
    """

    name: str
    kind: str
    hosts: tuple[tuple[jax.Device, ...], ...]
    trial: Trial | None = None
    _num_hosts_here: int = field(default=1, init=False)

    def __post_init__(self) -> None:
        self.home = jax.local_devices(backend="cpu")[0]
        if self.trial is not None:  # a strategy of one host stands for one of all hosts
            self.stand_for_all_hosts()

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


def current_trial() -> Trial | None:
    """Returns the trial for which the script runs, or None."""
    return None if _target is None else _target.trial


# In a trial, larger arrays take no memory.
_MAX_REAL_BYTES = 1 << 10


def without_memory(shape: Any, dtype: Any, sharding: Sharding | None = None) -> jax.Array | None:
    """Returns zeros that take no memory; None for small arrays, and outside of a trial."""
    count, dtype = int(np.prod(shape, dtype=int)), jax.dtypes.canonicalize_dtype(dtype)
    if current_trial() is None or count * dtype.itemsize <= _MAX_REAL_BYTES:
        return None
    zeros = _zeros((count * dtype.itemsize - 1).bit_length())
    value = zeros[: count * dtype.itemsize].view(dtype).reshape(shape)
    # JAX takes the memory as it is, and everybody the same.
    return jax.device_put(value, sharding, may_alias=True)


@functools.cache
def _zeros(num_bits: int) -> np.ndarray:
    """Returns memory that nobody writes, so that the system does not provide it."""
    zeros = np.zeros((1 << num_bits) + 64, np.uint8)
    return zeros[-zeros.ctypes.data % 64 :]  # or JAX copies it


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
