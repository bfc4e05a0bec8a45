"""Has `fit` the numbers of one device, whatever the model does?

Every case of tests/awkward is trained, evaluated and asked for predictions by plain Keras on one
device and under each setting. What differs by more than 2e-5 of the largest value is held against
plain Keras that began a rounding away: only models that amplify rounding may differ so much.

    python tests/nightly/awkward.py
    python tests/nightly/awkward.py --settings "2 replicas" "2 workers" --kinds losses steps
    python tests/nightly/awkward.py --cases queue clip --float64

With `--float64`, all is computed in float64, where rounding is small: what then differs is wrong.
Ends with 1 if a case differs or fails.
"""

import argparse
import contextlib
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

os.environ["KERAS_BACKEND"] = "jax"
os.environ["JAX_PLATFORMS"] = "cpu"
# Nearly all of the time goes into compiling programs that run once, and less of it with these.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_cpu_use_fusion_emitters=false " * version("jaxlib").startswith("0.10.")
    + "--xla_cpu_parallel_codegen_split_count=1 --xla_backend_optimization_level=1",
)
if "--float64" in sys.argv:
    os.environ["JAX_ENABLE_X64"] = "1"
sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import numpy as np

import distributary as dist
from distributary.strategies import _extended as extended

_WORKER = "--worker" in sys.argv
_STRATEGY: Any = None
if _WORKER:
    # Before anything else asks JAX for its devices.
    _STRATEGY = dist.MultiWorkerMirroredStrategy()
else:
    dist.config.set_logical_cpu_devices(4)

import keras  # noqa: E402
from _workers import outputs_of_two  # noqa: E402

if "--float64" in sys.argv:
    keras.config.set_floatx("float64")

from tests.awkward._all import CASES, Case  # noqa: E402
from tests.awkward._run import (  # noqa: E402
    TOLERANCE,
    Results,
    difference,
    rounding_of,
    train,
)

# Of the difference to plain Keras that began a rounding away.
_MULTIPLE = 5
_FLOAT64_TOLERANCE = 1e-10
_CASES_PER_JOB = 16
_SECONDS_PER_CASE = 60


class Setting(NamedTuple):
    """A way to run: a strategy in this process, or two workers of some devices each."""

    strategy: Any = None
    workers_of: int = 0
    steps_per_execution: int = 1


def _mirrored(num_replicas: int, **options: Any) -> Any:
    return dist.MirroredStrategy([f"CPU:{i}" for i in range(num_replicas)], **options)


def _in_parts(num_devices: int, **options: Any) -> Any:
    extended._MIN_BYTES_IN_PARTS = 16  # or all variables of small models stay whole, as seeds do
    return _mirrored(num_devices, experimental_shard_parameters=True, **options)


SETTINGS = {
    "2 replicas": Setting(lambda: _mirrored(2)),
    "3 replicas": Setting(lambda: _mirrored(3)),
    "4 replicas": Setting(lambda: _mirrored(4)),
    "central storage": Setting(
        lambda: dist.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"])
    ),
    "sharded state": Setting(lambda: _mirrored(2, experimental_shard_optimizer_state=True)),
    "sharded parameters": Setting(lambda: _in_parts(2)),
    "2 replicas of 2 devices": Setting(lambda: _in_parts(4, experimental_model_parallel=2)),
    "3 steps": Setting(lambda: _mirrored(2), steps_per_execution=3),
    "2 workers": Setting(workers_of=1),
    "2 workers of 2": Setting(workers_of=2),
}


class Table:
    """Prints a row per case and setting, and counts the verdicts."""

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance
        self._alone: dict[tuple[str, int], Results] = {}  # what plain Keras computes on one device
        self.counts: dict[str, dict[str, int]] = {}

    def add(self, case: Case, name: str, outcome: Results | str) -> None:
        """Prints what a case came to under a setting: its results, or how it failed."""
        size, verdict, details = self._judged(case, SETTINGS[name].steps_per_execution, outcome)
        count = self.counts.setdefault(name, {})
        count[verdict] = count.get(verdict, 0) + 1
        row = f"{case.kind:<10} {case.name:<36} {name:<16} {size:>8} {verdict:<8} {details}"
        print(row.rstrip(), flush=True)

    def _judged(self, case: Case, steps: int, outcome: Results | str) -> tuple[str, str, str]:
        if isinstance(outcome, str):
            return "", "failed", outcome
        key = case.name, steps
        if key not in self._alone:
            alone = outcome_of(case, None, steps)
            if isinstance(alone, str):
                return "", "excluded", f"plain Keras: {alone}"
            self._alone[key] = alone
        found = difference(self._alone[key], outcome)
        size = f"{found.relative:.1e}"
        if found.relative <= self._tolerance:
            return size, "equal", ""
        rounding = rounding_of(case, self._alone[key], found.relative, steps_per_execution=steps)
        verdict = "rounding" if found.relative <= _MULTIPLE * rounding else "DIFFERS"
        return size, verdict, f"{found.where}; plain Keras a rounding away: {rounding:.1e}"


