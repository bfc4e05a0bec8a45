"""The workers of a job notice when one of them is lost, and end with its name.

Every worker keeps the connection to the first worker on which they met. Each end says something
once a second. A connection that closes tells at once that a process has ended, silence that it is
frozen or its machine is gone; the first worker tells the others. A process that ends by an
exception says so before. Lines of JSON, `[kind, content]`:

    both ways   beat       number of programs of the whole job that the sender has dispatched
                lost       which worker is lost, and how: the job ends
    to first    finished   as beat; the sender waits for the others
    from first  over       all have finished

Source: the health checks of `tf.distribute.MultiWorkerMirroredStrategy`, which are RPCs.
"""

import atexit
import contextlib
import json
import logging
import os
import re
import select
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, final

from distributary.cluster_resolver import MultiWorker
from distributary.errors import WorkerLostError
from distributary.topology import job_programs

__all__ = ["Liveness"]

_BEAT_SECONDS = 1.0
# From the news of a lost worker to the end of this process; what it can still do is to clean up.
_GRACE_SECONDS = 1.0
# From an error of a collective to the news of the lost worker that has caused it.
_NEWS_SECONDS = 1.0
_WRITE_SECONDS = 0.2
_INTERRUPTED_EXIT_CODE = 130  # as shells report it
_MAX_LINE_BYTES = 4096
_MAX_REASON_CHARACTERS = 500
_OF_A_COLLECTIVE = re.compile(r"gloo|nccl|collective|connection", re.IGNORECASE)


@final
@dataclass
class _Connection:
    """The way to one other worker, and what has come from there."""

    number: int
    socket: socket.socket
    received: bytes = b""
    silent_beats: int = 0
    num_programs: int = 0
    has_finished: bool = False


