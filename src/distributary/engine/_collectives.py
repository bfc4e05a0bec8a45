"""Finds collectives in the text of a compiled program (HLO)."""

import itertools
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

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

# Asynchronous ones consist of a start and a done.
_COLLECTIVE = re.compile(
    r"(all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute"
    r"|collective-broadcast)(?:-start)?"
)
# TPUs write one that runs beside computations into each of these: the first starts it.
_CHAIN = re.compile(r'chain_id="\d+"')
_STARTS_CHAIN = 'custom_call_target="AsyncCollectiveStart"'
_COMPUTES = re.compile(r"call|conditional|convolution|custom-call|dot|fusion|while")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


@final
@dataclass(frozen=True)
class Collective:
    """One collective of a compiled program.

    Args:
        kind: `"all-reduce"`, `"reduce-scatter"`, `"all-gather"`, ...
        num_operands: Number of arrays that it combines.
        num_bytes: Size of the whole arrays: the inputs of an all-reduce or reduce-scatter, the
            outputs of an all-gather.
        groups: Groups of devices that take part together, by their positions in the mesh. Between
            slices, the numbers of slices; for a permutation, pairs of source and target.
        network: `"slice"` within one TPU slice or between GPUs, `"slices"` between slices.
        algorithm: The compiler's description of how it is carried out; None if there is none.
        num_calls: Number of times that a run of the program executes it. None in a loop if the
            compiler does not say how often the loop runs.
        role: `"sum"` of gradients or metrics, or `"activations"` if computations on rows read its
            result; empty if it gets no rows.
        num_early: Number of calls of a sum that start before the backward pass ends.
        is_async: Whether the device computes something else meanwhile.
        name: Name of the operation that moves activations, as the model and JAX call it.
        line: Its line in the model, such as `"model.py:12"`.
    """

    kind: str
    num_operands: int
    num_bytes: int
    groups: tuple[tuple[int, ...], ...]
    network: str
    algorithm: str | None
    num_calls: int | None
    role: str = ""
    num_early: int = 0
    is_async: bool = False
    name: str = ""
    line: str = ""

    def __str__(self) -> str:
        text = (
            f"{self.kind} of {counted(self.num_operands, 'array')}, {format_bytes(self.num_bytes)},"
            f" {short_groups(self.groups)}"
        )
        if self.network == "slices":
            text += " across slices"
        if self.num_calls != 1:
            text += f", {self.num_calls or '?'} times in a loop"
        return text if self.algorithm is None else f"{text}, {self.algorithm}"


_ARRAY = re.compile(r"(?P<dtype>[a-z]+\d*\w*)\[(?P<dims>[\d,]*)\]")
_BITS = re.compile(r"\d+")
# The numbers from 0 on, reshaped and transposed: `[2,4]T(1,0)`.
_IOTA = r"\[[\d,]+\](?:T\([\d,]+\))?"
# The axes of a mesh along which devices take part together. JAX 0.12 writes most groups like this.
# An axis may be cut: of `'a':(2)4` the part of size 4 takes part, with 2 parts before it.
_MESH_AXES = re.compile(
    rf"replica_groups=mesh\[(?P<mesh>[^\]]*)\](?:, device_ids=\((?P<ids>{_IOTA}|[\d,]+)\))?"
    r" \{(?P<axes>[^}]*)\}"
)


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


@final
class Program:
    """The instructions of a compiled program.

    Args:
        hlo: Text of the program, in the order in which it runs.

    Attributes:
        instructions: All instructions, in the order of the text.
        caller: By the name of a computation, the instruction that calls it.
        entry: Name of the computation that runs first.
    """

    def __init__(self, hlo: str) -> None:
        self.instructions: list[Instruction] = []
        self.caller: dict[str, Instruction] = {}
        self._by_computation: dict[str, list[Instruction]] = defaultdict(list)
        self.entry = computation = ""
        numbers = itertools.count()
        for line in hlo.splitlines():
            if (match := _COMPUTATION.match(line)) is not None:
                computation, numbers = match["name"], itertools.count()
                self.entry = computation if match["entry"] else self.entry
            elif computation and (match := _INSTRUCTION.match(line)) is not None:
                instruction = Instruction(computation, next(numbers), **match.groupdict())
                self.instructions.append(instruction)
                self._by_computation[computation].append(instruction)
                self.caller |= dict.fromkeys(called_by(instruction), instruction)
        self._starting = {x.computation for x in self.instructions if _STARTS_CHAIN in x.attributes}

    @property
    def collectives(self) -> dict[Instruction, Collective]:
        """The collectives, in the order of the text."""
        starts = [one for one in self.instructions if one.collective and not self._goes_on(one)]
        return {one: _collective(self.chain(one), self.num_calls(one)) for one in starts}

    def _goes_on(self, one: Instruction) -> bool:
        """Returns whether a collective has been started by another instruction."""
        return one.computation not in self._starting and bool(_CHAIN.search(one.attributes))

    def is_beside_others(self, one: Instruction) -> bool:
        """Returns whether the device computes between the start and the end of a collective."""
        if one.computation in self._starting:
            return True
        start = next((x for x in self.chain(one) if "-start" in x.kind), None)
        if start is None:
            return False
        rest = self._by_computation[start.computation][start.position + 1 :]
        before_end = itertools.takewhile(lambda x: start.name not in names_in(x.operands), rest)
        return any(_COMPUTES.fullmatch(x.kind) for x in before_end)

    def chain(self, instruction: Instruction) -> list[Instruction]:
        """Returns an instruction, the one that calls its computation, and so on."""
        chain = [instruction]
        while chain[-1].computation in self.caller:
            chain.append(self.caller[chain[-1].computation])
        return chain

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


