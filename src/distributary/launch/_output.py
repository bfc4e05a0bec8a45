"""Copies the output of workers, line by line, and shows the status line below it."""

import collections
import contextlib
import os
import re
import select
import selectors
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import IO, BinaryIO, Final, final

from distributary.errors import WorkerLostError

# Exit code of a task that cannot be part of its job, `EX_CONFIG` of `<sysexits.h>`, and what it
# writes to stderr before the reason. The launcher ends the job, and says the reason once.
REFUSED_EXIT_CODE: Final = 78
REFUSED_PREFIX: Final = "distributary refuses the job: "
# A carriage return ends a line as well, because progress bars write a single line for hours. One
# at the very end of what was read so far may be the first half of "\r\n".
_LINE_END = re.compile(rb"\r?\n|\r(?=[^\n])")
_MAX_LINE_BYTES: Final = 16 * 2**20  # longer ones are printed in pieces
_READ_BYTES = 2**16
# What gloo prints in every worker when all is well, without a way to turn it off.
_NOISE = re.compile(
    rb"\[Gloo\] Rank \d+ is connected to (\d+) peer ranks\. Expected number of connected peer ranks"
    rb" is : \1"
)
_NUM_LAST_LINES = 20
_NUM_MESSAGES = 50
_MAX_LAST_LINE_BYTES = 1000
_COLORS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_LAUNCHER_COLOR = 1  # bold
_ERASE_LINE = b"\r\x1b[K"
_STATUS_SECONDS = 0.5
_IDLE_SECONDS = 1.0
_STDOUT, _STDERR, _REPORTS = 0, 1, 2


@final
@dataclass(eq=False)
class TaskOutput:
    """The output of one task in one attempt.

    Args:
        log: File that gets everything but reports, or None.
        on_report: Called with every line of the channel of reports.

    Attributes:
        ended: Set once all writers have closed all streams.
        reason: Why it ends, if a line says so: which other worker was lost, or what is wrong with
            the job.
    """

    log: BinaryIO | None
    on_report: Callable[[bytes], None]
    num_open: int = 3
    ended: threading.Event = field(default_factory=threading.Event)
    reason: str = ""
    _last_lines: collections.deque[bytes] = field(
        default_factory=lambda: collections.deque(maxlen=_NUM_LAST_LINES)
    )

    def remember(self, lines: Iterable[bytes]) -> list[bytes]:
        """Keeps the last of some stderr lines, and the reason of its end if a line says it.

        Returns:
            The lines to show. What is wrong with the job is said by every task, so the launcher
            says it instead.
        """
        shown = []
        for line in lines:
            _, prefix, refusal = line.partition(REFUSED_PREFIX.encode())
            if prefix:
                self.reason = refusal.decode("utf-8", "replace")
                continue
            shown.append(line)
            kept = line[:_MAX_LAST_LINE_BYTES]
            self._last_lines.append(kept)
            # The line may begin with part of a traceback.
            _, prefix, reason = kept.partition(WorkerLostError.line_prefix.encode())
            if prefix:
                self.reason = reason.decode("utf-8", "replace")
        return shown

    def close_log(self) -> None:
        """Closes the log, which gets nothing more."""
        if self.log is not None:
            with contextlib.suppress(OSError):  # raised by some file systems if the disk is full
                self.log.close()
            self.log = None

    def last_lines(self) -> list[str]:
        """Returns the last lines that the task wrote to stderr."""
        return [line.decode("utf-8", "replace") for line in self._last_lines]


