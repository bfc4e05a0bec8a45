"""The channel on which a worker says how far it is."""

import contextlib
import json
import os
import stat
import threading
import time
from collections.abc import Mapping
from typing import final

from distributary.launch._environment import STATUS_VARIABLE
from distributary.topology import progress

__all__ = ["StatusReader", "report", "report_progress"]

_SECONDS_BETWEEN_REPORTS = 1.0
_is_reported_by_program = False
_MAX_MESSAGE_BYTES = 512  # POSIX's smallest PIPE_BUF: shorter writes are never torn


def report(
    *,
    step: int | None = None,
    examples_per_second: float | None = None,
    environ: Mapping[str, str] | None = None,
) -> None:
    """Tells the launcher how far this worker is; does nothing without one, and never waits.

    Steps of `fit` and of loops over distributed datasets are reported without it, once a second; a
    program that calls it reports for itself from then on.

    Shown in the launcher's status line. A program that cannot call this writes a line of JSON to
    the file descriptor in the environment variable `DISTRIBUTARY_STATUS_FD`, in one `write`:
    `{"step": 120, "examples_per_second": 5120.5}`. The descriptor is non-blocking: a line that does
    not fit is lost.

    Args:
        step: Number of steps done.
        examples_per_second: Examples that this worker has computed per second, lately.
        environ: Environment to read, `os.environ` by default.
    """
    global _is_reported_by_program
    _is_reported_by_program = True
    _write(os.environ if environ is None else environ, step, examples_per_second)


def _write(environ: Mapping[str, str], step: int | None, examples_per_second: float | None) -> None:
    value = environ.get(STATUS_VARIABLE, "")
    if not value.isdecimal():
        return
    said = {"step": step, "examples_per_second": examples_per_second}
    line = json.dumps({name: value for name, value in said.items() if value is not None}) + "\n"
    # A program that a worker has started sees the variable, but has not inherited the descriptor,
    # and may have a file of its own under that number.
    with contextlib.suppress(OSError):
        if stat.S_ISFIFO(os.fstat(int(value)).st_mode):
            os.write(int(value), line.encode())


def report_progress() -> None:
    """Reports the steps of `fit`, of loops over distributed datasets and of coordinators.

    Once a second, from a thread, until the program calls `report` itself. Does nothing without the
    launcher.
    """
    if not progress.is_watched and os.environ.get(STATUS_VARIABLE):
        progress.is_watched = True
        threading.Thread(target=_report, name="distributary-progress", daemon=True).start()


def _report() -> None:
    num_examples_before, then = 0, time.monotonic()
    while not _is_reported_by_program:
        time.sleep(_SECONDS_BETWEEN_REPORTS)
        num_examples, now = progress.num_examples, time.monotonic()
        if progress.num_steps:
            rate = (num_examples - num_examples_before) / (now - then)
            _write(os.environ, progress.num_steps, rate if num_examples else None)
        num_examples_before, then = num_examples, now


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
            self._last.update(values)
