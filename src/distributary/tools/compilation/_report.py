"""Reports on compiled steps."""

import importlib.metadata
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

import jax

from distributary.devices import REPLICA_AXIS
from distributary.engine import Collective, counted, format_bytes as _size, total_bytes
from distributary.tools.compilation._dataflow import (
    collectives_of_step,
    moved_activations,
    num_aliased_outputs,
)
from distributary.tools.compilation._topologies import Topology

_COMPILERS = {"TPU": "libtpu", "GPU": "jax-cuda13-pjrt"}


@final
@dataclass(frozen=True)
class Memory:
    """Memory of one device while the step runs, in bytes. TPUs pad arrays.

    Args:
        arguments: State and batch.
        outputs: New state and results.
        donated: Part of the outputs that takes the place of arguments.
        temporaries: Additional memory that the step needs.
        code: The program itself.
        available: Memory that a program can use on such a device.
    """

    arguments: int
    outputs: int
    donated: int
    temporaries: int
    code: int
    available: int

    @property
    def total(self) -> int:
        """All memory that the step needs."""
        return self.arguments + self.outputs - self.donated + self.temporaries + self.code


@final
@dataclass(frozen=True)
class Report:
    """The compiler's result for a step. All sizes are in bytes, on one device.

    Args:
        topology: Name of the topology, as the user wrote it.
        device_kind: Name of the devices.
        num_devices: Number of devices in the topology.
        num_devices_used: Number of devices that run the step.
        num_hosts: Number of hosts that contain the devices.
        num_slices: Number of TPU slices.
        num_replicas: Number of replicas.
        step: Name of the step.
        collectives: Collectives of the step.
        all_reduced_bytes: Size of the arrays that one step all-reduces between GPUs or within a TPU
            slice, even if the compiler turns it into a reduce-scatter and an all-gather. Arrays in
            a loop count once if the compiler does not say how often the loop runs.
        cross_slice_bytes: Size of what every device reduces with its counterparts in other slices.
        memory: Memory of one device.
        flops: Floating point operations of one device; None if the compiler does not say.
        num_state_arrays: Number of arrays that the step updates.
        num_donated_arrays: Number of these arrays that are updated in place.
        state_bytes: Size of these arrays without padding.
        lower_seconds: Seconds that JAX took to lower the step, after tracing it.
        compile_seconds: Seconds that the compiler took.
        versions: Versions of jax and of the compiler.
    """

    topology: str
    device_kind: str
    num_devices: int
    num_devices_used: int
    num_hosts: int
    num_slices: int
    num_replicas: int
    step: str
    collectives: tuple[Collective, ...]
    all_reduced_bytes: int
    cross_slice_bytes: int
    memory: Memory
    flops: float | None
    num_state_arrays: int
    num_donated_arrays: int
    state_bytes: int
    lower_seconds: float
    compile_seconds: float
    versions: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """Returns the report as numbers, strings, lists and dicts, by the names of its fields."""
        content: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        content["memory"]["total"] = self.memory.total
        return content

    def to_text(self) -> str:
        """Returns the report as text for people."""
        memory = self.memory
        rows = [
            ("step", f"{self.step}, {counted(self.num_replicas, 'replica')}{self._unused()}"),
            *self._collective_rows(),
            ("memory", f"{_size(memory.total)} of {_size(memory.available)} per device:"),
            ("", f"{_size(memory.arguments)} arguments, {_size(memory.temporaries)} temporaries,"),
            ("", f"{_size(memory.code)} code, {_size(memory.outputs - memory.donated)} outputs"),
            ("donated", f"{self.num_donated_arrays} of {self._state()}, updated in place"),
            ("compute", _operations(self.flops)),
            ("lowered in", f"{self.lower_seconds:.1f} s"),
            ("compiled in", f"{self.compile_seconds:.1f} s"),
        ]
        return "\n".join([self._headline(), *(f"  {label:<12} {text}" for label, text in rows)])

    def _headline(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        slices = f" in {self.num_slices} slices" if self.num_slices > 1 else ""
        return (
            f"{self.topology}: {self.num_devices} x {self.device_kind}, "
            f"{counted(self.num_hosts, 'host')}{slices} ({versions})"
        )

    def _unused(self) -> str:
        if self.num_devices_used == self.num_devices:
            return ""
        return f" on {self.num_devices_used} of {self.num_devices} devices"

    def _collective_rows(self) -> list[tuple[str, str]]:
        if not self.collectives:
            return [("collectives", "none")]
        others = Counter(c for c in self.collectives if c.role != "activations")
        texts = {
            "collectives": [f"{count} {one}" for one, count in others.items()],
            "activations": moved_activations(self.collectives),
        }
        rows = [
            ("" if i else label, line)
            for label, lines in texts.items()
            for i, line in enumerate(lines or ["none"])
        ]
        return [*rows, ("all-reduced", self._all_reduced()), ("gradients", self._overlap())]

    def _overlap(self) -> str:
        sums = [c for c in self.collectives if c.role == "sum"]
        early = sum(c.num_bytes * c.num_early for c in sums)
        waiting = sum(c.num_bytes * c.num_early for c in sums if not c.is_async)
        return (
            f"{_size(early)} of {_size(total_bytes(sums))} start before the backward"
            f" pass ends{f', which waits for {_size(waiting)}' if waiting else ''}"
        )

    def _all_reduced(self) -> str:
        in_a_loop = any(collective.num_calls is None for collective in self.collectives)
        text = f"{'at least ' if in_a_loop else ''}{_size(self.all_reduced_bytes)} per step"
        if self.num_slices == 1:
            return text
        return f"{text}; per device {_size(self.cross_slice_bytes)} across slices"

    def _state(self) -> str:
        return f"{counted(self.num_state_arrays, 'state array')} ({_size(self.state_bytes)})"


def report_of(
    topology: Topology,
    step: str,
    mesh: jax.sharding.Mesh,
    executable: jax.stages.Compiled,
    state_bytes: Sequence[int],
    lower_seconds: float,
    compile_seconds: float,
) -> Report:
    """Returns the report on a step that is compiled for a mesh of a topology's devices.

    Args:
        topology: The topology.
        step: Name of the function that the user wrote, or of the Keras method.
        mesh: The devices that run the step.
        executable: The result of the compiler.
        state_bytes: Size on one device of each array that the step updates.
        lower_seconds: Seconds that JAX took to lower the traced step.
        compile_seconds: Seconds that the compiler took.
    """
    hlo = executable.as_text() or ""
    collectives = tuple(collectives_of_step(executable))
    analysis: Any = executable.memory_analysis()
    costs: Any = executable.cost_analysis() or {}
    compiler = _COMPILERS[topology.kind]
    return Report(
        topology=topology.name,
        device_kind=topology.hosts[0][0].device_kind,
        num_devices=sum(map(len, topology.hosts)),
        num_devices_used=mesh.size,
        num_hosts=len(topology.hosts),
        num_slices=topology.num_slices,
        num_replicas=mesh.shape[REPLICA_AXIS],
        step=step,
        collectives=collectives,
        all_reduced_bytes=_reduced_bytes(collectives, "slice"),
        cross_slice_bytes=_reduced_bytes(collectives, "slices"),
        memory=Memory(
            arguments=analysis.argument_size_in_bytes,
            outputs=analysis.output_size_in_bytes,
            donated=analysis.alias_size_in_bytes,
            temporaries=analysis.temp_size_in_bytes,
            code=analysis.generated_code_size_in_bytes,
            available=topology.memory_bytes,
        ),
        flops=costs.get("flops"),
        num_state_arrays=len(state_bytes),
        num_donated_arrays=num_aliased_outputs(hlo),
        state_bytes=sum(state_bytes),
        lower_seconds=lower_seconds,
        compile_seconds=compile_seconds,
        versions={"jax": jax.__version__, compiler: importlib.metadata.version(compiler)},
    )


def _reduced_bytes(collectives: tuple[Collective, ...], network: str) -> int:
    return total_bytes(
        c
        for c in collectives
        if c.kind in ("all-reduce", "reduce-scatter") and c.network == network
    )


def _operations(flops: float | None) -> str:
    if flops is None:
        return "unknown: this compiler does not count operations"
    return f"{flops / 1e9:.3g} GFLOP per device and step"
