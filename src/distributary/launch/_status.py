"""The channel on which a worker reports its progress."""

import contextlib
import json
import math
import os
import stat
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final, final

from distributary.devices import progress, start_thread
from distributary.launch._numbers import numbers_of

STATUS_VARIABLE: Final = "DISTRIBUTARY_STATUS_FD"
#: Exit code of a task that cannot be part of its job, `EX_CONFIG` of `<sysexits.h>`, and what it
#: writes to stderr before the reason. The launcher ends the job, and says the reason once.
REFUSED_EXIT_CODE: Final = 78
REFUSED_PREFIX: Final = "distributary refuses the job: "
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


def refuse_job(reason: str) -> None:
    """Ends this process if a launcher has started it; the launcher ends the job for this reason."""
    if _launcher_fd(os.environ) is not None:
        sys.stderr.write(f"{REFUSED_PREFIX}{reason}\n")
        sys.stderr.flush()
        raise SystemExit(REFUSED_EXIT_CODE)


def size_of_job(environ: Mapping[str, str] | None = None) -> tuple[int, int]:
    """Returns the numbers of workers and parameter servers in this process' job, from TF_CONFIG.

    The chief counts as a worker. Both are 0 for the evaluator, which is not one of the tasks that
    work together, and for a wrong TF_CONFIG, about which the cluster resolver has more to say.

    Args:
        environ: Environment to read; `os.environ` by default.
    """
    try:
        config = json.loads((os.environ if environ is None else environ).get("TF_CONFIG", ""))
        cluster = config["cluster"]
        if config["task"]["type"] not in cluster:
            return 0, 0
        chiefs, workers, servers = (len(cluster.get(job, ())) for job in ("chief", "worker", "ps"))
        return chiefs + workers, servers
    except (AttributeError, KeyError, TypeError, ValueError):
        return 0, 0


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


@final
class StatusReader:
    """The launcher's end of one worker's channel.

    Args:
        warn: Called at the first line that `report` would not write.
    """

    def __init__(self, warn: Callable[[], None]) -> None:
        self._read_fd, self.write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        os.set_blocking(self.write_fd, False)
        self._warn: Callable[[], None] | None = warn
        self._pending = b""
        self._last: dict[str, float] = {}

    def fileno(self) -> int:
        """Returns the descriptor that becomes readable when `receive` has something to do.

        -1 when closed.
        """
        return self._read_fd

    def receive(self) -> bool:
        """Reads what has arrived; returns False at the end."""
        try:
            data = os.read(self._read_fd, 4096)
        except BlockingIOError:
            return True
        *lines, self._pending = (self._pending + data).split(b"\n")
        if len(self._pending) > _MAX_MESSAGE_BYTES:
            lines.append(self._pending)
            self._pending = b""
        for line in lines:
            self._read_line(line)
        return bool(data)

    def close(self) -> None:
        """Stops reading."""
        os.close(self._read_fd)
        self._read_fd = -1

    def numbers(self) -> dict[str, float]:
        """Returns all numbers that the worker has reported, the latest of each. For any thread."""
        numbers = dict(self._last)
        if "step" in numbers:
            numbers.setdefault("num_steps", numbers["step"])
        return numbers

    def __str__(self) -> str:
        """Returns the worker's latest progress, `""` if there is none."""
        parts = []
        if "step" in self._last:
            parts.append(f"step {self._last['step']:.0f}")
        if "examples_per_second" in self._last:
            parts.append(f"{self._last['examples_per_second']:.0f} examples/s")
        return ", ".join(parts)

    def _read_line(self, line: bytes) -> None:
        try:
            values = {str(name): float(value) for name, value in json.loads(line).items()}
        except (AttributeError, TypeError, ValueError):
            if self._warn is not None:
                self._warn()
            self._warn = None
        else:
            self._last = {**self._last, **values}  # a new dict, because other threads read it
