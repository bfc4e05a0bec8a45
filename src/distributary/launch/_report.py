"""What a worker tells its launcher: its numbers, and that it cannot be part of the job."""

import contextlib
import json
import math
import os
import stat
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, NoReturn

from distributary._threads import start_thread
from distributary.devices import progress
from distributary.errors import DistributaryError, InvalidValueError
from distributary.launch._output import REFUSED_EXIT_CODE, REFUSED_PREFIX
from distributary.launch._worker import RESTART_VARIABLE, STATUS_VARIABLE, Numbers

_SECONDS_BETWEEN_REPORTS = 1.0
_is_reported_by_program = False
_strategies: weakref.WeakSet[Any] = weakref.WeakSet()  # the `extended` of each
_MAX_MESSAGE_BYTES = 512  # the smallest PIPE_BUF in POSIX: shorter writes are never split


def report(
    *,
    step: int | None = None,
    examples_per_second: float | None = None,
    environ: Mapping[str, str] | None = None,
    **values: float,
) -> None:
    """Reports the progress of this program, and its latest results. Never waits for a launcher.

    The numbers appear in the launcher's status line and on dashboards, and `StatisticsLogger`
    writes them. You need not report the steps of `fit` and of loops over distributed datasets: this
    happens once a second. If you give `step` or `examples_per_second`, your program reports these
    two for itself from then on.

    A program that cannot call this function can write to the file descriptor in the environment
    variable `DISTRIBUTARY_STATUS_FD`. Write one line of JSON in one `write`:
    `{"step": 120, "examples_per_second": 5120.5}`. The descriptor is non-blocking: a line that does
    not fit is lost.

    Args:
        step: Number of steps done.
        examples_per_second: Examples per second that this worker has computed lately.
        environ: Environment to read; `os.environ` by default.
        **values: Other numbers by name, such as `loss`. An array without dims is waited for.
    """
    global _is_reported_by_program
    numbers = {name: float(value) for name, value in values.items()}
    progress.values = {**progress.values, **numbers}
    if step is not None or examples_per_second is not None:
        _is_reported_by_program = True
    said = {"step": step, "examples_per_second": examples_per_second, **numbers}
    _write(os.environ if environ is None else environ, said)


def refuse_job(reason: str) -> NoReturn:
    """Ends this process if a launcher has started it; the launcher ends the job for this reason.

    Raises:
        InvalidValueError: without a launcher.
    """
    if _launcher_fd(os.environ) is not None:
        sys.stderr.write(f"{REFUSED_PREFIX}{reason}\n")
        sys.stderr.flush()
        raise SystemExit(REFUSED_EXIT_CODE)
    raise InvalidValueError(reason)


def _launcher_fd(environ: Mapping[str, str]) -> int | None:
    """Returns the descriptor of the launcher's pipe; None without one."""
    text = environ.get(STATUS_VARIABLE, "")
    # A program that a worker has started sees the variable, but has not inherited the descriptor.
    # It may have a file of its own under that number.
    with contextlib.suppress(OSError):
        if text.isdecimal() and stat.S_ISFIFO(os.fstat(int(text)).st_mode):
            return int(text)
    return None


def _write(environ: Mapping[str, str], said: Mapping[str, float | None]) -> None:
    fd = _launcher_fd(environ)
    if fd is None:
        return
    with contextlib.suppress(OSError):
        for line in _lines(said):
            os.write(fd, line)


def _lines(said: Mapping[str, float | None]) -> Iterator[bytes]:
    """Yields lines that are written completely or not at all."""
    line = b""
    for name, value in said.items():
        if value is None or not math.isfinite(value):
            continue
        entry = f"{json.dumps(name)}: {json.dumps(value)}".encode()
        if line and len(line) + len(entry) + 4 > _MAX_MESSAGE_BYTES:
            yield b"{" + line + b"}\n"
            line = b""
        line += b", " * bool(line) + entry
    if line:
        yield b"{" + line + b"}\n"


def report_progress(extended: Any) -> None:
    """Reports the steps of `fit`, of loops over distributed datasets, and of coordinators.

    Reports once a second, from a thread. Does nothing without the launcher.

    Args:
        extended: A strategy's `strategy.extended`. The strategy with the most steps is reported.
    """
    if not os.environ.get(STATUS_VARIABLE):
        return
    _strategies.add(extended)
    _write(os.environ, {"num_steps": 0})  # the launcher learns that there is a strategy
    if not progress.is_watched:
        progress.is_watched = True
        ended = threading.Event()
        start_thread(partial(_report, ended), ended.set, "distributary-progress")


def _report(ended: threading.Event) -> None:
    num_examples_before, then = 0, time.monotonic()
    while not ended.wait(_SECONDS_BETWEEN_REPORTS):
        num_examples, now = progress.num_examples, time.monotonic()
        said: dict[str, float | None] = {}
        if progress.num_steps and not _is_reported_by_program:
            rate = (num_examples - num_examples_before) / (now - then)
            said = {
                "step": progress.num_steps,
                "examples_per_second": rate if num_examples else None,
            }
        num_examples_before, then = num_examples, now
        numbers = max(map(numbers_of, list(_strategies)), key=lambda n: n["num_steps"], default={})
        _write(os.environ, {**said, **numbers})


def numbers_of(extended: Any) -> Numbers:
    """Returns all numbers of a strategy's run in this process, as sums since its beginning.

    Args:
        extended: `strategy.extended`.

    Returns:
        The numbers of `StepStatistics`; below `"coordinator/"`, those of a `ClusterCoordinator`'s
        `statistics()`; the latest logs of `fit`; and the numbers passed to `launch.report`.
    """
    numbers: Numbers = {
        "num_replicas": extended.num_replicas,
        "num_restarts": int(os.environ.get(RESTART_VARIABLE, 0)),
    }
    numbers |= _flat(extended.step_counts.snapshot(), "")
    for name, collect in list(extended.statistics_sources.items()):
        with contextlib.suppress(DistributaryError):  # raised if a server is lost
            numbers |= _flat(collect(), f"{name}/")
    if "coordinator/num_done" in numbers:
        numbers["num_steps"] += numbers["coordinator/num_done"]
    return numbers | progress.numbers(numbers["num_steps"])


def _flat(statistics: object, prefix: str) -> Numbers:
    """Returns the numbers in a dataclass, and in dataclasses in its tuples."""
    assert is_dataclass(statistics)
    numbers: Numbers = {}
    for field in fields(statistics):
        value = getattr(statistics, field.name)
        if isinstance(value, (int, float)):
            numbers[prefix + field.name] = value
        elif isinstance(value, tuple):
            for i, part in enumerate(value):
                numbers |= _flat(part, f"{prefix}{field.name}/{i}/")
    return numbers