@final
class Liveness:
    """Watches the other workers of a job from a thread until all have finished.

    When one is lost, it writes a line to stderr and, a second later, ends this process with
    `WorkerLostError.exit_code`, unless the process has ended by itself.

    Args:
        place: The cluster and which of its workers this process is.
        connections: From the first worker to all others by their number, from the others to 0.
        heartbeat_timeout_seconds: Silence after which a worker counts as lost.
    """

    def __init__(
        self,
        place: MultiWorker,
        connections: Mapping[int, socket.socket],
        heartbeat_timeout_seconds: float,
    ) -> None:
        self._place = place
        self._max_silent_beats = max(2, round(heartbeat_timeout_seconds / _BEAT_SECONDS))
        self._heartbeat_timeout_seconds = heartbeat_timeout_seconds
        self._connections = [_Connection(number, s) for number, s in connections.items()]
        self._lock = threading.Lock()  # of sending
        self._has_finished = False  # this worker
        self._exit_code: int | None = None  # set when the job ends early
        self._is_decided = threading.Event()  # all have finished, or one is lost
        self._idle_beats = 0
        self._pid = os.getpid()
        for connection in self._connections:
            connection.socket.setblocking(False)
            connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def start(self) -> None:
        """Watches from now on, and at the end of the program."""
        # A child that outlives this process would keep the connections open.
        os.register_at_fork(after_in_child=self._close)
        job_programs.explain = self.explain
        atexit.register(self._at_exit)
        threading.Thread(target=self._run, name="distributary-liveness", daemon=True).start()

    def explain(self, error: Exception) -> Exception:
        """The error that names the lost worker, if one is behind an error of a collective."""
        if _OF_A_COLLECTIVE.search(str(error)):
            self._is_decided.wait(_NEWS_SECONDS)
        return job_programs.error or error

    # In the thread

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for connection in self._connections:
                selector.register(connection.socket, selectors.EVENT_READ, connection)
            beat_at = time.monotonic()
            while not self._is_decided.is_set():
                for key, _ in selector.select(max(0.0, beat_at - time.monotonic())):
                    self._hear(key.data)
                if time.monotonic() >= beat_at:
                    self._beat()
                    beat_at = time.monotonic() + _BEAT_SECONDS
        if self._exit_code is not None:
            time.sleep(_GRACE_SECONDS)
            # A reader of the output that has stopped reading must not keep the process. No thread
            # can be started when the main thread is at its end; it flushes by itself then.
            with contextlib.suppress(RuntimeError):
                flush = threading.Thread(target=_flush, daemon=True)
                flush.start()
                flush.join(_WRITE_SECONDS)
            os._exit(self._exit_code)

    def _hear(self, connection: _Connection) -> None:
        try:
            data = connection.socket.recv(_MAX_LINE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose(f"{self._name(connection)} was lost: its process has ended without a word")
            return
        connection.silent_beats = 0
        *lines, connection.received = (connection.received + data).split(b"\n")
        try:
            for line in lines:
                self._understand(connection, *json.loads(line))
            if len(connection.received) > _MAX_LINE_BYTES:
                raise ValueError
        except (TypeError, ValueError):
            self._lose(f"{self._name(connection)} was lost: it has sent {data[:100]!r}")

    def _understand(self, connection: _Connection, kind: str, content: Any) -> None:
        if kind == "lost":
            self._lose(content)
        elif kind == "over":
            self._is_decided.set()
        else:
            connection.num_programs = content
            connection.has_finished |= kind == "finished"
            self._end_if_all_have_finished()

    def _beat(self) -> None:
        # Silence is counted in beats: while this process is frozen itself, it counts nothing.
        for connection in self._connections:
            self._say(connection, "beat", job_programs.count)
            connection.silent_beats += 1
            if connection.silent_beats > self._max_silent_beats:
                self._lose(
                    f"{self._name(connection)} was lost: it has said nothing for"
                    f" {self._heartbeat_timeout_seconds:g} s, so it is frozen, or its machine or"
                    " the network does not work"
                )
        if self._place.worker_number == 0:
            self._look_for_early_end()

    def _look_for_early_end(self) -> None:
        """Notices a worker that has ended while another waits for it in a program of the job."""
        ended = {c.num_programs: self._name(c) for c in self._connections if c.has_finished}
        if self._has_finished:
            ended[job_programs.count] = str(self._place.workers[0])
        most = max(job_programs.count, *(c.num_programs for c in self._connections))
        if not ended or min(ended) == most:
            self._idle_beats = 0
            return
        self._idle_beats += 1
        if self._idle_beats > self._max_silent_beats:
            self._lose(
                f"{ended[min(ended)]} has ended after {min(ended)} programs of all workers, and"
                f" another one has begun program {most}, which needs all of them"
            )

    def _lose(self, reason: str) -> None:
        if self._is_decided.is_set():
            return
        self._say_to_all("lost", reason)
        # Before the rest, because what follows can end the process from the main thread.
        _say_on_stderr(f"{WorkerLostError.line_prefix}{reason}\n")
        self._exit_code = WorkerLostError.exit_code
        job_programs.error = WorkerLostError(
            f"{reason}. {self._place.name} cannot go on alone. `distributary launch"
            " --max-restarts 3` starts all workers again when one is lost; let the program"
            " continue from its last checkpoint."
        )
        self._is_decided.set()

    def _end_if_all_have_finished(self) -> None:
        is_first = self._place.worker_number == 0
        if is_first and self._has_finished and all(c.has_finished for c in self._connections):
            self._say_to_all("over", None)
            self._is_decided.set()

    # In the main thread, at its end

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return
        # Set when an exception ends the program; in an interactive session, when one is shown.
        error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
        if error is not None:
            if not isinstance(self.explain(error), WorkerLostError):
                self._leave(error)
            _end(WorkerLostError.exit_code)
        self._has_finished = True
        self._say_to_all("finished", job_programs.count)
        self._end_if_all_have_finished()
        try:
            self._is_decided.wait()
        except KeyboardInterrupt as interrupt:
            self._leave(interrupt)
        if self._exit_code is not None:
            _end(self._exit_code)

    def _leave(self, error: BaseException) -> NoReturn:
        """Ends this process because of an error of its own."""
        place = self._place
        assert place.worker_number is not None
        lines = traceback.format_exception_only(error)[-1].splitlines()
        text = lines[0][:_MAX_REASON_CHARACTERS]
        self._exit_code = _INTERRUPTED_EXIT_CODE if isinstance(error, KeyboardInterrupt) else 1
        self._is_decided.set()  # what the others answer is no news
        self._say_to_all("lost", f"{place.workers[place.worker_number]} has ended with {text}")
        # JAX would wait for the others, and for its programs, which wait for the others, too.
        _end(self._exit_code)

    def _say_to_all(self, kind: str, content: Any) -> None:
        for connection in self._connections:
            self._say(connection, kind, content)

    def _say(self, connection: _Connection, kind: str, content: Any) -> None:
        with self._lock, contextlib.suppress(OSError):  # whoever has gone is noticed by `_hear`
            connection.socket.sendall(json.dumps([kind, content]).encode() + b"\n")

    def _close(self) -> None:
        for connection in self._connections:
            connection.socket.close()

    def _name(self, connection: _Connection) -> str:
        return str(self._place.workers[connection.number])


def _end(code: int) -> NoReturn:
    """Ends the process without waiting for JAX, whose programs may never end."""
    _flush()
    os._exit(code)


def _say_on_stderr(text: str) -> None:
    """Writes a line, unless whoever reads it has stopped reading."""
    with contextlib.suppress(OSError):
        if select.select([], [2], [], _WRITE_SECONDS)[1]:
            os.write(2, text.encode()[: select.PIPE_BUF])


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    logging.shutdown()
