"""Finds collectives in the text of a compiled program (HLO)."""

import itertools
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import numpy as np

from distributary.engine._dataflow import Instruction, Program


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
    program = Program(hlo)
    roles = program.roles(rows) if rows else {}
    found = []
    for one in program.instructions:
        if one.collective:
            role, num_early = roles.get(one, ("", 0))
            chain, num_calls = program.chain(one), program.num_calls(one)
            place = program.place(one) if role == "activations" else ("", "")
            is_async = any("-start" in caller.kind for caller in chain)
            found.append(_collective(chain, num_calls, role, num_early, is_async, *place))
    return found


def moved_activations(collectives: Iterable[Collective]) -> list[str]:
    """Returns text for people on what moves activations, by the lines of the model."""
    found: dict[tuple[str, str], list[Collective]] = {}
    for one in collectives:
        if one.role == "activations":
            found.setdefault((one.kind, one.line), []).append(one)
    return [
        f"{len(of)} {kind}, {format_bytes(total_bytes(of))}, {line}: {of[0].name}"
        for (kind, line), of in found.items()
    ]


def collective_bytes(hlo: str) -> int:
    """Returns the size of the arrays that one run of a program sends through collectives."""
    return total_bytes(collectives_of(hlo))


def total_bytes(collectives: Iterable[Collective]) -> int:
    """Returns the size of the arrays that one run of a program sends through some collectives.

    A loop counts once if the compiler does not say how often it runs.
    """
    return sum(c.num_bytes * (c.num_calls or 1) for c in collectives)


def num_aliased_outputs(hlo: str) -> int:
    """Returns how many outputs of a program take the place of an argument."""
    header = hlo[: hlo.index("\n")]
    match = re.search(r"input_output_alias=\{(.*?\)) ?\}", header)
    return 0 if match is None else match[1].count("-alias)")


def _collective(chain: Sequence[Instruction], *known: Any) -> Collective:
    """Returns the collective that comes first in a chain of callers, with what is known of it."""
    one, kind, attributes = chain[0], chain[0].collective, chain[0].attributes
    arrays = [_num_bytes(array) for array in _ARRAY.finditer(one.shape)]
    if one.kind == "send":
        # Between slices. The first element of the result of a send is the array that it sends.
        target = re.search(r'_xla_megascale_target="\{([\d,]+)\}x', attributes)
        slices = () if target is None else tuple(int(i) - 1 for i in target[1].split(","))
        return Collective(kind, 1, arrays[0], (slices,), "slices", None, *known)
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
    return Collective(kind, num_operands, num_bytes, groups, "slice", algorithm, *known)


def _num_bytes(array: re.Match[str]) -> int:
    bits = _BITS.search(array["dtype"])
    width = 8 if bits is None else int(bits[0])  # the name of pred has no number
    size = math.prod(int(dim) for dim in array["dims"].split(",") if dim)
    return -(-size * width // 8)


def _algorithm(line: str) -> str | None:
    """Returns `strategy (emitter)` of a TPU; None if the compiler lets the runtime choose."""
    found = re.search(r"backend_config=(\{.*\})", line)
    if found is None:
        return None
    try:
        config: Any = json.JSONDecoder().raw_decode(found[1])[0]
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