def outcome_of(case: Case, strategy: Any, steps: int = 1) -> Results | str:
    """Trains under a strategy, or alone; returns the results, or what was raised in one line."""
    try:
        return train(case, strategy, steps_per_execution=steps)
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def outcomes_of_workers(cases: Sequence[Case], devices: int) -> Iterator[tuple[Case, Any]]:
    """Trains cases in two processes of some devices, and yields what each of them came to.

    A job that ends too early has failed in the first case without results; another goes on with
    the next one.
    """
    left = list(cases)
    while left:
        chunk, left = left[:_CASES_PER_JOB], left[_CASES_PER_JOB:]
        with tempfile.TemporaryDirectory() as folder:
            options = ["--float64"] if "--float64" in sys.argv else []
            names = [case.name for case in chunk]
            outputs = outputs_of_two(
                __file__, "--worker", folder, *options, "--cases", *names,
                seconds=60 + _SECONDS_PER_CASE * len(chunk), devices=devices,
            )  # fmt: skip
            for position, case in enumerate(chunk):
                found = [_read(Path(folder), case, worker) for worker in range(2)]
                missing = [worker for worker in range(2) if found[worker] is None]
                if missing:
                    lines = outputs[missing[0]].strip().splitlines()[-3:]
                    yield case, f"worker {missing[0]} ended: {' '.join(lines)[-300:]}"
                    left = chunk[position + 1 :] + left
                    break
                for outcome in found:
                    if isinstance(outcome, str):
                        yield case, outcome
                        break
                else:
                    apart = difference(found[0], found[1])
                    yield case, found[0] if not apart.relative else f"workers differ: {apart}"


def _read(folder: Path, case: Case, worker: int) -> Results | str | None:
    stem = folder / f"{case.name}.{worker}"
    if (error := stem.with_suffix(stem.suffix + ".txt")).exists():
        return error.read_text()
    with contextlib.suppress(FileNotFoundError), np.load(f"{stem}.npz") as arrays:
        return {name.replace("\\", "/"): arrays[name] for name in arrays.files}
    return None


def work(cases: Sequence[Case], folder: Path) -> None:
    """Trains cases in this worker, and leaves a file for each."""
    worker = _STRATEGY.extended.worker_number
    for case in cases:
        outcome = outcome_of(case, _STRATEGY)
        stem = folder / f"{case.name}.{worker}"
        if isinstance(outcome, str):
            stem.with_suffix(stem.suffix + ".txt").write_text(outcome)
        else:
            # A name with a slash would be a folder of the archive.
            arrays = {name.replace("/", "\\"): value for name, value in outcome.items()}
            with open(f"{stem}.part", "wb") as file:
                np.savez(file, **arrays)
            os.replace(f"{stem}.part", f"{stem}.npz")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--kinds", nargs="*", help="kinds of cases; all, if left out")
    parser.add_argument("--cases", nargs="*", help="names of cases")
    parser.add_argument("--float64", action="store_true")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    cases = [
        case
        for case in CASES.values()
        if (not options.kinds or case.kind in options.kinds)
        and (not options.cases or case.name in options.cases)
    ]
    warnings.simplefilter("ignore")
    if options.worker:
        cases.sort(key=lambda case: options.cases.index(case.name))
        work(cases, options.worker)
        return 0
    table = Table(_FLOAT64_TOLERANCE if options.float64 else TOLERANCE)
    names = [name for name in SETTINGS if name in options.settings]
    for number, case in enumerate(cases, 1):
        for name in names:
            setting = SETTINGS[name]
            if setting.strategy:
                outcome = outcome_of(case, setting.strategy(), setting.steps_per_execution)
                table.add(case, name, outcome)
        if number % 40 == 0:
            jax.clear_caches()
    for name in names:
        if SETTINGS[name].workers_of:
            for case, outcome in outcomes_of_workers(cases, SETTINGS[name].workers_of):
                table.add(case, name, outcome)
    for name, count in table.counts.items():
        print(f"{name:<16} {sum(count.values())} cases:", count)
    bad = sum(n for count in table.counts.values() for verdict, n in count.items()
              if verdict not in ("equal", "rounding"))  # fmt: skip
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
