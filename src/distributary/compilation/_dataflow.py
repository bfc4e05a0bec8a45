"""Follows the rows of the batch through a compiled program (HLO)."""

import functools
import importlib.util
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, final

# One array: an instruction, and its element if that gives a tuple; None for all it gives.
_Value: TypeAlias = "tuple[Instruction, int | None]"

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
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
# `1 "model.py"`, or `1 {file_name_id=1 ... line=271 ...}`.
_TABLE_ROW = re.compile(r"(?P<number>\d+) (?P<columns>.*)")


@final
@dataclass(frozen=True, eq=False, slots=True)
class Instruction:
    """One instruction of a program.

    Args:
        kind: Its operation, such as `"dot"`.
        shape: Text of the shape of its result.
        operands: Text between the parentheses.
        attributes: Text behind the parentheses.
        computation: Name of the computation that contains it.
        position: Its place in the order in which the computation runs.
    """

    kind: str
    shape: str
    operands: str
    attributes: str
    computation: str
    position: int

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
        self._entry = computation = table = ""
        # By the name of a table, the columns of each of its rows.
        self._tables: dict[str, dict[str, list[str]]] = {}
        for line in hlo.splitlines():
            if (match := _COMPUTATION.match(line)) is not None:
                computation = match["name"]
                self._named[computation] = {}
                self._entry = computation if match["entry"] else self._entry
            elif computation and (match := _INSTRUCTION.match(line)) is not None:
                named = self._named[computation]
                made = Instruction(
                    match["kind"],
                    match["shape"],
                    match["operands"],
                    match["attributes"],
                    computation,
                    len(named),
                )
                named[match["name"]] = made
                self.instructions.append(made)
                if match["root"]:
                    self._root[computation] = made
                for name in _called(made):
                    self.caller[name] = made
            elif not computation and (match := _TABLE_ROW.match(line)) is not None:
                columns = re.findall(r'(?:^|=)(\d+|"[^"]*")', match["columns"])
                self._tables[table][match["number"]] = columns
            elif not computation and line.isalpha():
                table = line
                self._tables[table] = {}

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
        for value in _ordered((one, None), self._sources):
            name = re.search(r'op_name="([^"]*)"', value[0].attributes)
            frame = re.search(r"stack_frame_id=(\d+)", value[0].attributes)
            if name is not None and frame is not None:
                return name[1], self._line(frame[1])
        return "unknown", "unknown line"

    def _line(self, frame: str) -> str:
        """Returns the innermost line of a stack that is outside of the libraries."""
        frames, places = self._tables["StackFrames"], self._tables["FileLocations"]
        first = int(next(iter(frames.values()))[1])  # XLA counts parents from 1, or from 0
        line = "unknown line"
        while frame in frames:
            place, parent = frames[frame]
            file = self._tables["FileNames"][places[place][0]][0].strip('"')
            line = f"{Path(file).name}:{places[place][2]}"
            if not any(library in Path(file).parents for library in _libraries()):
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
        reads = self._reads()
        readers: dict[_Value, list[_Value]] = {}
        for value, sources in reads.items():
            for source in sources:
                readers.setdefault(source, []).append(value)
        given = [
            value
            for value in reads
            if value[0].kind == "parameter"
            and value[0].computation == self._entry
            and int(value[0].operands) in rows
        ]
        touched = _reached(given, readers)
        computed = _reached((v for v in touched if v[0].combines), readers)
        on_rows = _reached(given, readers, lambda v: not (v[0].is_sum and v in computed))
        combining = [v for v in on_rows if v[0].combines]
        needed_again = _reached((s for v in combining for s in reads[v]), reads)
        # Without the way back of loops: the next round may be the next step.
        forward = {
            value: [s for s in sources if not _is_back(value, s)]
            for value, sources in reads.items()
        }
        needed = _reached((s for v in combining for s in forward[v]), forward)
        found = [v for v in reads if v[0].collective and any(s in on_rows for s in reads[v])]
        moving = {v[0] for v in found if v in needed or v in on_rows}
        sums = [v for v in found if v[0] not in moving]
        behind = _reached(sums, forward)
        end: dict[str, int] = {}
        for value in combining:
            for one in self.chain(value[0]) if value in behind else ():
                end[one.computation] = max(one.position, end.get(one.computation, 0))
        roles = dict.fromkeys(moving, ("activations", 0))
        waited_for = {value[0] for value in sums if value in needed_again}
        for one, _ in sums:
            early = num_calls = self.num_calls(one) or 1
            if all(x.position >= end.get(x.computation, 0) for x in self.chain(one)):
                # In the backward pass of a loop over layers, all rounds but the last start early.
                early = 0 if one in waited_for else num_calls - 1
            roles[one] = ("sum", early)
        return roles

    def _reads(self) -> dict[_Value, list[_Value]]:
        """Returns for every value that the result depends on, which values it reads."""
        root = self._root[self._entry]
        outputs = range(len(_NAME.findall(root.operands))) if root.kind == "tuple" else (None,)
        waiting: list[_Value] = [(root, element) for element in outputs]
        reads: dict[_Value, list[_Value]] = {}
        while waiting:
            value = waiting.pop()
            if value not in reads:
                reads[value] = self._sources(*value)
                waiting += reads[value]
        return reads

    def _sources(self, one: Instruction, element: int | None) -> list[_Value]:
        if one.kind == "parameter":
            caller = self.caller.get(one.computation)
            if caller is None:
                return []
            operands = self._operands(caller)
            if caller.kind == "while":
                return [(operands[0], element), (self._root[_called(caller)[-1]], element)]
            number = int(one.operands)
            if caller.kind == "conditional":
                number = 1 + _called(caller).index(one.computation)
            return [(operands[number], element)]
        operands = self._operands(one)
        if one.kind == "get-tuple-element":
            return [(operands[0], int(one.attributes.partition("index=")[2].partition(",")[0]))]
        if one.kind == "tuple" and element is not None:
            return [(operands[element], None)]
        if one.kind in ("copy", "opt-barrier", "bitcast"):
            return [(operands[0], element)]
        called = _called(one)
        if not called:
            return [(operand, None) for operand in operands]
        if one.kind == "while":
            return [(operands[0], element), (self._root[called[-1]], element)]
        if one.kind.startswith("async"):
            element = None
        results: list[_Value] = [(self._root[name], element) for name in called]
        return [(operands[0], None), *results] if one.kind == "conditional" else results

    def _operands(self, one: Instruction) -> list[Instruction]:
        named = self._named[one.computation]
        return [named[name] for name in _NAME.findall(one.operands)]


