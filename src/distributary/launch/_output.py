"""Copies the output of workers, line by line, and shows the status line below it."""

import collections
import contextlib
import os
import re
import selectors
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import BinaryIO, Final, final

from distributary.errors import WorkerLostError

__all__ = ["Output", "TaskOutput"]

# A carriage return ends a line as well, because progress bars write a single line for hours. One
# at the very end of what was read so far may be the first half of "\r\n".
_LINE_END = re.compile(rb"\r?\n|\r(?=[^\n])")
_MAX_LINE_BYTES: Final = 16 * 2**20  # longer ones are printed in pieces
_READ_BYTES = 2**16
_NUM_LAST_LINES = 20
_MAX_LAST_LINE_BYTES = 1000
_COLORS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_LAUNCHER_COLOR = 1  # bold
_ERASE_LINE = b"\r\x1b[K"
_STATUS_SECONDS = 0.5
_IDLE_SECONDS = 1.0
_STDOUT, _STDERR = 0, 1


@final
class TaskOutput:
    """The output of one task in one attempt.

    Args:
        name: Name in the prefix of its lines.
        number: Number that determines the color.
        log: File that gets everything, or None.
    """

    def __init__(self, name: str, number: int, log: BinaryIO | None) -> None:
        self.name = name
        self.number = number
        self.log = log
        self.num_open = 2
        self.ended = threading.Event()  # set once all writers have closed both streams
        self.reason = ""  # which other worker was lost
        self._last_lines: collections.deque[bytes] = collections.deque(maxlen=_NUM_LAST_LINES)

    def remember(self, lines: Iterable[bytes]) -> None:
        """Keeps the last of some stderr lines, and the lost worker if a line names one."""
        for line in lines:
            kept = line[:_MAX_LAST_LINE_BYTES]
            self._last_lines.append(kept)
            # The line may begin with part of a traceback.
            _, prefix, reason = kept.partition(WorkerLostError.line_prefix.encode())
            if prefix:
                self.reason = reason.decode("utf-8", "replace")

    def last_lines(self) -> list[str]:
        """Returns the last lines that the task wrote to stderr."""
        return [line.decode("utf-8", "replace") for line in self._last_lines]


