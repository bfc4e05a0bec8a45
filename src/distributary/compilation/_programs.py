"""Stand-ins for the programs of a script that is compiled for a target."""

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, final

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from distributary._types import Nest
from distributary.compilation._topologies import Topology
from distributary.errors import CompileError
from distributary.topology import REPLICA_AXIS, ProgramKind, mesh_of_values
from distributary.tracing import OneDeviceProgram

__all__ = ["CompiledStep", "Programs", "ScriptEnded"]


@final
@dataclass(frozen=True)
class CompiledStep:
    """A compiled step.

    Args:
        name: Name of the function that the user wrote, or of the Keras method.
        num_replicas: Number of replicas.
        num_devices: Number of devices that run it.
        executable: The result of the compiler.
        state_bytes: Size on one device of each array that the step updates.
        lower_seconds: Seconds that JAX took to lower the traced step.
        compile_seconds: Seconds that the compiler took.
    """

    name: str
    num_replicas: int
    num_devices: int
    executable: jax.stages.Compiled
    state_bytes: tuple[int, ...]
    lower_seconds: float
    compile_seconds: float


@final
class ScriptEnded(BaseException):
    """Ends a script at its step, which cannot run here.

    It is not an `Exception`, so that a script that catches those ends as well.
    """


@final
class Programs:
    """The programs of one script.

    Args:
        topology: The devices to compile for.
        step_name: Name of the function that is the step; None for the first program that updates a
            trainable variable.

    Attributes:
        step: The compiled step, or the error if it cannot be compiled; None before the step.
        others: Names of the programs that ran here, and how often each of them ran.
    """

    def __init__(self, topology: Topology, step_name: str | None = None) -> None:
        self._topology = topology
        self._step_name = step_name
        self.step: CompiledStep | CompileError | None = None
        self.others: dict[str, int] = {}

    def wrap(self, call: Any, mesh: Mesh, kind: ProgramKind) -> Any:
        """Returns the function to call in place of a jitted function for `mesh`."""
        if kind.trains if self._step_name is None else kind.name == self._step_name:
            return _Program(call, mesh, lambda *args: self._end_with(kind.name, call, mesh, args))
        here = OneDeviceProgram(call, mesh_of_values(mesh))

        def run_here(*args: Any) -> Any:
            self.others[kind.name] = self.others.get(kind.name, 0) + 1
            return here(*args)

        return _Program(call, mesh, run_here)

    def _end_with(self, name: str, call: Any, mesh: Mesh, args: Nest) -> NoReturn:
        if self.step is None:
            self.step = self._compiled(name, call, mesh, _avals(args, mesh))
        raise ScriptEnded

    def _compiled(
        self, name: str, call: Any, mesh: Mesh, avals: Nest
    ) -> CompiledStep | CompileError:
        try:
            start = time.perf_counter()
            lowered = call.lower(*avals)
            lowered_at = time.perf_counter()
            executable = lowered.compile()
            compiled_at = time.perf_counter()
        except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
            explained = _explained(error, name, mesh.size, self._topology)
            if explained is None:
                raise
            return explained
        infos = jax.tree.leaves(lowered.args_info, is_leaf=lambda x: hasattr(x, "donated"))
        state = [
            _bytes_on_a_device(aval)
            for aval, info in zip(jax.tree.leaves(avals), infos, strict=True)
            if info.donated
        ]
        return CompiledStep(
            name,
            mesh.shape[REPLICA_AXIS],
            mesh.size,
            executable,
            tuple(state),
            lowered_at - start,
            compiled_at - lowered_at,
        )


@final
class _Program:
    """A stand-in for a jitted function on a `mesh` that it cannot run on here.

    Args:
        call: The jitted function.
        mesh: The mesh.
        run: Function to call instead.
    """

    def __init__(self, call: Any, mesh: Mesh, run: Callable[..., Any]) -> None:
        self._call = call
        self._mesh = mesh
        self._run = run

    def lower(self, *args: Any) -> Any:
        """Returns the function lowered for the devices of the mesh."""
        return self._call.lower(*_avals(args, self._mesh))

    def __call__(self, *args: Any) -> Any:
        return self._run(*args)


def _avals(args: Nest, mesh: Mesh) -> Nest:
    """Returns the arguments of a program with the placement they would have on `mesh`."""
    none_placed = not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(args))

    def aval(leaf: Any) -> Any:
        if not hasattr(leaf, "dtype"):
            return leaf
        sharding = None
        if isinstance(leaf, jax.Array):
            here = leaf.sharding
            sharding = NamedSharding(mesh, here.spec if isinstance(here, NamedSharding) else P())
        elif none_placed:  # at least one argument must name the devices
            sharding = NamedSharding(mesh, P())
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        weak = getattr(leaf, "weak_type", False)
        return jax.ShapeDtypeStruct(jnp.shape(leaf), dtype, sharding=sharding, weak_type=weak)

    return jax.tree.map(aval, args)


def _bytes_on_a_device(aval: jax.ShapeDtypeStruct) -> int:
    shape = aval.shape if aval.sharding is None else aval.sharding.shard_shape(aval.shape)
    return math.prod(shape) * aval.dtype.itemsize


def _explained(
    error: Exception, name: str, num_used: int, topology: Topology
) -> CompileError | None:
    """Returns an error that explains a compiler's refusal; None if `error` is not a refusal."""
    text = str(error)
    missing = re.search(r"rule for primitive '(\w+)' not found for platform", text)
    if missing is not None:
        return CompileError(
            f"{name} uses {missing[1]!r}, which XLA does not have on a {topology.kind}. Compute it"
            " another way, or outside of the step."
        )
    if "RESOURCE_EXHAUSTED" in text:
        return CompileError(
            f"{name} does not fit into the memory of {topology.name}. The compiler says:"
            f" {_beginning(text)}\nTake a smaller batch or model, a narrower dtype, or more"
            " devices."
        )
    if not isinstance(error, jax.errors.JaxRuntimeError):
        return None
    num_devices = sum(map(len, topology.hosts))
    if topology.kind == "TPU" and num_used < num_devices:
        return CompileError(
            f"{name} is for {num_used} of the {num_devices} devices of {topology.name}, and the"
            " chips of a TPU slice run programs only together. MirroredStrategy takes one host of"
            f" {len(topology.hosts)}; use TPUStrategy, or a smaller topology."
        )
    return CompileError(
        f"{name} cannot be compiled for {topology.name}. The compiler says: {_beginning(text)}"
    )


def _beginning(text: str) -> str:
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return "\n  ".join(lines[:12] if len(lines) <= 12 else [*lines[:12], "..."])