@final
@dataclass(eq=False)
class _Stream:
    """The stdout, stderr or channel of reports of a task, which is read in whole lines."""

    task: TaskOutput
    number: int  # of our own descriptor to which it goes, or that of reports
    file: IO[bytes]
    prefix: bytes
    pending: bytearray = field(default_factory=bytearray)  # start of a line
    num_searched: int = 0  # bytes of it in which no line ends

    def lines(self, data: bytes) -> list[bytes]:
        """Returns the lines that more data completes."""
        self.pending += data
        lines = []
        begin = 0
        for match in _LINE_END.finditer(self.pending, self.num_searched):
            lines.append(bytes(self.pending[begin : match.start()]))
            begin = match.end()
        del self.pending[:begin]
        if len(self.pending) >= _MAX_LINE_BYTES:
            lines.append(bytes(self.pending))
            self.pending.clear()
        self.num_searched = max(0, len(self.pending) - 1)  # the last byte may be "\r"
        return lines


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
        should_stop: Returns whether the user wants the launcher to end even with output left to
            write. `wait` and `close` give up then.

    Attributes:
        status: Returns the text of the status line, `""` for none. Called in the thread.
    """

    def __init__(
        self,
        stdout_fd: int,
        stderr_fd: int,
        environ: Mapping[str, str],
        should_stop: Callable[[], bool],
    ) -> None:
        self.status: Callable[[], str] = lambda: ""
        # The last messages, and when they were said in seconds since 1970.
        self.messages = collections.deque[tuple[float, str]](maxlen=_NUM_MESSAGES)
        self._fds = (stdout_fd, stderr_fd)
        self._should_stop = should_stop
        self._is_terminal = (os.isatty(stdout_fd), os.isatty(stderr_fd))
        self._has_color = not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
        self._has_status = self._is_terminal[_STDERR] and environ.get("TERM") != "dumb"
        self._is_closed = [False, False]
        self._last_shown: TaskOutput | None = None
        self._status_at = 0.0  # when the status line is due
        self._status_is_visible = False
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        # Any thread appends, ours removes and calls.
        self._requests: collections.deque[Callable[[], None]] = collections.deque()
        self._is_closing = threading.Event()
        self._is_writing = False
        self._last_read_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="launch-output", daemon=True)
        self._thread.start()

    def attach(
        self,
        name: str,
        number: int,
        streams: tuple[IO[bytes], IO[bytes], IO[bytes]],
        log: BinaryIO | None,
        on_report: Callable[[bytes], None],
    ) -> TaskOutput:
        """Starts to copy streams, until they end; then closes them.

        Args:
            name: Name in the prefix of the lines.
            number: Number that determines the color.
            streams: The worker's stdout and stderr, and the channel of its reports.
            log: File that gets an exact copy of stdout and stderr, or None.
            on_report: Called in the thread with every line of the channel of reports.
        """
        task = TaskOutput(log, on_report)
        self._request(partial(self._begin, task, name, _COLORS[number % len(_COLORS)], streams))
        return task

    def say(self, text: str) -> None:
        """Writes the launcher's own lines to stderr."""
        self.messages.append((time.time(), text))
        self._request(partial(self._say, text))

    def lines_at_the_end(self) -> list[str]:
        """Returns the last stderr lines of the task that was the last to write."""
        task = self._last_shown
        return [] if task is None else task.last_lines()

    def wait(self, task: TaskOutput) -> None:
        """Waits until everything that a task has written is copied.

        Gives up after a second without output: then a process that the launcher does not know
        holds the other end.
        """
        started_at = time.monotonic()
        while not task.ended.wait(0.05) and not self._should_stop():
            idle_since = max(started_at, self._last_read_at)
            if not self._is_writing and time.monotonic() - idle_since > _IDLE_SECONDS:
                return

    def close(self) -> None:
        """Writes the rest, removes the status line and ends the thread.

        If it gives up, the thread ends with the process.
        """
        self._request(self._is_closing.set)
        while self._thread.is_alive() and not self._should_stop():
            self._thread.join(0.05)

    def _request(self, request: Callable[[], None]) -> None:
        self._requests.append(request)
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b".")

    # Everything below runs in the thread.

    def _run(self) -> None:
        while not self._is_closing.is_set():
            for key, _ in self._selector.select(_STATUS_SECONDS if self._has_status else None):
                if key.data is None:
                    os.read(self._wake_read, 4096)
                else:
                    self._copy(key.data)
            if self._has_status and time.monotonic() >= self._status_at:
                self._draw_status()
            while self._requests:
                self._requests.popleft()()
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                self._finish(key.data)
        self._erase_status()
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _say(self, text: str) -> None:
        prefix = self._prefix("launcher", _LAUNCHER_COLOR, _STDERR)
        lines = text.encode(errors="replace").splitlines()  # names of files may be no text
        self._write_lines(_STDERR, prefix, lines)

    def _begin(self, task: TaskOutput, name: str, color: int, files: Sequence[IO[bytes]]) -> None:
        for number, file in enumerate(files):
            prefix = b"" if number == _REPORTS else self._prefix(name, color, number)
            stream = _Stream(task, number, file, prefix)
            self._selector.register(file, selectors.EVENT_READ, stream)

    def _prefix(self, name: str, color: int, number: int) -> bytes:
        if self._has_color and self._is_terminal[number]:
            return f"\x1b[{color}m[{name}]\x1b[0m ".encode()
        return f"[{name}] ".encode()

    def _copy(self, stream: _Stream) -> None:
        """Reads once, and writes all complete lines."""
        self._last_read_at = time.monotonic()
        try:
            data = os.read(stream.file.fileno(), _READ_BYTES)
        except OSError:
            data = b""
        if not data:
            self._finish(stream)
            return
        log = stream.task.log
        if log is not None and stream.number != _REPORTS:
            try:
                log.write(data)
            except OSError as error:  # this thread must go on, or the workers wait for it
                self.say(f"{log.name} is not written any more: {error.strerror}.")
                stream.task.close_log()
        self._emit(stream, stream.lines(data))

    def _finish(self, stream: _Stream) -> None:
        """Writes the last line, even if it is incomplete, and stops reading."""
        self._selector.unregister(stream.file)
        stream.file.close()
        rest = bytes(stream.pending).rstrip(b"\r")
        self._emit(stream, [rest] if rest else [])
        task = stream.task
        task.num_open -= 1
        if not task.num_open:
            task.close_log()
            task.ended.set()

    def _emit(self, stream: _Stream, lines: Sequence[bytes]) -> None:
        if stream.number == _REPORTS:
            for line in lines:
                stream.task.on_report(line)
            return
        lines = [line for line in lines if not _NOISE.fullmatch(line)]
        if stream.number == _STDERR:
            lines = stream.task.remember(lines)
        if lines:
            self._last_shown = stream.task
        self._write_lines(stream.number, stream.prefix, lines)

    def _write_lines(self, number: int, prefix: bytes, lines: Sequence[bytes]) -> None:
        if lines and self._is_terminal[number]:
            self._erase_status()
        self._write(number, b"".join(prefix + line + b"\n" for line in lines))

    def _write(self, number: int, data: bytes) -> None:
        """Writes to our own stdout or stderr; drops the data once nobody can read it."""
        if self._is_closed[number]:
            return
        self._is_writing = True
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._fds[number], view) :]
            except BlockingIOError:  # another process has made it non-blocking
                select.select([], [self._fds[number]], [])
            except OSError:  # its reader, or its terminal, has gone
                self._is_closed[number] = True
                if number == _STDOUT:
                    self.say("stdout is closed; the workers' output to it is dropped.")
                break
        self._is_writing = False

    def _draw_status(self) -> None:
        self._status_at = time.monotonic() + _STATUS_SECONDS
        text = self.status()
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