@final
class Output:
    """A thread that copies the output of all workers, and the only one to write to the terminal.

    If whoever reads the launcher's output stops reading, the workers stop once their pipes are
    full. The launcher goes on, because it must notice ended workers and signals.

    Args:
        stdout_fd: Descriptor for the lines of the workers' stdout.
        stderr_fd: Descriptor for the lines of their stderr, the messages of the launcher and, if it
            is a terminal, the status line.
        environ: Environment with `NO_COLOR` and `TERM`.
        status: Returns the text of the status line, `""` for none. Called in the thread.
    """

    def __init__(
        self,
        stdout_fd: int,
        stderr_fd: int,
        environ: Mapping[str, str],
        status: Callable[[], str],
    ) -> None:
        self._fds = (stdout_fd, stderr_fd)
        self._is_terminal = tuple(_is_terminal(fd) for fd in self._fds)
        self._has_color = not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
        self._has_status = self._is_terminal[_STDERR] and environ.get("TERM") != "dumb"
        self._is_closed = [False, False]
        self._status = status
        self._status_at = 0.0  # when the status line is due
        self._status_is_visible = False
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        # Any thread appends, ours removes: a task with its descriptors, a message, or None for the
        # end.
        self._requests: collections.deque[tuple[TaskOutput, int, int] | str | None] = (
            collections.deque()
        )
        self._is_writing = False
        self._last_read_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="launch-output", daemon=True)
        self._thread.start()

    def attach(
        self, name: str, number: int, stdout_fd: int, stderr_fd: int, log_path: Path | None
    ) -> TaskOutput:
        """Starts to copy two streams, until they end; then closes their descriptors.

        Args:
            name: Name in the prefix of the lines.
            number: Number that determines the color.
            stdout_fd: Descriptor from which to read the worker's stdout.
            stderr_fd: Descriptor from which to read its stderr.
            log_path: File that gets an exact copy of both, or None.
        """
        log = None if log_path is None else open(log_path, "wb", buffering=0)  # noqa: SIM115
        task = TaskOutput(name, number, log)
        self._request((task, stdout_fd, stderr_fd))
        return task

    def say(self, text: str) -> None:
        """Writes the launcher's own lines to stderr."""
        self._request(text)

    def wait(self, task: TaskOutput, should_stop: Callable[[], bool]) -> None:
        """Waits until everything that a task has written is copied.

        Gives up when `should_stop()` is true, or after a second without output: then a process that
        the launcher does not know holds the other end.
        """
        started_at = time.monotonic()
        while not task.ended.wait(0.05) and not should_stop():
            idle_since = max(started_at, self._last_read_at)
            if not self._is_writing and time.monotonic() - idle_since > _IDLE_SECONDS:
                return

    def close(self, should_stop: Callable[[], bool]) -> None:
        """Writes the rest, removes the status line and ends the thread.

        Gives up when `should_stop()` is true; the thread then ends with the process.
        """
        self._request(None)
        while self._thread.is_alive() and not should_stop():
            self._thread.join(0.05)

    def _request(self, request: tuple[TaskOutput, int, int] | str | None) -> None:
        self._requests.append(request)
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b".")

    def _run(self) -> None:
        while self._handle_requests():
            events = self._selector.select(_STATUS_SECONDS if self._has_status else None)
            for key, _ in events:
                if key.fd == self._wake_read:
                    os.read(self._wake_read, 4096)
                else:
                    key.data.copy()
            if self._has_status and time.monotonic() >= self._status_at:
                self._draw_status()
        for key in list(self._selector.get_map().values()):
            if key.fd != self._wake_read:
                key.data.finish()
        self._erase_status()
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _handle_requests(self) -> bool:
        while self._requests:
            request = self._requests.popleft()
            if request is None:
                return False
            if isinstance(request, str):
                prefix = self._prefix("launcher", _LAUNCHER_COLOR, _STDERR)
                lines = request.splitlines()
                self.write(_STDERR, b"".join(prefix + line.encode() + b"\n" for line in lines))
                continue
            task, *descriptors = request
            for stream, fd in zip((_STDOUT, _STDERR), descriptors, strict=True):
                prefix = self._prefix(task.name, _COLORS[task.number % len(_COLORS)], stream)
                copier = _Copier(self, task, stream, fd, prefix)
                self._selector.register(fd, selectors.EVENT_READ, copier)
        return True

    def _prefix(self, name: str, color: int, stream: int) -> bytes:
        if self._has_color and self._is_terminal[stream]:
            return f"\x1b[{color}m[{name}]\x1b[0m ".encode()
        return f"[{name}] ".encode()

    def read(self, fd: int) -> bytes:
        """Returns some bytes of a worker's output, none at its end."""
        self._last_read_at = time.monotonic()
        try:
            return os.read(fd, _READ_BYTES)
        except OSError:
            return b""

    def forget(self, fd: int) -> None:
        """Stops reading a descriptor, and closes it."""
        self._selector.unregister(fd)
        os.close(fd)

    def write(self, stream: int, data: bytes) -> None:
        """Writes whole lines; drops them once nobody can read them."""
        if self._is_terminal[stream]:
            self._erase_status()
        self._write(stream, data)

    def _write(self, stream: int, data: bytes) -> None:
        if self._is_closed[stream]:
            return
        self._is_writing = True
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._fds[stream], view) :]
            except BlockingIOError:  # another process has made it non-blocking
                with selectors.DefaultSelector() as selector:
                    selector.register(self._fds[stream], selectors.EVENT_WRITE)
                    selector.select()
            except OSError:  # its reader, or its terminal, has gone
                self._is_closed[stream] = True
                if stream == _STDOUT:
                    self.say("stdout is closed; the workers' output to it is dropped.")
                break
        self._is_writing = False

    def _draw_status(self) -> None:
        self._status_at = time.monotonic() + _STATUS_SECONDS
        text = self._status()
        if not text:
            self._erase_status()
            return
        with contextlib.suppress(OSError):
            num_columns = os.get_terminal_size(self._fds[_STDERR]).columns
            if num_columns:  # some terminals do not say
                text = text[: num_columns - 1]
        self._write(_STDERR, _ERASE_LINE + text.encode())
        self._status_is_visible = True

    def _erase_status(self) -> None:
        if self._status_is_visible:
            self._status_is_visible = False
            self._status_at = 0.0
            self._write(_STDERR, _ERASE_LINE)


@final
class _Copier:
    """A copier of one stream of a worker, whole lines at a time."""

    def __init__(
        self, output: Output, task: TaskOutput, stream: int, fd: int, prefix: bytes
    ) -> None:
        self._output = output
        self._task = task
        self._stream = stream
        self._fd = fd
        self._prefix = prefix
        self._pending = bytearray()  # start of a line
        self._num_searched = 0  # bytes of it in which no line ends

    def copy(self) -> None:
        """Reads once, and writes all complete lines."""
        data = self._output.read(self._fd)
        if not data:
            self.finish()
            return
        if self._task.log is not None:
            self._task.log.write(data)
        self._pending += data
        self._emit(self._complete_lines())

    def finish(self) -> None:
        """Writes the last line, even if it is incomplete, and stops."""
        self._output.forget(self._fd)
        rest = bytes(self._pending).rstrip(b"\r")
        self._emit([rest] if rest else [])
        self._task.num_open -= 1
        if not self._task.num_open:
            if self._task.log is not None:
                self._task.log.close()
            self._task.ended.set()

    def _complete_lines(self) -> list[bytes]:
        lines = []
        begin = 0
        for match in _LINE_END.finditer(self._pending, self._num_searched):
            lines.append(bytes(self._pending[begin : match.start()]))
            begin = match.end()
        del self._pending[:begin]
        if len(self._pending) >= _MAX_LINE_BYTES:
            lines.append(bytes(self._pending))
            self._pending.clear()
        self._num_searched = max(0, len(self._pending) - 1)  # the last byte may be "\r"
        return lines

    def _emit(self, lines: list[bytes]) -> None:
        if self._stream == _STDERR:
            self._task.remember(lines)
        if lines:
            self._output.write(
                self._stream, b"".join(self._prefix + line + b"\n" for line in lines)
            )


def _is_terminal(fd: int) -> bool:
    try:
        return os.isatty(fd)
    except OSError:
        return False
