"""The channel on which a worker says how far it is."""

import contextlib
import json
import math
import os
import stat
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, final

from distributary.launch._environment import STATUS_VARIABLE
from distributary.monitoring import numbers_of
from distributary.topology import progress, start_thread

__all__ = ["StatusReader", "report", "report_progress"]

_SECONDS_BETWEEN_REPORTS = 1.0
_is_reported_by_program = False
_strategies: weakref.WeakSet[Any] = weakref.WeakSet()  # the `extended` of each
_MAX_MESSAGE_BYTES = 512  # POSIX's smallest PIPE_BUF: shorter writes are never torn


def report(
    *,
    step: int | None = None,
    examples_per_second: float | None = None,
    environ: Mapping[str, str] | None = None,
    **values: float,
) -> None:
    """Says how far this program is, and what it has computed lately; never waits for a launcher.

    Shown in the launcher's status line and on dashboards, and written by `StatisticsLogger`. Steps
    of `fit` and of loops over distributed datasets are reported without it, once a second; a
    program that gives `step` or `examples_per_second` reports these for itself from then on.

    A program that cannot call this writes a line of JSON to the file descriptor in the environment
    variable `DISTRIBUTARY_STATUS_FD`, in one `write`:
    `{"step": 120, "examples_per_second": 5120.5}`. The descriptor is non-blocking: a line that does
    not fit is lost.

    Args:
        step: Number of steps done.
        examples_per_second: Examples that this worker has computed per second, lately.
        environ: Environment to read, `os.environ` by default.
        **values: Other numbers by name, `loss` for example. An array without dims is waited for.
    """
    global _is_reported_by_program
    numbers = {name: float(value) for name, value in values.items()}
    progress.values = {**progress.values, **numbers}
    if step is not None or examples_per_second is not None:
        _is_reported_by_program = True
    said = {"step": step, "examples_per_second": examples_per_second, **numbers}
    _write(os.environ if environ is None else environ, said)


def _write(environ: Mapping[str, str], said: Mapping[str, float | None]) -> None:
    text = environ.get(STATUS_VARIABLE, "")
    if not text.isdecimal():
        return
    # A program that a worker has started sees the variable, but has not inherited the descriptor,
    # and may have a file of its own under that number.
    with contextlib.suppress(OSError):
        if stat.S_ISFIFO(os.fstat(int(text)).st_mode):
            for line in _lines(said):
                os.write(int(text), line)


def _lines(said: Mapping[str, float | None]) -> Iterator[bytes]:
    """Lines that are written whole or not at all."""
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
    """Reports the steps of `fit`, of loops over distributed datasets and of coordinators.

    Once a second, from a thread. Does nothing without the launcher.

    Args:
        extended: `strategy.extended`, whose numbers are reported if it has done the most steps.
    """
    if not os.environ.get(STATUS_VARIABLE):
        return
    _strategies.add(extended)
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
    """The launcher's end of the channel of one worker."""

    def __init__(self) -> None:
        self._read_fd, self.write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        os.set_blocking(self.write_fd, False)
        self._pending = b""
        self._last: dict[str, float] = {}
        self.num_unreadable = 0  # lines that are not what `report` writes

    def fileno(self) -> int:
        """The descriptor that becomes readable when `receive` has something to do."""
        return self._read_fd

    def close_write_end(self) -> None:
        """To be called when the worker has inherited it."""
        os.close(self.write_fd)

    def receive(self) -> bool:
        """Reads what has come; false at the end."""
        try:
            data = os.read(self._read_fd, 4096)
        except BlockingIOError:
            return True
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            self._read_line(line)
        if len(self._pending) > _MAX_MESSAGE_BYTES:
            self._pending = b""
            self.num_unreadable += 1
        return bool(data)

    def close(self) -> None:
        """Reads no more."""
        os.close(self._read_fd)

    def numbers(self) -> dict[str, float]:
        """All numbers that the worker has said, the latest by name. For any thread."""
        numbers = dict(self._last)
        if "step" in numbers:
            numbers.setdefault("num_steps", numbers["step"])
        return numbers

    def __str__(self) -> str:
        """What the worker has said last, `""` if nothing."""
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
            self.num_unreadable += 1
        else:
            self._last = {**self._last, **values}  # others read it