def called_by(one: Instruction) -> list[str]:
    """Returns the computations that an instruction runs; the body of a loop is the last."""
    matches = (_APPLIED if one.kind == "call" else _CALLED).findall(one.attributes)
    return [name for names in matches for name in names_in(names)]


def names_in(text: str) -> list[str]:
    """Returns the names of instructions or computations in a text."""
    return _NAME.findall(text)


def total_bytes(collectives: Iterable[Collective]) -> int:
    """Returns the size of the arrays that one run of a program sends through some collectives.

    A loop counts once if the compiler does not say how often it runs.
    """
    return sum(c.num_bytes * (c.num_calls or 1) for c in collectives)


def _collective(chain: Sequence[Instruction], num_calls: int | None) -> Collective:
    """Returns the collective that comes first in a chain of callers."""
    one, kind, attributes = chain[0], chain[0].collective, chain[0].attributes
    arrays = [_num_bytes(array) for array in _ARRAY.finditer(one.shape)]
    if one.kind == "send":
        # Between slices. The first element of the result of a send is the array that it sends.
        target = re.search(r'_xla_megascale_target="\{([\d,]+)\}x', attributes)
        slices = () if target is None else tuple(int(i) - 1 for i in target[1].split(","))
        return Collective(kind, 1, arrays[0], (slices,), "slices", None, num_calls)
    num_operands = len(one.operands.split(", "))
    if len(arrays) == 2 * num_operands:  # the start returns its operands and its results
        arrays = arrays[num_operands:]
    algorithm = next(filter(None, (_algorithm(caller.attributes) for caller in chain[:2])), None)
    groups = _groups(attributes)
    num_bytes = sum(arrays)
    if kind == "reduce-scatter" and groups:  # the result is the part of one device
        num_bytes *= len(groups[0])
    if one.computation.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"  # an all-reduce fused with picking each device's part
    return Collective(kind, num_operands, num_bytes, groups, "slice", algorithm, num_calls)


def _num_bytes(array: re.Match[str]) -> int:
    bits = _BITS.search(array["dtype"])
    width = 8 if bits is None else int(bits[0])  # the name of pred has no number
    size = math.prod(int(dim) for dim in array["dims"].split(",") if dim)
    return -(-size * width // 8)


def _algorithm(line: str) -> str | None:
    """Returns `strategy (emitter)` of a TPU; None if the compiler lets the runtime choose."""
    match = re.search(r"backend_config=(\{.*\})", line)
    if match is None:
        return None
    try:
        config: Any = json.JSONDecoder().raw_decode(match[1])[0]
    except ValueError:
        return None
    chosen = config.get("collective_algorithm_config", {})
    names = [chosen[key] for key in ("strategy", "emitter") if key in chosen]
    return None if not names else names[0] + (f" ({names[1]})" if len(names) > 1 else "")


def _groups(attributes: str) -> tuple[tuple[int, ...], ...]:
    explicit = re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}", attributes)
    if explicit is not None:
        return tuple(
            tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", explicit[1])
        )
    along_axes = _MESH_AXES.search(attributes)
    listed = re.search(rf"replica_groups=\[(\d+)[\d,]*\]<=({_IOTA})", attributes)
    if along_axes is not None:
        groups = _groups_along_axes(**along_axes.groupdict())
    elif listed is not None:
        groups = _iota(listed[2]).reshape(int(listed[1]), -1)
    else:
        return ()
    return tuple(tuple(map(int, group)) for group in groups)


def _groups_along_axes(mesh: str, ids: str | None, axes: str) -> np.ndarray:
    """Returns the groups, one per row, of devices along some axes of a mesh."""
    sizes = {name: int(size) for name, size in re.findall(r"([^,=]+)=(\d+)", mesh)}
    together = [
        (name, int(before or 1), int(size or sizes[name]))
        for name, before, size in re.findall(r"([^,:]+)(?::\((\d+)\)(\d+))?", axes)
    ]
    dims: list[int] = []
    dim_of: dict[tuple[str, int], int] = {}
    for name, whole in sizes.items():
        cuts = {1, *(c for n, b, size in together if n == name for c in (b, b * size) if c < whole)}
        for before, after in itertools.pairwise([*sorted(cuts), whole]):
            dim_of[name, before] = len(dims)
            dims.append(after // before)
    if ids is None:
        numbers = np.arange(math.prod(dims))
    else:
        numbers = _iota(ids) if ids.startswith("[") else np.array(_numbers(ids))
    last = [dim_of[name, before] for name, before, _ in together]
    numbers = np.moveaxis(numbers.reshape(dims), last, range(-len(last), 0))
    return numbers.reshape(-1, math.prod(size for *_, size in together))


def _iota(text: str) -> np.ndarray:
    dims, *order = (_numbers(part) for part in re.findall(r"[\d,]+", text))
    numbers = np.arange(math.prod(dims)).reshape(dims)
    return numbers.transpose(*order) if order else numbers


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def short_groups(groups: tuple[tuple[int, ...], ...]) -> str:
    """Returns text for people: `"groups 0-3 | 4-7"`, or the number of groups if there are many."""
    if not groups:
        return "all devices"
    if len(groups) > 4:
        return f"{len(groups)} groups of {len(groups[0])}"
    return "groups " + " | ".join(",".join(_runs(group)) for group in groups)


def _runs(group: tuple[int, ...]) -> Iterator[str]:
    for _, run in itertools.groupby(enumerate(group), lambda pair: pair[1] - pair[0]):
        numbers = [number for _, number in run]
        yield f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0])


def counted(number: int, noun: str) -> str:
    """Returns text for people: `"1 array"`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def format_bytes(size: float) -> str:
    """Returns a size as text for people: `"64.0 KiB"`."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size:.0f} B"
