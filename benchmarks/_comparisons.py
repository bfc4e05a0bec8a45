"""What result files say about distributary next to others, in one form."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, final

import _timing
import parameter_server

__all__ = [
    "DATA_PARALLEL",
    "HANDWRITTEN",
    "KERAS",
    "TENSORFLOW",
    "TORCH",
    "Comparison",
    "compare",
    "read",
]

Json: TypeAlias = Any

HANDWRITTEN = "hand-written JAX"
KERAS = "Keras alone"
DATA_PARALLEL = "Keras DataParallel"
TENSORFLOW = "TensorFlow"
TORCH = "PyTorch DDP"

_PEERS = {
    "handwritten": HANDWRITTEN,
    "fit_handwritten": HANDWRITTEN,
    "fit_handwritten_keras": HANDWRITTEN,
    "handwritten_keras": HANDWRITTEN,
    "psum": HANDWRITTEN,
    "keras": KERAS,
    "data_parallel": DATA_PARALLEL,
    "tensorflow": TENSORFLOW,
    "torch": TORCH,
}
_MEBIBYTE = 2**20
_STEP = "ms/step"
_WORKERS = "2 workers"


@final
@dataclass(frozen=True)
class Comparison:
    """One quantity of distributary and of a peer, measured in the same rounds. Less is better.

    Args:
        benchmark: Whose result file it is from.
        peer: One of the names above.
        what: What was measured.
        replicas: How many, of which kind.
        unit: Of `ours` and `theirs`.
        ours: One number per round.
        theirs: The peer's, in the same rounds.
        bar: What the ratio must not exceed, if there is such a number.
    """

    benchmark: str
    peer: str
    what: str
    replicas: str
    unit: str
    ours: Sequence[float]
    theirs: Sequence[float]
    bar: float | None = None

    @property
    def ratio(self) -> _timing.RatioSummary:
        """Ours over theirs: median and quartiles of the rounds."""
        return _timing.summarize_ratio(self.ours, self.theirs)

    @property
    def is_step(self) -> bool:
        """Whether it is the time of a training step."""
        return self.unit == _STEP

    @property
    def standing(self) -> int:
        """1 if we clearly take more, -1 if less, 0 if the quartiles, as shown, have 1 between."""
        lower, upper = (round(self.ratio[f"{name}_quartile"], 2) for name in ("lower", "upper"))
        return (lower > 1) - (upper < 1)

    @property
    def is_over_bar(self) -> bool:
        return self.bar is not None and self.ratio["median"] > self.bar


def read(folder: Path) -> dict[str, Json]:
    """The result files of the folder that compare with others, by benchmark."""
    found = {name: folder / f"{name}.json" for name in _FORMATS}
    return {
        name: json.loads(path.read_text(encoding="utf-8"))
        for name, path in found.items()
        if path.is_file()
    }


def compare(documents: Mapping[str, Json]) -> list[Comparison]:
    """All comparisons of the result files, in their order."""
    return [found for name, document in documents.items() for found in _FORMATS[name](document)]


def _step_time(document: Json) -> Iterator[Comparison]:
    for row in document["rows"]:
        rounds = {name: times["rounds"] for name, times in row["milliseconds"].items()}
        for peer, bar in (("handwritten", row["bar"]), ("tensorflow", None)):
            if peer in rounds:
                yield Comparison(
                    "step_time",
                    _PEERS[peer],
                    f"`strategy.run`, {row['workload']}",
                    str(row["replicas"]),
                    _STEP,
                    rounds["distributary"],
                    rounds[peer],
                    bar,
                )


def _fit_time(document: Json) -> Iterator[Comparison]:
    for row in document["rows"]:
        if row["section"] == "step":
            yield from _fit_steps(row)
        elif row["section"] in ("start", "memory"):
            is_start = row["section"] == "start"
            what, unit, scale = (
                ("until the first step of `fit`", "s", 1)
                if is_start
                else ("resident memory in `fit`", "MiB", _MEBIBYTE)
            )
            ours, theirs = (row["processes"][name] for name in ("distributary", row["against"]))
            if row["ratio"] is not None and len(ours) == len(theirs):
                yield Comparison(
                    "fit_time",
                    _PEERS[row["against"]],
                    f"{what}, {row['workload']}",
                    str(row["replicas"]),
                    unit,
                    [value / scale for value in ours],
                    [value / scale for value in theirs],
                    row["bar"],
                )


def _fit_steps(row: Json) -> Iterator[Comparison]:
    rounds = {name: peer["milliseconds"]["rounds"] for name, peer in row["peers"].items()}
    bars = _bars(row)
    for ours in ("distributary", "distributary_16"):
        for theirs in rounds:
            peer = _PEERS.get(theirs.removesuffix("_16"))
            is_alike = ours.endswith("_16") == theirs.endswith("_16")
            if ours in rounds and peer and (is_alike or (ours, theirs) in bars):
                what = "`fit`" if ours == "distributary" else "`fit`, 16 steps per execution"
                yield Comparison(
                    "fit_time",
                    peer,
                    f"{what}, {row['workload']}{_of_layers(theirs)}",
                    str(row["replicas"]),
                    _STEP,
                    rounds[ours],
                    rounds[theirs],
                    bars.get((ours, theirs)),
                )


def _multi_worker_time(document: Json) -> Iterator[Comparison]:
    whats = {
        "distributary": "`strategy.run`, ",
        "fit": "`fit`, ",
        "reduce": "`reduce` of ",
        "reduce_to": "`reduce_to` of ",
        "run": "`all_reduce` in `run`, ",
    }
    for row in document["rows"]:
        if row["section"] == "start":  # has no peer
            continue
        rounds = {name: peer["milliseconds"]["rounds"] for name, peer in row["peers"].items()}
        bars = _bars(row)
        for ours in (name for name in whats if name in rounds):
            for theirs in rounds:
                # Both read data, or none does; the loops of TensorFlow and torch read none.
                is_alike = theirs.startswith("fit_") == (ours == "fit")
                if theirs in ("tensorflow", "torch") or (theirs in _PEERS and is_alike):
                    yield Comparison(
                        "multi_worker_time",
                        _PEERS[theirs],
                        whats[ours] + _size(row["workload"]) + _of_layers(theirs),
                        _WORKERS,
                        "ms" if row["section"] == "allreduce" else _STEP,
                        rounds[ours],
                        rounds[theirs],
                        bars.get((ours, theirs)),
                    )


def _parameter_server(document: Json) -> Iterator[Comparison]:
    for row in document["rows"]:
        at_least, cpu_bar = parameter_server.BARS[row["workload"]]
        for key, unit, bar in (
            ("seconds", _STEP, 1 / at_least),
            ("cpu_seconds", "CPU ms/step", cpu_bar),
        ):
            if "tensorflow" in row[key]:
                ours, theirs = (
                    [1e3 * value for value in row[key][name]]
                    for name in ("distributary", "tensorflow")
                )
                what = f"parameter servers, {row['workload'].replace('empty', 'an empty step')}"
                replicas = f"{_WORKERS}, 2 servers"
                yield Comparison(
                    "parameter_server", TENSORFLOW, what, replicas, unit, ours, theirs, bar
                )


def _input_time(document: Json) -> Iterator[Comparison]:
    def found(row: Json, peer: str, what: str, ours: str, theirs: str, bar: str) -> Comparison:
        kind, limit = document["settings"]["bars"][bar]
        return Comparison(
            "input_time",
            peer,
            what,
            str(row.get("replicas", "-")),
            "ms",
            [1e3 * value for value in row["seconds"][ours]],
            [1e3 * value for value in row["seconds"][theirs]],
            1 / limit if kind == "at least" else limit,
        )

    for row in document["rows"]:
        if row["section"] == "memory":
            for theirs, peer in (("numpy", HANDWRITTEN), ("tf.data", TENSORFLOW)):
                if theirs in row["seconds"]:
                    what = f"a batch from memory, over {theirs.replace('numpy', 'NumPy')}"
                    yield found(row, peer, what, "ours", theirs, f"ours / {theirs}")
        elif row["section"] == "devices":
            what = "a batch on the devices, over `device_put`"
            yield found(row, HANDWRITTEN, what, "ours", "by hand", "ours / device_put loop")
        elif row["section"] == "files":
            for name in row["seconds"]:
                if name.startswith("read "):
                    size = name.removeprefix("read ")
                    what = f"1 GB of files by {size}, over `read`"
                    yield found(row, HANDWRITTEN, what, f"ours {size}", name, "ours / read")


def _host_overhead(document: Json) -> Iterator[Comparison]:
    for row in document["rows"]:
        rounds = row["host_microseconds"]
        if rounds.keys() >= {"distributary", "handwritten"}:
            yield Comparison(
                "host_overhead",
                HANDWRITTEN,
                "the host's part of a cached `run`",
                str(row["replicas"]),
                "µs",
                rounds["distributary"],
                rounds["handwritten"],
            )


def _memory(document: Json) -> Iterator[Comparison]:
    quantities: dict[str, Callable[[Json], Json]] = {
        "memory of the program": lambda run: run["program"] and run["program"]["total_bytes"],
        "resident memory": lambda run: run["steps_peak_bytes"],
    }
    for row in document["rows"]:
        for what, bytes_of in quantities.items():
            ours, theirs = (
                [bytes_of(run) for run in row["processes"].get(name, ())]
                for name in ("distributary", "handwritten")
            )
            if ours and len(ours) == len(theirs) and None not in (*ours, *theirs):
                yield Comparison(
                    "memory",
                    HANDWRITTEN,
                    f"{what}, {row['workload']}",
                    str(row["replicas"]),
                    "MiB",
                    [value / _MEBIBYTE for value in ours],
                    [value / _MEBIBYTE for value in theirs],
                    document["settings"]["bar"],
                )


def _import_time(document: Json) -> Iterator[Comparison]:
    for row in document["rows"]:
        what, seconds = "`import distributary`, over `import jax`", row["seconds"]
        bar = document["settings"]["bar"]
        yield Comparison(
            "import_time", HANDWRITTEN, what, "-", "s", seconds["distributary"], seconds["jax"], bar
        )


def _bars(row: Json) -> dict[tuple[str, str], float]:
    return {(bar["ours"], bar["theirs"]): bar["limit"] for bar in row["bars"]}


def _of_layers(peer: str) -> str:
    return " around the Keras model" if peer.endswith("handwritten_keras") else ""


def _size(workload: str) -> str:
    """Of an all-reduce's bytes; other names as they are."""
    number, _, unit = workload.partition(" ")
    return f"{int(number) / 1e6:g} MB" if unit == "B" and int(number) >= 1e6 else workload


_FORMATS: Mapping[str, Callable[[Json], Iterator[Comparison]]] = {
    "step_time": _step_time,
    "fit_time": _fit_time,
    "multi_worker_time": _multi_worker_time,
    "parameter_server": _parameter_server,
    "input_time": _input_time,
    "host_overhead": _host_overhead,
    "memory": _memory,
    "import_time": _import_time,
}
