"""Follows the rows of the batch through a compiled program (HLO)."""

import re
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, final

# One array: an instruction, and its element if that gives a tuple; None for all it gives.
_Value: TypeAlias = "tuple[Instruction, int | None]"
_Edges: TypeAlias = Callable[[_Value], Sequence[_Value]]

# `%name = shape kind(operands), attributes`.
_INSTRUCTION = re.compile(
    r"\s*(?P<root>ROOT )?%(?P<name>[\w.-]+) = (?P<shape>\(.*?\)|\S+) (?P<kind>[a-z][a-z-]*)"
    r"\((?P<operands>[^)]*)\)(?P<attributes>.*)"
)
_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%(?P<name>[\w.-]+) \(.*\{$")
_NAME = re.compile(r"%([\w.-]+)")
_CALLED = re.compile(
    r"(?:calls|body|condition|branch_computations|(?:true|false)_computation)=(%[\w.-]+|\{[^}]*\})"
)
_APPLIED = re.compile(r"to_apply=(%[\w.-]+)")

# What combines elements of an array. All else computes one element at a time, or moves elements.
_COMBINES = re.compile(
    r"cholesky|convolution|custom-call|dot|fft|ragged-dot|reduce|reduce-window|scaled-dot|scatter"
    r"|select-and-scatter|sort|topk|triangular-solve"
)
# Instructions of TPUs that are written as calls of others, and move elements.
_MOVES = re.compile('custom_call_target="(ConcatBitcast|AssumeGatherIndicesInBound)"')
# Asynchronous ones consist of a start and a done.
_COLLECTIVE = re.compile(
    r"(all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute"
    r"|collective-broadcast)(?:-start)?"
)
# What names a transfer between slices, where it is sent and where it is received.
_RENDEZVOUS = re.compile('_xla_host_transfer_rendezvous="([^"]*)"')
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_PACKAGE = Path(__file__).parents[1]
# `1 "model.py"`, or `1 {file_name_id=1 ... line=271 ...}`.
_TABLE_ROW = re.compile(r"(?P<number>\d+) (?P<columns>.*)")
_COLUMN = re.compile(r'(?:^|=)(\d+|"[^"]*")')


@final
@dataclass(frozen=True, eq=False, slots=True)
class Instruction:
    """One instruction of a program.

    Args:
        computation: Name of the computation that contains it.
        position: Its place in the order in which the computation runs.
        root: None unless it gives the result of the computation.
        name: Its name.
        shape: Text of the shape of its result.
        kind: Its operation, such as `"dot"`.
        operands: Text between the parentheses.
        attributes: Text behind the parentheses.
    """

    computation: str
    position: int
    root: str | None
    name: str
    shape: str
    kind: str
    operands: str
    attributes: str

    @property
    def collective(self) -> str:
        """The kind of a collective; empty for other instructions."""
        if self.kind == "send" and "ALL_REDUCE" in self.attributes:
            return "all-reduce"  # between slices
        match = _COLLECTIVE.fullmatch(self.kind)
        return "" if match is None else match[1]

    @property
    def is_sum(self) -> bool:
        """Whether it adds arrays of several devices."""
        return self.collective in ("all-reduce", "reduce-scatter")

    @property
    def combines(self) -> bool:
        """Whether it combines elements of arrays."""
        return bool(_COMBINES.fullmatch(self.kind)) and not _MOVES.search(self.attributes)


@final
class Program:
    """The instructions of a compiled program.

    Args:
        hlo: Text of the program, in the order in which it runs.

    Attributes:
        instructions: All instructions, in the order of the text.
        caller: By the name of a computation, the instruction that calls it.
    """

    def __init__(self, hlo: str) -> None:
        self.instructions: list[Instruction] = []
        self.caller: dict[str, Instruction] = {}
        self._named: dict[str, dict[str, Instruction]] = {}
        self._root: dict[str, Instruction] = {}
        self._sent: dict[str, Instruction] = {}
        self._entry = computation = table = ""
        # Columns of the rows of tables, by the name of the table and the number of the row.
        self._tables: dict[tuple[str, str], list[str]] = {}
        for line in hlo.splitlines():
            if (match := _COMPUTATION.match(line)) is not None:
                computation = match["name"]
                self._named[computation] = {}
                self._entry = computation if match["entry"] else self._entry
            elif computation and (match := _INSTRUCTION.match(line)) is not None:
                named = self._named[computation]
                made = Instruction(computation, len(named), **match.groupdict())
                named[made.name] = made
                self.instructions.append(made)
                if made.root:
                    self._root[computation] = made
                self.caller |= dict.fromkeys(_called(made), made)
                if made.kind == "send":
                    self._sent |= dict.fromkeys(_RENDEZVOUS.findall(made.attributes), made)
            elif not computation and (match := _TABLE_ROW.match(line)) is not None:
                self._tables[table, match["number"]] = _COLUMN.findall(match["columns"])
            elif not computation and line.isalpha():
                table = line

    def chain(self, instruction: Instruction) -> list[Instruction]:
        """Returns an instruction, the one that calls its computation, and so on."""
        chain = [instruction]
        while chain[-1].computation in self.caller:
            chain.append(self.caller[chain[-1].computation])
        return chain

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

    def num_calls(self, instruction: Instruction) -> int | None:
        """Returns how often a run executes an instruction; None if the compiler does not say."""
        count = 1
        for caller in self.chain(instruction):
            if caller.kind == "while":
                trips = _TRIP_COUNT.search(caller.attributes)
                if trips is None:
                    return None
                count *= int(trips[1])
        return count

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
        root = self._root[self._entry]
        elements = range(len(self._operands(root))) if root.kind == "tuple" else [None]
        reads = dict(_walk([(root, element) for element in elements], self._sources))
        readers = _readers(reads)
        given = [value for value in self._parameters(rows) if value in reads]
        touched = _reached(given, readers.__getitem__)
        computed = _reached((v for v in touched if v[0].combines), readers.__getitem__)
        on_rows = _reached(
            given, readers.__getitem__, lambda v: not (v[0].is_sum and v in computed)
        )
        combining = [v for v in on_rows if v[0].combines]
        # Without the way back of loops: the next round may be the next step.
        forward = lambda v: [s for s in reads[v] if not _is_back(v, s)]
        needed = _reached((s for v in combining for s in forward(v)), forward)
        needed_again = _reached((s for v in combining for s in reads[v]), reads.__getitem__)
        found = [v for v in reads if v[0].collective and any(s in on_rows for s in reads[v])]
        moving = {v[0] for v in found if v in needed or v in on_rows}
        sums = [v for v in found if v[0] not in moving]
        behind = _reached(sums, forward)
        ends = self._ends([v[0] for v in combining if v in behind])
        roles = dict.fromkeys(moving, ("activations", 0))
        waited_for = {v[0] for v in sums if v in needed_again}
        for one, _ in sums:
            early = num_calls = self.num_calls(one) or 1
            if all(x.position >= ends.get(x.computation, 0) for x in self.chain(one)):
                # In the backward pass of a loop over layers, all rounds but the last start early.
                early = 0 if one in waited_for else num_calls - 1
            roles[one] = ("sum", early)
        return roles

    def _parameters(self, numbers: Collection[int]) -> list[_Value]:
        entry = self._named[self._entry].values()
        parameters = [one for one in entry if one.kind == "parameter"]
        return [(one, None) for one in parameters if int(one.operands) in numbers]

    def _ends(self, instructions: Iterable[Instruction]) -> dict[str, int]:
        """Returns where the last of some instructions, or what calls it, is in each computation."""
        ends: dict[str, int] = {}
        for instruction in instructions:
            for one in self.chain(instruction):
                ends[one.computation] = max(one.position, ends.get(one.computation, 0))
        return ends

    def _sources(self, value: _Value) -> Sequence[_Value]:
        """Returns the values that a value is computed of."""
        one, element = value
        caller = self.caller.get(one.computation) if one.kind == "parameter" else None
        if caller is not None and caller.kind != "while":
            number = int(one.operands)
            if caller.kind == "conditional":
                number = 1 + _called(caller).index(one.computation)
            return [(self._operands(caller)[number], element)]
        operands, called = self._operands(caller or one), _called(caller or one)
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
        return [named[name] for name in _NAME.findall(one.operands)]


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


def _called(one: Instruction) -> list[str]:
    """Returns the computations that an instruction runs; the body of a loop is the last."""
    found = (_APPLIED if one.kind == "call" else _CALLED).findall(one.attributes)
    return [name for names in found for name in _NAME.findall(names)]
