"""What all benchmarks share: options, fresh processes, the interleaved clock, tables and files.

A benchmark has two functions. `requests` says what to measure; `measure` measures one request in a
fresh process, and returns rows. `run` calls them, prints tables and writes `results/NAME.json`.
A row has

    what, replicas, unit
    rounds    numbers of every peer, one per round, where less is better
    pairs     two peers whose ratio is of interest, with the bar that it must not exceed, or None
    numbers   other results, with the bar that they must not exceed, or None
    problems  reasons not to believe it
"""

import argparse
import json
import math
import os
import platform
import resource
import secrets
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TypeAlias

from _peers import Json, Peer

__all__ = [
    "FOLDER",
    "NEXT_TO",
    "NVIDIA_DRIVER",
    "RESULTS",
    "Pair",
    "Request",
    "Row",
    "choose_steps",
    "compare",
    "environment",
    "foreign_environment",
    "interleave",
    "number",
    "pair",
    "peak_bytes",
    "reset_peak",
    "row",
    "run",
    "summarize",
]

Request: TypeAlias = dict[str, Json]
Row: TypeAlias = dict[str, Json]
Pair: TypeAlias = dict[str, Json]

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "results"
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
_SOURCE = str(FOLDER.parent / "src")
sys.path.insert(0, _SOURCE)
MEBIBYTE = 2**20

HANDWRITTEN = "hand-written JAX"
NEXT_TO: Mapping[str, str] = {
    **dict.fromkeys(("handwritten", "handwritten_keras", "psum", "jax"), HANDWRITTEN),
    **dict.fromkeys(("fit_handwritten", "fit_handwritten_keras"), HANDWRITTEN),
    **dict.fromkeys(("numpy", "by hand", "read"), HANDWRITTEN),
    "keras": "Keras alone",
    "data_parallel": "Keras DataParallel",
    **dict.fromkeys(("tensorflow", "tf.data"), "TensorFlow"),
    "torch": "PyTorch DDP",
}
"""What the page of measurements calls the peers that it has."""

TOLERANCES = {"cpu": 1e-4, "gpu": 1e-3}
"""Largest difference of losses. GPUs multiply float32 with fewer digits (TF32)."""

_PACKAGES = ("jax", "jaxlib", "numpy", "optax")
_TIMEOUT_SECONDS = 3600.0
_MARK = "RESULT "


# Processes


class ChildFailedError(RuntimeError):
    """A measuring process ended with an error or did not end in time."""


def environment(num_devices: int = 1, platform: str = "cpu") -> dict[str, str]:
    """Returns this process's environment, with this checkout's package first on the path.

    JAX gets logical CPU devices, and a thread pool in which their all-reduces cannot starve each
    other; on a GPU, as much memory as it uses, so that several processes fit.
    """
    # Parameter servers ask for it; the chief may be this process.
    os.environ.setdefault("DISTRIBUTARY_TOKEN", secrets.token_hex(16))
    environ = dict(os.environ)
    inherited = environ.get("PYTHONPATH")
    environ["PYTHONPATH"] = os.pathsep.join([_SOURCE, *([inherited] if inherited else [])])
    environ["JAX_PLATFORMS"] = {"cpu": "cpu", "gpu": "cuda,cpu"}[platform]
    environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    environ["KERAS_BACKEND"] = "jax"
    environ["JAX_NUM_CPU_DEVICES"] = str(num_devices)
    # Every replica of a dispatched step holds a thread while it waits in a collective: with fewer
    # than two threads per replica, two steps in flight can wait for each other.
    environ["PJRT_NPROC"] = str(max(os.cpu_count() or 1, 2 * num_devices))
    return environ


def foreign_environment() -> dict[str, str]:
    """Returns the environment of a process of another library, on the CPU, without our package."""
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    environ.pop("PYTHONPATH", None)
    return {**environ, "KERAS_BACKEND": "tensorflow"}


