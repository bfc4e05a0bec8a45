"""Reports on compiled steps, in which it follows the rows of the batch."""

import importlib.metadata
import json
import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, final

import jax

from distributary.devices import REPLICA_AXIS
from distributary.engine import (
    Collective,
    Instruction,
    Program,
    called_by,
    counted,
    format_bytes,
    format_bytes as _size,
    names_in,
    total_bytes,
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
        devices = f"{self.num_devices_used} of {self.num_devices} devices"
        used = "" if self.num_devices_used == self.num_devices else f" on {devices}"
        state = f"{counted(self.num_state_arrays, 'state array')} ({_size(self.state_bytes)})"
        operations = "unknown: this compiler does not count operations"
        if self.flops is not None:
            operations = f"{self.flops / 1e9:.3g} GFLOP per device and step"
        rows = [
            ("step", f"{self.step}, {counted(self.num_replicas, 'replica')}{used}"),
            *self._collective_rows(),
            ("memory", f"{_size(memory.total)} of {_size(memory.available)} per device:"),
            ("", f"{_size(memory.arguments)} arguments, {_size(memory.temporaries)} temporaries,"),
            ("", f"{_size(memory.code)} code, {_size(memory.outputs - memory.donated)} outputs"),
            ("donated", f"{self.num_donated_arrays} of {state}, updated in place"),
            ("compute", operations),
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
    reducing = [c for c in collectives if c.kind in ("all-reduce", "reduce-scatter")]
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
        all_reduced_bytes=total_bytes(c for c in reducing if c.network == "slice"),
        cross_slice_bytes=total_bytes(c for c in reducing if c.network == "slices"),
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


# Follows the rows of the batch through a compiled program (HLO), to report on its collectives.

# One array: an instruction, and its element if that gives a tuple; None for all it gives.
_Value: TypeAlias = "tuple[Instruction, int | None]"
_Edges: TypeAlias = Callable[[_Value], Sequence[_Value]]

# What combines elements of an array. All else computes one element at a time, or moves elements.
_COMBINES = re.compile(
    r"cholesky|convolution|custom-call|dot|fft|ragged-dot|reduce|reduce-window|scaled-dot|scatter"
    r"|select-and-scatter|sort|topk|triangular-solve"
)
# Instructions of TPUs that are written as calls of others, and move elements.
_MOVES = re.compile('custom_call_target="(ConcatBitcast|AssumeGatherIndicesInBound)"')
# What names a transfer between slices, where it is sent and where it is received.
_RENDEZVOUS = re.compile('_xla_host_transfer_rendezvous="([^"]*)"')
_PACKAGE = Path(__file__).parents[2]
# `1 "model.py"`, or `1 {file_name_id=1 ... line=271 ...}`.
_TABLE_ROW = re.compile(r"(?P<number>\d+) (?P<columns>.*)")
_COLUMN = re.compile(r'(?:^|=)(\d+|"[^"]*")')


def collectives_of_step(executable: jax.stages.Compiled) -> list[Collective]:
    """Returns the collectives of a compiled step, whose last argument holds the batch."""
    *state, data = executable.input_shardings[0]  # None of those that the step does not read
    start = len(jax.tree.leaves(state))
    rows = [start + i for i, s in enumerate(jax.tree.leaves(data)) if not s.is_fully_replicated]
    return collectives_of(executable.as_text() or "", rows)


def collectives_of(hlo: str, rows: Collection[int] = ()) -> list[Collective]:
    """Returns the collectives of a compiled program, in the order of its text.

    Args:
        hlo: Text of the program.
        rows: The parameters that hold rows of the batch, different ones on each device.
    """
    flow = Dataflow(hlo)
    roles = flow.roles(rows) if rows else {}
    collectives = []
    for one, collective in flow.program.collectives.items():
        role, num_early = roles.get(one, ("", 0))
        is_async = flow.program.is_beside_others(one)
        name, line = flow.place(one) if role == "activations" else ("", "")
        known: Any = dict(role=role, num_early=num_early, is_async=is_async, name=name, line=line)
        collectives.append(replace(collective, **known))
    return collectives


def moved_activations(collectives: Iterable[Collective]) -> list[str]:
    """Returns text for people on what moves activations, by the lines of the model."""
    by_line: dict[tuple[str, str], list[Collective]] = {}
    for one in collectives:
        if one.role == "activations":
            by_line.setdefault((one.kind, one.line), []).append(one)
    return [
        f"{len(of)} {kind}, {format_bytes(total_bytes(of))}, {line}: {of[0].name}"
        for (kind, line), of in by_line.items()
    ]


def num_aliased_outputs(hlo: str) -> int:
    """Returns how many outputs of a program take the place of an argument."""
    header = hlo[: hlo.index("\n")]
    match = re.search(r"input_output_alias=\{(.*?\)) ?\}", header)
    return 0 if match is None else match[1].count("-alias)")


@final
class Dataflow:
    """The values of a compiled program, and what each is computed of.

    Args:
        hlo: Text of the program, in the order in which it runs.
    """

    def __init__(self, hlo: str) -> None:
        self.program = Program(hlo)
        self._caller = self.program.caller
        self._named: dict[str, dict[str, Instruction]] = defaultdict(dict)
        self._root: dict[str, Instruction] = {}
        self._sent: dict[str, Instruction] = {}
        for one in self.program.instructions:
            self._named[one.computation][one.name] = one
            if one.root:
                self._root[one.computation] = one
            if one.kind == "send":
                self._sent |= dict.fromkeys(_RENDEZVOUS.findall(one.attributes), one)
        # Columns of the rows of tables, by the name of the table and the number of the row. They
        # come before the computations.
        self._tables: dict[tuple[str, str], list[str]] = {}
        table = ""
        for line in hlo.partition("{\n")[0].splitlines():
            if (match := _TABLE_ROW.match(line)) is not None:
                self._tables[table, match["number"]] = _COLUMN.findall(match["columns"])
            elif line.isalpha():
                table = line

    def place(self, one: Instruction) -> tuple[str, str]:
        """Returns the name and the line of the model behind an instruction, for people.

        Collectives that the compiler combines have no name of their own; then it is that of an
        instruction that they read.
        """
        for (near, _), _ in _walk([(one, None)], self._sources):
            name = re.search(r'op_name="([^"]*)"', near.attributes)
            frame = re.search(r"stack_frame_id=(\d+)", near.attributes)
            if name is not None and frame is not None:
                return name[1], self._line(frame[1])
        return "unknown", "unknown line"

    def _line(self, frame: str) -> str:
        """Returns the innermost line of a stack that is outside of installed packages."""
        first = int(self._tables["StackFrames", "1"][1])  # XLA counts parents from 0 or from 1
        line = "unknown line"
        while ("StackFrames", frame) in self._tables:
            place, parent = self._tables["StackFrames", frame]
            number, _, line_number, *_ = self._tables["FileLocations", place]
            file = Path(self._tables["FileNames", number][0].strip('"'))
            line = f"{file.name}:{line_number}"
            if "site-packages" not in file.parts and _PACKAGE not in file.parents:
                break
            frame = str(int(parent) - first)
        return line

    def roles(self, rows: Collection[int]) -> dict[Instruction, tuple[str, int]]:
        """Tells sums from collectives that move activations.

        Rows of the batch are followed to where they are summed over the devices. A sum that no
        other computation on rows reads is one of gradients or metrics. The backward pass ends with
        the last computation on rows that such a sum reads.

        Args:
            rows: The parameters that hold rows, different ones on each device.

        Returns:
            `"sum"` or `"activations"` of every collective that gets rows or what is computed of
            them, and how many of its calls start before the backward pass ends.
        """
        root = self._root[self.program.entry]
        elements = range(len(self._operands(root))) if root.kind == "tuple" else [None]
        reads = dict(_walk([(root, element) for element in elements], self._sources))
        readers = _readers(reads)
        inputs = [value for value in self._parameters(rows) if value in reads]
        touched = _reached(inputs, readers.__getitem__)
        computed = _reached((v for v in touched if _combines(v[0])), readers.__getitem__)
        on_rows = _reached(
            inputs, readers.__getitem__, lambda v: not (_is_sum(v[0]) and v in computed)
        )
        combining = [v for v in on_rows if _combines(v[0])]
        # Without the way back of loops: the next round may be the next step.
        forward = lambda v: [s for s in reads[v] if not _is_back(v, s)]
        needed = _reached((s for v in combining for s in forward(v)), forward)
        needed_again = _reached((s for v in combining for s in reads[v]), reads.__getitem__)
        exchanges = [v for v in reads if v[0].collective and any(s in on_rows for s in reads[v])]
        # Permutations of what no computation on rows needs pass partial sums on in a ring.
        read = {v for v in on_rows if v[0].collective != "collective-permute"} | needed
        moving = {v[0] for v in exchanges if v in read}
        sums = [v for v in exchanges if v[0] not in moving]
        behind = _reached(sums, forward)
        ends = self._ends([v[0] for v in combining if v in behind])
        roles = dict.fromkeys(moving, ("activations", 0))
        waited_for = {v[0] for v in sums if v in needed_again}
        for one, _ in sums:
            early = num_calls = self.program.num_calls(one) or 1
            if all(x.position >= ends.get(x.computation, 0) for x in self.program.chain(one)):
                # In the backward pass of a loop over layers, all rounds but the last start early.
                early = 0 if one in waited_for else num_calls - 1
            roles[one] = ("sum", early)
        return roles

    def _parameters(self, numbers: Collection[int]) -> list[_Value]:
        entry = self._named[self.program.entry].values()
        parameters = [one for one in entry if one.kind == "parameter"]
        return [(one, None) for one in parameters if int(one.operands) in numbers]

    def _ends(self, instructions: Iterable[Instruction]) -> dict[str, int]:
        """Returns where the last of some instructions, or what calls it, is in each computation."""
        ends: dict[str, int] = {}
        for instruction in instructions:
            for one in self.program.chain(instruction):
                ends[one.computation] = max(one.position, ends.get(one.computation, 0))
        return ends

    def _sources(self, value: _Value) -> Sequence[_Value]:
        """Returns the values that a value is computed of."""
        one, element = value
        caller = self._caller.get(one.computation) if one.kind == "parameter" else None
        if caller is not None and caller.kind != "while":
            number = int(one.operands)
            if caller.kind == "conditional":
                number = 1 + called_by(caller).index(one.computation)
            return [(self._operands(caller)[number], element)]
        operands, called = self._operands(caller or one), called_by(caller or one)
        if one.kind == "while" or caller is not None:
            return [(operands[0], element), (self._root[called[-1]], element)]
        if one.kind == "get-tuple-element":
            return [(operands[0], int(one.attributes.partition("index=")[2].partition(",")[0]))]
        if one.kind == "recv":
            sent = map(self._sent.get, _RENDEZVOUS.findall(one.attributes))
            return [(send, None) for send in sent if send is not None]
        if one.kind == "tuple" and element is not None:
            return [(operands[element], None)]
        if one.kind in ("copy", "opt-barrier", "bitcast"):
            return [(operands[0], element)]
        if not called:
            return [(operand, None) for operand in operands]
        element = None if one.kind.startswith("async") else element
        chosen: list[_Value] = [(operands[0], None)] if one.kind == "conditional" else []
        return [*chosen, *((self._root[name], element) for name in called)]

    def _operands(self, one: Instruction) -> list[Instruction]:
        named = self._named[one.computation]
        return [named[name] for name in names_in(one.operands)]


def _is_sum(one: Instruction) -> bool:
    """Returns whether an instruction adds arrays of several devices."""
    return one.collective in ("all-reduce", "reduce-scatter")


def _combines(one: Instruction) -> bool:
    """Returns whether an instruction combines elements of arrays."""
    return bool(_COMBINES.fullmatch(one.kind)) and not _MOVES.search(one.attributes)


def _readers(reads: Mapping[_Value, Sequence[_Value]]) -> dict[_Value, list[_Value]]:
    readers = defaultdict[_Value, list[_Value]](list)
    for value, sources in reads.items():
        for source in sources:
            readers[source].append(value)
    return readers


def _is_back(value: _Value, source: _Value) -> bool:
    """Returns whether a value of a loop reads what the round before has computed."""
    return value[0].kind == "parameter" and value[0].computation == source[0].computation


def _walk(
    start: Iterable[_Value], edges: _Edges, goes_on: Callable[[_Value], bool] = lambda value: True
) -> Iterator[tuple[_Value, Sequence[_Value]]]:
    """Returns values and where their edges lead, from `start` on, the nearest first."""
    waiting, seen = deque(start), set[_Value]()
    while waiting:
        value = waiting.popleft()
        if value not in seen and goes_on(value):
            seen.add(value)
            yield value, (following := edges(value))
            waiting += following


def _reached(
    start: Iterable[_Value], edges: _Edges, *goes_on: Callable[[_Value], bool]
) -> set[_Value]:
    return {value for value, _ in _walk(start, edges, *goes_on)}