def _is_back(value: _Value, source: _Value) -> bool:
    """Returns whether a value of a loop reads what the round before has computed."""
    return value[0].kind == "parameter" and value[0].computation == source[0].computation


@functools.cache
def _libraries() -> list[Path]:
    """Returns the folders of code that is not the user's."""
    found = [importlib.util.find_spec(name) for name in ("distributary", "jax", "keras")]
    return [Path(spec.origin).parent for spec in found if spec is not None and spec.origin]


def _ordered(start: _Value, edges: Callable[..., Sequence[_Value]]) -> Iterator[_Value]:
    """Returns `start` and what the edges lead to from it, the nearest first."""
    waiting, seen = deque([start]), {start}
    while waiting:
        yield (value := waiting.popleft())
        new = [other for other in edges(*value) if other not in seen]
        seen.update(new)
        waiting += new


def _reached(
    start: Iterable[_Value],
    edges: Mapping[_Value, Sequence[_Value]],
    goes_on: Callable[[_Value], bool] = lambda value: True,
) -> set[_Value]:
    """Returns the values that the edges lead to from `start`, and these, but for where they end."""
    waiting, reached = list(start), set[_Value]()
    while waiting:
        value = waiting.pop()
        if value not in reached and goes_on(value):
            reached.add(value)
            waiting += edges.get(value, ())
    return reached


def _called(one: Instruction) -> list[str]:
    """Returns the computations that an instruction runs; the body of a loop is the last."""
    found = (_APPLIED if one.kind == "call" else _CALLED).findall(one.attributes)
    return [name for names in found for name in _NAME.findall(names)]
