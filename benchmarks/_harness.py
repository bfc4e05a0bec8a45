"""What all benchmarks share: cases, processes that are measured in turns, checks and rows.

A `Case` is data: peers, the processes they live in, and the pairs of them whose ratio is of
interest. A row has

    what, replicas, unit
    rounds    numbers of every peer, one per round, where less is better
    pairs     two peers whose ratio is of interest, with the bar that it must not exceed, or None
    problems  reasons not to believe it
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Literal, TypeAlias, TypeVar, final

import _processes
from _peers import Json, Peer
from _processes import Process

__all__ = [
    "Case",
    "Pair",
    "Row",
    "Served",
    "Settings",
    "against",
    "choose_steps",
    "compare",
    "interleave",
    "measure",
    "pair",
    "row",
]

Row: TypeAlias = dict[str, Json]
Pair: TypeAlias = dict[str, Json]
T = TypeVar("T")
Unit: TypeAlias = Literal["ms/step", "ms", "µs", "s", "MiB"]

TOLERANCES = {"cpu": 1e-4, "gpu": 1e-3}
"""Largest difference of losses. GPUs multiply float32 with fewer digits (TF32)."""

_PER_SECOND = {"ms/step": 1e3, "CPU ms/step": 1e3, "ms": 1e3, "µs": 1e6}
_MEMORY_STEPS = 20
_FEWEST_STEPS, _MOST_STEPS = 4, 50_000
_FRESH_ROUNDS = 5  # a start takes seconds


@dataclass(frozen=True)
class Settings:
    """What the command line says about all benchmarks.

    Attributes:
        rounds: Those that count.
        block_seconds: Length of a peer's turn, where the peer does not say how many steps it takes.
        quick: Only shows that it works.
        platform: `"cpu"` or `"gpu"`, of JAX.
        pythons: Interpreters of the other libraries that there are.
    """

    rounds: int
    block_seconds: float
    quick: bool = False
    platform: str = "cpu"
    pythons: Mapping[str, str] = field(default_factory=dict)


@final
@dataclass(frozen=True)
class Served:
    """A peer in a process.

    Attributes:
        process: Peers with the same one share it.
        name: How the process calls the peer.
        num_steps: Steps per block; None lets the clock choose.
        num_checked: Steps, or epochs, whose losses are compared with those of other peers.
        group: Peers of one group compute the same losses.
    """

    process: Process
    name: str
    num_steps: int | None = None
    num_checked: int = 20
    group: str = ""


@final
@dataclass(frozen=True)
class Case:
    """A row, or several rows of the same peers.

    Attributes:
        what: Name of the row.
        replicas: How many there are, or which processes.
        peers: By the name that the row has, in the order of the first round.
        pairs: Ratios of interest; those of peers that are absent are left out.
        unit: Of the row. Without `fresh`, a unit of time.
        section: Part of the benchmark.
        workload: What is trained.
        must_fall: Losses have to be smaller after the timing.
        cpu_pairs: If given, there is a second row, of the CPU time of all processes of a peer.
        fresh: If given, each peer starts in a fresh process in every round. Names of the rows by
            what is asked there: `"seconds"` of the first step, or a kind of `_memory.memory_of`.
    """

    what: str
    replicas: str
    peers: Mapping[str, Served]
    pairs: Sequence[Pair]
    unit: Unit = "ms/step"
    section: str = ""
    workload: str = ""
    must_fall: bool = True
    cpu_pairs: Sequence[Pair] = ()
    fresh: Mapping[str, str] = field(default_factory=dict)


# Cases


def measure(case: Case, settings: Settings) -> list[Row]:
    """Returns the rows of a case.

    Raises:
        RuntimeError: If a process has failed.
    """
    peers = {
        name: one
        for name, one in case.peers.items()
        if one.process.library in ("jax", *settings.pythons)
    }
    if case.fresh:
        return list(_first_steps(case, peers, settings))
    with contextlib.ExitStack() as stack:
        jobs = {
            process: stack.enter_context(
                contextlib.closing(_processes.start(process, settings.pythons, settings.platform))
            )
            for process in dict.fromkeys(one.process for one in peers.values())
        }
        asked = [
            jobs[one.process].peer(
                name,
                one.name,
                num_steps=_num_steps(one, settings),
                num_checked=one.num_checked,
                group=one.group,
            )
            for name, one in peers.items()
        ]
        return compare(case, asked, settings)


def _num_steps(served: Served, settings: Settings) -> int | None:
    if served.num_steps is None:
        return None
    return max(1, served.num_steps // (4 if settings.quick else 1))


def _first_steps(case: Case, peers: Mapping[str, Served], settings: Settings) -> Iterator[Row]:
    """Asks each peer in a fresh process in every round."""
    rounds: dict[str, dict[str, list[float]]] = {kind: {} for kind in case.fresh}
    for round_number in range(min(settings.rounds, 1 if settings.quick else _FRESH_ROUNDS)):
        for name, one in _rotated(list(peers.items()), round_number):
            started = _processes.start(one.process, settings.pythons, settings.platform)
            with contextlib.closing(started) as job:
                job.ask(f"losses 0 {one.name}")  # answered when all is imported and built
                if "seconds" in case.fresh:
                    found = {"seconds": max(job.ask(f"go 1 {one.name}"))}
                else:
                    num_steps = _num_steps(one, settings) or _MEMORY_STEPS
                    (found,) = job.ask(f"memory {num_steps} {one.name}")
            for kind, by_peer in rounds.items():
                if kind in found:
                    by_peer.setdefault(name, []).append(found[kind])
    for kind, what in case.fresh.items():
        yield row(what, case.replicas, case.unit, rounds[kind], case.pairs)


def against(case: Case, checkout: Path) -> Case:
    """Returns a case of our peers next to the same of another checkout, and that a second time.

    How far the ratio of the second time is from 1 tells how much of the other ratios is noise.
    """
    peers: dict[str, Served] = {}
    pairs: list[Pair] = []
    for ours in dict.fromkeys(one["ours"] for one in case.pairs):
        if ours == "control" or ours not in case.peers:
            continue
        served = case.peers[ours]
        after = replace(served.process, names=[served.name])
        for name, process in {
            f"{ours} before": replace(after, source=checkout / "src"),
            ours: after,
            f"{ours} control": replace(after, source=checkout / "src"),
        }.items():
            peers[name] = replace(served, process=process, group=f"{served.group} {ours}")
        pairs += [pair(name, f"{ours} before") for name in (ours, f"{ours} control")]
    return replace(case, peers=peers, pairs=pairs)


# The clock


def choose_steps(peer: Peer, block_seconds: float) -> int:
    """Returns how many steps of `peer` fill a block."""
    num_steps = _FEWEST_STEPS
    while True:
        seconds = num_steps * peer.time_block(num_steps)
        if seconds > block_seconds / 8 or num_steps >= _MOST_STEPS:
            wanted = round(num_steps * block_seconds / seconds)
            return max(_FEWEST_STEPS, min(_MOST_STEPS, wanted))
        num_steps *= 4


def interleave(
    peers: Sequence[Peer], num_rounds: int, num_steps: Mapping[str, int] | int = 1
) -> dict[str, list[float]]:
    """Times one block of every peer per round, after one block each that does not count.

    Every round starts with another peer, so a drift of the machine's speed, or what a peer
    leaves in the caches, meets all of them alike.

    Args:
        peers: In the order of the first round.
        num_rounds: Rounds that count.
        num_steps: Steps per block, of all or by the peer's name.

    Returns:
        Seconds per step by the peer's name, one number per round.
    """
    steps = num_steps if isinstance(num_steps, Mapping) else {p.name: num_steps for p in peers}
    seconds: dict[str, list[float]] = {peer.name: [] for peer in peers}
    for peer in peers:
        peer.time_block(steps[peer.name])
    for round_number in range(num_rounds):
        for peer in _rotated(peers, round_number):
            seconds[peer.name].append(peer.time_block(steps[peer.name]))
    return seconds


def _rotated(peers: Sequence[T], round_number: int) -> list[T]:
    first = round_number % len(peers)
    return [*peers[first:], *peers[:first]]


def compare(case: Case, peers: Sequence[Peer], settings: Settings) -> list[Row]:
    """Checks that all peers compute the same, and times them in turns.

    Args:
        case: Of the row.
        peers: The first of each group is the one whose losses the others must have.
        settings: Of the clock.
    """
    losses = {peer.name: peer.losses(peer.num_checked) for peer in peers}
    steps = dict(_steps_of(peers, settings.block_seconds))
    cpu_seconds: dict[str, list[float]] = {peer.name: [] for peer in peers}
    timed = [_with_cpu_time(peer, cpu_seconds[peer.name]) for peer in peers]
    seconds = interleave(timed, settings.rounds, steps)
    final = {peer.name: peer.losses(peer.num_checked) for peer in peers}
    problems = _disagreements(case.what, peers, losses, TOLERANCES[settings.platform])
    problems += [
        f"{case.what}: the loss of {name} went from {mean(values):.4f} to {mean(final[name]):.4f};"
        " it was expected to fall."
        for name, values in losses.items()
        if case.must_fall and values and not mean(final[name]) < mean(values)
    ]
    more = {"steps_per_block": steps, "losses": losses, "problems": problems}
    rows = [row(case.what, case.replicas, case.unit, seconds, case.pairs, **more)]
    if case.cpu_pairs:
        # The first block does not count.
        spent = {name: blocks[1:] for name, blocks in cpu_seconds.items()}
        rows.append(row(case.what, case.replicas, "CPU ms/step", spent, case.cpu_pairs))
    return rows


def _with_cpu_time(peer: Peer, cpu_seconds: list[float]) -> Peer:
    """Returns a peer that also writes down the CPU time of a step in every block."""

    def time_block(num_steps: int) -> float:
        before = peer.cpu_seconds()
        seconds = peer.time_block(num_steps)
        cpu_seconds.append((peer.cpu_seconds() - before) / num_steps)
        return seconds

    return replace(peer, time_block=time_block)


def _steps_of(peers: Sequence[Peer], block_seconds: float) -> Iterable[tuple[str, int]]:
    """Yields steps per block: the first peer's for all, but other libraries' by themselves."""
    chosen = None
    for peer in peers:
        if peer.num_steps is not None:
            yield peer.name, peer.num_steps
        elif peer.name in ("tensorflow", "torch"):
            yield peer.name, choose_steps(peer, block_seconds)
        else:
            chosen = chosen or choose_steps(peer, block_seconds)
            yield peer.name, chosen


def _disagreements(
    what: str, peers: Sequence[Peer], losses: Mapping[str, Sequence[float]], tolerance: float
) -> list[str]:
    problems = []
    references: dict[str, str] = {}
    for peer in peers:
        reference = references.setdefault(peer.group, peer.name)
        theirs = losses[reference]
        # Of epochs and on GPUs, of the size of the loss.
        is_relative = peer.group or tolerance > TOLERANCES["cpu"]
        allowed = tolerance * (max(map(abs, theirs), default=0.0) if is_relative else 1)
        gaps = [abs(a - b) for a, b in zip(losses[peer.name], theirs, strict=True)]
        if not all(gap <= allowed for gap in gaps):  # so that NaN is a problem
            problems.append(
                f"{what}: the losses of {peer.name} are up to {max(gaps):.1e} away from those of"
                f" {reference}; at most {allowed:.1e} is allowed."
            )
    return problems


# Rows


def row(
    what: str,
    replicas: str,
    unit: str,
    rounds: Mapping[str, Sequence[float]],
    pairs: Iterable[Pair] = (),
    **more: Json,
) -> Row:
    """Returns a row, with those of the pairs whose peers are there; times come in seconds."""
    factor = _PER_SECOND.get(unit, 1.0)
    sizes = {name: len(values) for name, values in rounds.items()}
    return {
        "what": what,
        "replicas": replicas,
        "unit": unit,
        "rounds": {name: [factor * value for value in values] for name, values in rounds.items()},
        "pairs": [
            {**one, "what": one["what"] or what}
            for one in pairs
            if 0 < sizes.get(one["ours"], 0) == sizes.get(one["theirs"], 0)
        ],
        **more,
    }


def pair(
    ours: str,
    theirs: str,
    bar: float | None = None,
    what: str = "",
    most_more: float | None = None,
) -> Pair:
    """Returns a pair of peers.

    Args:
        ours: Name of a peer.
        theirs: Name of the peer that it is held against.
        bar: Largest ratio.
        what: How the page calls it if not as the row.
        most_more: Largest difference, in the unit of the row.
    """
    found = {"what": what, "ours": ours, "theirs": theirs, "bar": bar}
    return found if most_more is None else {**found, "most_more": most_more}