def _run_child(request: Request) -> list[Row]:
    """Measures `request` in a fresh process of the script that was started."""
    child = subprocess.Popen(
        [sys.executable, sys.argv[0], "--child", json.dumps(request)],
        env=environment(request["devices"], request["platform"]),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = child.communicate(timeout=_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        raise ChildFailedError(f"no result within {_TIMEOUT_SECONDS:.0f} s: {request}") from None
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    results = [line for line in output.splitlines() if line.startswith(_MARK)]
    if child.returncode or not results:
        raise ChildFailedError(f"exit status {child.returncode} for {request}; see above")
    rows: list[Row] = json.loads(results[-1].removeprefix(_MARK))
    return rows


def reset_peak() -> bool:
    """Lets Linux forget the process's peak; returns False where that is not possible."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def peak_bytes() -> int:
    """Returns the process's largest resident memory, since `reset_peak` if that was called."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


# The clock


def choose_steps(peer: Peer, block_seconds: float, least: int = 4, most: int = 1000) -> int:
    """Returns how many steps of `peer` fill a block."""
    peer.time_block(least)
    return max(least, min(most, round(block_seconds / peer.time_block(least))))


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
        first = round_number % len(peers)
        for peer in [*peers[first:], *peers[:first]]:
            seconds[peer.name].append(peer.time_block(steps[peer.name]))
    return seconds


def compare(
    request: Request,
    what: str,
    peers: Sequence[Peer],
    pairs: Iterable[Pair],
    *,
    unit: str = "ms/step",
    replicas: object = None,
    must_fall: bool = True,
) -> Row:
    """Checks that all peers compute the same, and times them in turns.

    Args:
        request: With `rounds`, `block_seconds` and `platform`.
        what: Name of the row.
        peers: The first of each group is the one whose losses the others must have.
        pairs: Ratios of interest; those of peers that are absent are left out.
        unit: `"ms/step"` or `"ms"`.
        replicas: Of the row; by default those of the request.
        must_fall: Losses have to be smaller after the timing.
    """
    losses = {peer.name: peer.losses(peer.num_checked) for peer in peers}
    steps = dict(_steps_of(peers, request["block_seconds"]))
    seconds = interleave(peers, request["rounds"], steps)
    final = {peer.name: peer.losses(1) if losses[peer.name] else [] for peer in peers}
    problems = _disagreements(what, peers, losses, TOLERANCES[request["platform"]])
    problems += [
        f"{what}: the loss of {name} went from {values[0]:.4f} to {final[name][0]:.4f}; it was"
        " expected to fall."
        for name, values in losses.items()
        if must_fall and values and not final[name][0] < values[0]
    ]
    return row(
        what,
        request["replicas"] if replicas is None else replicas,
        unit,
        {name: [1e3 * value for value in values] for name, values in seconds.items()},
        pairs,
        steps_per_block=steps,
        losses=losses,
        problems=problems,
    )


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


def summarize(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Returns ratios of two peers: per round (median, quartiles) and of their minima."""
    per_round = sorted(mine / other for mine, other in zip(ours, theirs, strict=True))
    quartiles = (
        statistics.quantiles(per_round, n=4, method="inclusive")
        if len(per_round) > 1
        else per_round * 3
    )
    return {
        "median": statistics.median(per_round),
        "lower_quartile": quartiles[0],
        "upper_quartile": quartiles[2],
        "of_minima": min(ours) / min(theirs),
    }


# Rows


def row(
    what: str,
    replicas: object,
    unit: str,
    rounds: Mapping[str, Sequence[float]],
    pairs: Iterable[Pair] = (),
    **more: Json,
) -> Row:
    """Returns a row. Several of one name become one, see `_merged`."""
    return {
        "what": what,
        "replicas": str(replicas),
        "unit": unit,
        "rounds": {name: list(values) for name, values in rounds.items()},
        "pairs": [{**one, "what": one["what"] or what} for one in pairs],
        **more,
    }


def _merged(rows: Iterable[Row]) -> list[Row]:
    """Returns rows with the rounds of all rows of their name, without pairs that are not complete.

    A process that can measure one peer once returns a row with one round of one peer.
    """
    merged: dict[tuple[str, ...], Row] = {}
    for one in rows:
        known = merged.setdefault(_key(one), {**one, "rounds": {}})
        for name, values in one["rounds"].items():
            known["rounds"][name] = [*known["rounds"].get(name, ()), *values]
    for one in merged.values():
        sizes = {name: len(values) for name, values in one["rounds"].items()}
        one["pairs"] = [
            two
            for two in one["pairs"]
            if 0 < sizes.get(two["ours"], 0) == sizes.get(two["theirs"], 0)
        ]
    return list(merged.values())


def _key(row: Row) -> tuple[str, ...]:
    return row["what"], row["replicas"], row["unit"]


def pair(ours: str, theirs: str, bar: float | None = None, what: str = "") -> Pair:
    """Returns a pair of peers; `what` is how the page calls it if not as the row."""
    return {"what": what, "ours": ours, "theirs": theirs, "bar": bar}


def number(what: str, value: float, unit: str, bar: float | None = None) -> Json:
    """Returns a single result of a row."""
    return {"what": what, "value": value, "unit": unit, "bar": bar}


# The command line


def run(
    requests: Callable[[argparse.Namespace], Iterable[Request]],
    measure: Callable[[Request], list[Row]],
    *,
    rounds: tuple[int, int],
    block_seconds: tuple[float, float] = (0.4, 0.1),
    options: Mapping[str, Mapping[str, Json]] | None = None,
    check: Callable[[Sequence[Row]], list[str]] = lambda rows: [],
) -> None:
    """Measures, prints, writes, and ends the process: with 1 if there was a problem.

    Args:
        requests: What to measure, given the options. A request gets all options, and has
            `devices`, the number of logical CPU devices of its process, or `replicas`.
        measure: Measures one request.
        rounds: Default of `--rounds`, also with `--quick`.
        block_seconds: The same of `--block-seconds`.
        options: More options, for `ArgumentParser.add_argument`. An option with `choices` takes
            a list of them, separated by commas.
        check: Returns problems that only all rows together show.
    """
    if sys.argv[1:2] == ["--child"]:
        print(_MARK + json.dumps(measure(json.loads(sys.argv[2]))), flush=True)
        sys.exit()
    # Ended by a signal, it ends its processes and writes what it has.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    arguments = _parse(rounds, block_seconds, options or {})
    sys.exit(_main(arguments, requests, measure, check))


def _main(
    arguments: argparse.Namespace,
    requests: Callable[[argparse.Namespace], Iterable[Request]],
    measure: Callable[[Request], list[Row]],
    check: Callable[[Sequence[Row]], list[str]],
) -> int:
    load_before = _load_average()
    name = Path(sys.argv[0]).stem
    others = {key: version for key, version in _others(arguments).items() if version is not None}
    common = {key: value for key, value in vars(arguments).items() if key != "output"}
    settings = {key: common[key] for key in ("rounds", "quick", "block_seconds", "platform")}
    about = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": _machine(),
        "versions": {**_versions(), **others},
        "settings": settings,
    }
    earlier = _earlier(arguments.output / f"{name}.json", about) if arguments.add else []
    rows: list[Row] = []
    problems: list[str] = []
    try:
        for wanted in requests(arguments):
            request = {**common, "others": list(others), **wanted}
            request.setdefault("devices", wanted.get("replicas", 1))
            print(f"{', '.join(map(str, wanted.values()))} ...", file=sys.stderr, flush=True)
            try:
                rows += _run_child(request)
            except ChildFailedError as error:
                problems.append(str(error))
    except KeyboardInterrupt:
        problems.append("interrupted; what had been measured is written")
    for one in rows:
        problems += one.pop("problems", [])
    rows = _merged(rows)
    problems += check(rows)
    show(rows)
    if rows:
        new = set(map(_key, rows))
        rows = [*(one for one in earlier if _key(one) not in new), *rows]
        load = {"before": load_before, "after": _load_average()}
        document = {"benchmark": name, **about, "load_average": load, "rows": rows}
        path = arguments.output / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        print(f"\n{about['machine']}; load average {load}\n{about['versions']}\nwritten: {path}")
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return int(bool(problems))


def _parse(
    rounds: tuple[int, int],
    block_seconds: tuple[float, float],
    options: Mapping[str, Mapping[str, Json]],
) -> argparse.Namespace:
    import __main__

    parser = argparse.ArgumentParser(
        description=__main__.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    usual, quick = rounds
    parser.add_argument("--rounds", type=int, help=f"rounds that count ({usual}, quick: {quick})")
    parser.add_argument("--quick", action="store_true", help="short: shows that it works")
    parser.add_argument("--block-seconds", type=float, help="of a peer's turn")
    parser.add_argument("--add", action="store_true", help="keep the other rows of the file")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="FOLDER")
    for name, option in options.items():
        choices = option.get("choices")
        if choices is None:
            parser.add_argument(name, **option)
            continue
        default = option.get("default", choices)
        parser.add_argument(
            name,
            type=partial(_list_of, type(choices[0])),
            default=list(default),
            metavar=",".join(map(str, default)),
            help=option.get("help", "some of these"),
        )
    arguments = parser.parse_args()
    lists = {name: option["choices"] for name, option in options.items() if "choices" in option}
    for name, known in lists.items():
        given = getattr(arguments, name.removeprefix("--"))
        if unknown := [one for one in given if one not in known]:
            parser.error(f"{name}: unknown {unknown}; there are {', '.join(map(str, known))}")
    arguments.rounds = arguments.rounds or rounds[arguments.quick]
    arguments.block_seconds = arguments.block_seconds or block_seconds[arguments.quick]
    arguments.platform = getattr(arguments, "platform", "cpu")
    return arguments


def _list_of(kind: Callable[[str], Json], text: str) -> list[Json]:
    return [kind(part) for part in text.split(",")]


def _others(arguments: argparse.Namespace) -> dict[str, str | None]:
    """Returns the versions of libraries for which there are options such as `--torch-python`."""
    found = {}
    for name in ("tensorflow", "torch"):
        python = getattr(arguments, f"{name}_python", None)
        if python is None:
            continue
        # Asks for the metadata: importing TensorFlow takes seconds.
        question = (
            "import importlib.metadata as m\n"
            f"names = ('{name}', '{name}-cpu', '{name}_cpu')\n"
            "print(next(d.version for d in m.distributions() if d.metadata['Name'] in names))"
        )
        answer = subprocess.run([python, "-c", question], capture_output=True, text=True)
        found[name] = answer.stdout.strip() if answer.returncode == 0 else None
        if found[name] is None:
            print(f"{name}: not installed (see --{name}-python)", file=sys.stderr)
    return found


# Tables and files


def show(rows: Sequence[Row]) -> None:
    """Prints numbers of the peers, ratios and other results."""
    _print_table(
        ["what", "R", "peer", "min", "median", "unit"],
        [
            [one["what"], one["replicas"], name, min(found), statistics.median(found), one["unit"]]
            for one in rows
            for name, found in one["rounds"].items()
        ],
    )
    _print_table(
        ["what", "R", "peer", "over", "ratio", "quartiles", "", "of min", "bar", ""],
        [
            [
                *(two["what"], one["replicas"], two["ours"], two["theirs"], ratio["median"]),
                *(ratio["lower_quartile"], ratio["upper_quartile"], ratio["of_minima"]),
                *(two["bar"], _verdict(ratio["median"], two["bar"])),
            ]
            for one in rows
            for two in one["pairs"]
            for ratio in [summarize(*(one["rounds"][two[side]] for side in ("ours", "theirs")))]
        ],
    )
    _print_table(
        ["what", "R", "", "measured", "unit", "bar", ""],
        [
            [
                *(one["what"], one["replicas"], found["what"], found["value"], found["unit"]),
                *(found["bar"], _verdict(found["value"], found["bar"])),
            ]
            for one in rows
            for found in one.get("numbers", ())
        ],
    )


def _verdict(measured: float, bar: float | None) -> str:
    if bar is None or math.isnan(measured):
        return "-"
    return "ok" if measured <= bar else "over"


def _print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints a Markdown table; None shows as `-`, floats with three digits behind the point."""
    if not rows:
        return
    cells = [list(header), *([_cell(value) for value in line] for line in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "| " + " | ".join(map(str.ljust, line, widths)) + " |"  # one line of text per row
        for line in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    print("\n" + "\n".join(lines), flush=True)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _earlier(path: Path, about: Mapping[str, Json]) -> list[Row]:
    """Returns the rows of a file, to which rows of the same day, machine and versions are added."""
    document = json.loads(path.read_text(encoding="utf-8"))
    for key, value in about.items():
        if document[key] != value:
            raise SystemExit(
                f"--add: {path} has the {key} {document[key]}, and now it is {value}. Measure all"
                " rows again, without --add."
            )
    rows: list[Row] = document["rows"]
    return rows


def _machine() -> dict[str, Json]:
    """Returns what a reader needs to judge the numbers; nothing that names the machine."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": names[0] if names else platform.processor() or "unknown processor",
        "cores": os.cpu_count(),
        "memory_gib": round(memory_bytes / 2**30),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    absent = {"distributary": "this checkout"}
    for package in (*_PACKAGES, "distributary"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = absent.get(package, "not installed")
    return found


def _load_average() -> float:
    """Returns the number of runnable processes, averaged over the last minute."""
    return round(os.getloadavg()[0], 2)
