"""Measures, and makes the page and the table in the README that show what was measured.

Every benchmark leaves a result file. One that fails does not keep the others from running; the
status is 1 then. The page is made from the result files of the folder, so it also shows those that
an earlier call has left. With another folder than that of the repository (`--output`), page and
plot go there, too, and the README stays as it is.

    python benchmarks/run.py --tensorflow-python PATH --torch-python PATH    # all: hours
    python benchmarks/run.py step_time --only mlp32 --replicas 1,2
    python benchmarks/run.py fit_time --before CHECKOUT --output FOLDER    # next to another commit
    python benchmarks/run.py --quick --output FOLDER import_time save_time
    python benchmarks/run.py --report-only
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import _cases
import _measured
import gpu
from _cases import Benchmark
from _harness import Case, Row, Settings, against, measure
from _peers import Json
from _processes import FOLDER

__all__ = ["BENCHMARKS", "main"]

ROOT = FOLDER.parent
RESULTS = FOLDER / "results"
BENCHMARKS: Mapping[str, Benchmark] = {**_cases.BENCHMARKS, "gpu": gpu.BENCHMARK}

_PACKAGES = ("jax", "jaxlib", "numpy", "optax")
_LIBRARIES = ("tensorflow", "torch")
_INTERRUPTED = "interrupted; what had been measured is written"


def main(given: Sequence[str] | None = None) -> int:
    """Runs what was asked for, writes the report; 1 if something failed, else 0."""
    # Ended by a signal, it ends its processes and writes what it has.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    arguments = _parse(given)
    others = {} if arguments.report_only else dict(_others(arguments))
    problems: list[str] = []
    for name in () if arguments.report_only else arguments.benchmarks:
        print(f"=== {name}", file=sys.stderr, flush=True)
        problems += _run(name, arguments, others)
        if _INTERRUPTED in problems:
            break
    is_shown = arguments.report_only or set(arguments.benchmarks) & set(_measured.SHOWN)
    if is_shown and arguments.before is None:
        report(arguments.output)
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return int(bool(problems))


def _run(name: str, arguments: argparse.Namespace, others: Mapping[str, str]) -> list[str]:
    """Measures the cases of a benchmark, prints and writes them; returns problems."""
    benchmark = BENCHMARKS[name]
    jax_platform = arguments.platform or benchmark.platform
    if jax_platform == "gpu":  # where other libraries are not measured
        others = {}
    settings = Settings(
        rounds=arguments.rounds or benchmark.rounds[arguments.quick],
        block_seconds=arguments.block_seconds or benchmark.block_seconds[arguments.quick],
        quick=arguments.quick,
        platform=jax_platform,
        pythons={library: getattr(arguments, f"{library}_python") for library in others},
    )
    about = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": _machine(),
        "versions": _versions() | (gpu.versions() if jax_platform == "gpu" else dict(others)),
        "settings": {"rounds": settings.rounds, "block_seconds": settings.block_seconds},
    }
    path = arguments.output / f"{name}.json"
    earlier = _earlier(path, about) if arguments.add else []
    load_before = _load_average()
    rows: list[Row] = []
    problems: list[str] = []
    try:
        for case in _chosen(benchmark.cases(settings), arguments):
            print(f"{case.what}, {case.replicas} ...", file=sys.stderr, flush=True)
            try:
                rows += measure(case, settings)
            except RuntimeError as error:
                problems.append(f"{name}: {error}")
    except KeyboardInterrupt:
        problems.append(_INTERRUPTED)
    if not rows and not problems:
        problems.append(f"{name}: no case has what --only, --replicas and --sections want")
    for row in rows:
        problems += row.pop("problems", [])
    _measured.print_rows(name, rows)
    if rows:
        new = set(map(_key, rows))
        rows = [*(one for one in earlier if _key(one) not in new), *rows]
        load = {"before": load_before, "after": _load_average()}
        document = {"benchmark": name, **about, "load_average": load, "rows": rows}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        print(f"\n{about['machine']}; load average {load}\n{about['versions']}\nwritten: {path}")
    return problems


def _chosen(cases: Iterable[Case], arguments: argparse.Namespace) -> Iterator[Case]:
    for case in cases:
        wanted = {
            case.workload: arguments.only,
            case.replicas: arguments.replicas,
            case.section: arguments.sections,
        }
        if all(not values or one in values for one, values in wanted.items()):
            yield case if arguments.before is None else against(case, arguments.before)


def _key(row: Row) -> tuple[str, ...]:
    return row["what"], row["replicas"], row["unit"]


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


def report(folder: Path) -> None:
    """Writes what the result files of the folder say: tables of the page and README, and the plot.

    The text around the tables stays as it is in the repository.
    """
    documents = _measured.read(folder)
    page, image = ROOT / "docs/guide/measured.md", ROOT / "docs/images/measured.png"
    written = {page: page, ROOT / "README.md": ROOT / "README.md"}
    if folder.resolve() != RESULTS:
        image, written = folder / "measured.png", {page: folder / "measured.md"}
    _measured.plot(documents, image)
    for source, target in written.items():
        text = _measured.with_tables(source.read_text(encoding="utf-8"), documents)
        target.write_text(text, encoding="utf-8")
        print(f"written: {target}")


def _parse(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("benchmarks", nargs="*", metavar="NAME", help=f"some of {', '.join(BENCHMARKS)}")
    for option in ("--only", "--replicas", "--sections"):
        add(option, type=lambda text: text.split(","), metavar="A,B", help="these cases alone")
    add("--rounds", type=int, help="rounds that count")
    add("--block-seconds", type=float, help="of a peer's turn")
    add("--quick", action="store_true", help="short: shows that it works")
    add("--add", action="store_true", help="keep the other rows of the file")
    add("--before", type=Path, metavar="CHECKOUT", help="next to another commit, not to peers")
    add("--output", type=Path, default=RESULTS, metavar="FOLDER")
    add("--platform", choices=("cpu", "gpu"), help="of JAX")
    add("--report-only", action="store_true", help="from the files that are there")
    for option in ("--tensorflow-python", "--torch-python"):
        add(option, metavar="PATH", default=sys.executable, help="that has it")
    arguments = parser.parse_args(given)
    if unknown := sorted(set(arguments.benchmarks) - set(BENCHMARKS)):
        parser.error(f"unknown {unknown}; there are {', '.join(BENCHMARKS)}")
    partial = arguments.only or arguments.replicas or arguments.sections
    is_other = arguments.quick or arguments.before or (partial and not arguments.add)
    if is_other and arguments.output.resolve() == RESULTS:
        parser.error(
            "give an --output FOLDER with --quick, --before, or some of the cases without --add:"
            " the stored results are of full runs, next to peers"
        )
    if not arguments.benchmarks:
        arguments.benchmarks = [
            name for name in BENCHMARKS if name != "gpu" or gpu.NVIDIA_DRIVER.exists()
        ]
    return arguments


def _others(arguments: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yields the versions of other libraries that there are."""
    for name in _LIBRARIES:
        # Asks for the metadata: importing TensorFlow takes seconds.
        question = (
            "import importlib.metadata as m\n"
            f"names = ('{name}', '{name}-cpu', '{name}_cpu')\n"
            "print(next(d.version for d in m.distributions() if d.metadata['Name'] in names))"
        )
        python = getattr(arguments, f"{name}_python")
        answer = subprocess.run([python, "-c", question], capture_output=True, text=True)
        if answer.returncode == 0:
            yield name, answer.stdout.strip()
        else:
            print(f"{name}: not installed (see --{name}-python)", file=sys.stderr)


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


if __name__ == "__main__":
    sys.exit(main())
