"""Liveness: the workers of a job watch each other, and end with a message when they cannot go on.

Every worker keeps the connection to worker 0 on which they met. Each end says something once a
second. A connection that closes shows immediately that a process has ended. Silence shows that it
is frozen or its machine is gone. Worker 0 tells the others. A process that ends by an exception
says so first. When workers wait for another one, worker 0 writes where that one is. Whether it
hangs or is slow, only the user knows, who can set a timeout that ends the job.

Messages, as of `Channel`:

    both ways   beat       progress of the sender, see `_Report`
                lost       which worker is lost, and how: the job ends
                differ     how the workers differ: the job ends
    to first    finished   as beat; the sender waits for the others
    from first  over       all have finished

Source: the health checks of `tf.distribute.MultiWorkerMirroredStrategy`, which are RPCs.
"""

import atexit
import contextlib
import itertools
import linecache
import logging
import os
import re
import select
import selectors
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, final

from distributary.cluster_resolver import MultiWorker
from distributary.devices import job_programs
from distributary.errors import WorkerLostError, WorkerMismatchError
from distributary.job._channel import Channel, ChannelClosedError, NotAMessageError
from distributary.job._consensus import consensus
from distributary.options import CommunicationOptions

# The stack of the script, as others are told when they wait for this process.

_MAX_FRAMES = 8
_OWN_FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_LIBRARIES = (
    _OWN_FOLDER,
    "<frozen ",
    *(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib", "purelib")),
)


def stack_of_script() -> list[str]:
    """Returns the stack of the main thread.

    There is a line per frame, the innermost last: `train.py:40 in load: batch = queue.get()`. If
    there are frames of the script, frames of libraries are left out.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = [(frame.f_code, line) for frame, line in traceback.walk_stack(frame)]
    of_script = [one for one in stack if not one[0].co_filename.startswith(_LIBRARIES)]
    # Not `traceback.extract_stack`, which looks at every file again: a disk that hangs must not
    # silence this process, which is called once a second.
    return [
        f"{os.path.basename(code.co_filename)}:{line} in {code.co_name}:"
        f" {linecache.getline(code.co_filename, line).strip()}"
        for code, line in reversed((of_script or stack)[:_MAX_FRAMES])
    ]


# Liveness

_BEAT_SECONDS = 1.0
# From the news of a lost worker to the end of this process, which may still clean up.
_GRACE_SECONDS = 1.0
# From an error of a collective to the news of the lost worker that caused it. Worker 0 hears that a
# worker has finished with the next heartbeats.
_NEWS_SECONDS = 3.0
_MAX_OLD_BEATS = 2  # after as many, where a worker was last is not where it is
_WRITE_SECONDS = 0.2
_INTERRUPTED_EXIT_CODE = 130  # as shells report it
_MAX_REASON_CHARACTERS = 500
_OF_A_COLLECTIVE = re.compile(r"gloo|nccl|collective|connection", re.IGNORECASE)


class _Report(NamedTuple):
    """The progress of a worker.

    Attributes:
        num_meetings: Number of events at which it has met the others, or waits for them.
        position: Number of events that it has begun.
        is_waiting: Whether it waits for the others on the host.
        place: What it does, and the stack of its script; empty before its first report.
    """

    num_meetings: int = 0
    position: int = 0
    is_waiting: bool = False
    place: Sequence[str] = ()


@final
@dataclass(eq=False)
class _Worker:
    """The facts about a worker: another one, or this one."""

    name: str
    report: _Report = field(default_factory=_Report)
    silent_beats: int = 0
    has_finished: bool = False


@final
class Liveness:
    """A thread that watches the other workers of a job until all have finished.

    When one is lost, it writes a line to stderr. A second later it ends this process with
    `WorkerLostError.exit_code`, unless the process has ended by itself.

    Args:
        place: The cluster, and which of its workers this process is.
        channels: On worker 0, a channel to each other worker, by number; on the others, one to 0.
        options: The timeouts of silent workers, and of those for which others wait.
    """

    def __init__(
        self, place: MultiWorker, channels: Mapping[int, Channel], options: CommunicationOptions
    ) -> None:
        assert place.worker_number is not None
        self._name = place.name
        self._number = place.worker_number
        self._heartbeat_timeout_seconds = options.heartbeat_timeout_seconds
        self._max_silent_beats = max(2, round(self._heartbeat_timeout_seconds / _BEAT_SECONDS))
        self._workers = [_Worker(str(peer)) for peer in place.workers]
        self._this_worker = self._workers[self._number]
        self._channels = {self._workers[number]: channel for number, channel in channels.items()}
        self._timeout_seconds = options.timeout_seconds
        self._lock = threading.Lock()  # for sending
        self._exit_code: int | None = None  # set when the job ends early
        self._is_decided = threading.Event()  # all have finished, or one is lost
        # Number of beats for which workers have waited for others, the position, the next report.
        self._stuck_beats, self._stuck_at, self._report_at = 0, 0, 0
        self._pid = os.getpid()

    def start(self) -> None:
        """Starts to watch, now and at the end of the program."""
        # A child that outlives this process would keep the connections open.
        os.register_at_fork(after_in_child=self._close)
        job_programs.explain = self.explain
        atexit.register(self._at_exit)
        threading.Thread(target=self._run, name="distributary-liveness", daemon=True).start()

    def explain(self, error: Exception) -> Exception:
        """Returns the error that names the lost worker, if a lost worker has caused `error`."""
        if _OF_A_COLLECTIVE.search(str(error)):
            self._is_decided.wait(_NEWS_SECONDS)
        return job_programs.error or error

    # In the thread

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for worker, channel in self._channels.items():
                selector.register(channel, selectors.EVENT_READ, worker)
            beat_at = time.monotonic()
            while not self._is_decided.is_set():
                for key, _ in selector.select(max(0.0, beat_at - time.monotonic())):
                    self._receive(key.data)
                if time.monotonic() >= beat_at:
                    self._beat()
                    beat_at = time.monotonic() + _BEAT_SECONDS
        if self._exit_code is not None:
            time.sleep(_GRACE_SECONDS)
            # In a thread, because a reader of the output that has stopped reading must not keep the
            # process alive. When the main thread is at its end, no thread can be started, but then
            # the main thread flushes.
            with contextlib.suppress(RuntimeError):
                flush = threading.Thread(target=_flush, daemon=True)
                flush.start()
                flush.join(_WRITE_SECONDS)
            os._exit(self._exit_code)

    def _receive(self, worker: _Worker) -> None:
        try:
            for kind, content, _ in self._channels[worker].arrived():
                worker.silent_beats = 0
                self._handle(worker, kind, content)
        except NotAMessageError as error:
            self._lose(f"{worker.name} was lost: {error}")
        except ChannelClosedError:
            self._lose(f"{worker.name} was lost: its process has ended without a word")

    def _handle(self, worker: _Worker, kind: str, content: Any) -> None:
        if kind in ("lost", "differ"):
            self._lose(content, kind)
        elif kind == "over":
            self._is_decided.set()
        else:
            worker.report = _Report(*content)
            worker.has_finished |= kind == "finished"
            self._end_if_all_have_finished()

    def _beat(self) -> None:
        self._this_worker.report = self._own_report()
        # Silence is counted in beats, because a process that is frozen itself then counts nothing.
        for worker in self._channels:
            self._send(worker, "beat", self._this_worker.report)
            worker.silent_beats += 1
            if worker.silent_beats > self._max_silent_beats:
                self._lose(
                    f"{worker.name} was lost: it has said nothing for"
                    f" {self._heartbeat_timeout_seconds:g} s, so it is frozen, or its machine or"
                    " the network does not work"
                )
        if self._number == 0:
            self._look_for_trouble()

    def _own_report(self) -> _Report:
        agreement = consensus()
        waiting_at = None if agreement is None else agreement.waiting_at
        # Read the position first: at a meeting a worker counts the meeting before its position.
        position = job_programs.position
        num_meetings = job_programs.num_meetings
        name, values = job_programs.latest
        arguments = f" with {', '.join(map(str, values))}" if values else ""
        if waiting_at is None:
            doing = f"last began {name}{arguments}"
        else:
            doing = f"waits for all before {waiting_at}{arguments if waiting_at == name else ''}"
        place = [doing, *stack_of_script()]
        return _Report(num_meetings, position, waiting_at is not None, place)

    # On worker 0, which hears from all

    def _look_for_trouble(self) -> None:
        """Notices workers that wait for each other and will not meet."""
        passed_by = self._passed_by()
        if passed_by is not None:
            self._lose(_with_positions(passed_by, self._workers), "differ")
            return
        positions = [worker.report.position for worker in self._workers]
        awaited = [
            worker
            for worker in self._workers
            if worker.report.position == min(positions) and not worker.report.is_waiting
        ]
        if len(awaited) == len(self._workers):
            self._stuck_beats = 0
            return
        ended = [worker for worker in awaited if worker.has_finished]
        # At the same position it may have told the others what they wait for, and they are slow. If
        # not, they find their connection to it closed.
        if ended and max(positions) > min(positions):
            reason = (
                f"{ended[0].name} has ended after {min(positions)} programs of all workers, and"
                f" another one has begun program {max(positions)}. Let every worker make the same"
                " calls, as often, and not only `if strategy.is_chief:`, because it needs all of"
                " them"
            )
            others = [one for one in self._workers if one.report.position == max(positions)]
            self._lose(_with_positions(reason, others[:1]))
            return
        if min(positions) != self._stuck_at or not self._stuck_beats:
            self._stuck_at, self._stuck_beats = min(positions), 0
            self._report_at = self._max_silent_beats
        self._stuck_beats += 1
        # Of those that all wait, each may wait for something else, such as a file of worker 0.
        names = " and ".join(worker.name for worker in awaited)
        who_waits = "workers have waited for"
        if names:
            who_waits = f"other workers have waited for {names} for"
        seconds = self._stuck_beats * _BEAT_SECONDS
        if self._timeout_seconds and seconds > self._timeout_seconds:
            reason = (
                f"the {who_waits} {self._timeout_seconds:g} s, the timeout_seconds of"
                " CommunicationOptions"
            )
            self._lose(_with_positions(reason, self._workers))
        elif self._stuck_beats >= self._report_at:
            self._report_at *= 2
            reason = f"The {who_waits} {seconds:g} s"
            # Not by a logger, whose lock the script may hold.
            _write_to_stderr(f"{_with_positions(reason, awaited or self._workers)}\n")

    def _passed_by(self) -> str | None:
        """Returns how a worker has gone on where another waits for all; None if none has."""
        for waiting, other in itertools.product(self._workers, repeat=2):
            ours, theirs = waiting.report, other.report
            has_passed = theirs.position >= ours.position
            if ours.is_waiting and has_passed and theirs.num_meetings < ours.num_meetings:
                return (
                    f"the workers do different things: {waiting.name} waits for all of them,"
                    f" and {other.name} has gone on without"
                )
        return None

    # When the job cannot go on

    def _lose(self, reason: str, kind: str = "lost") -> None:
        if self._is_decided.is_set():
            return
        self._send_to_all(kind, reason)
        self._exit_code = WorkerLostError.exit_code
        agreement = consensus()
        if agreement is not None and agreement.latest_mismatch is not None:
            self._is_decided.set()  # the script has got the same error on all workers
            return
        # First, because the following lines can make the main thread end the process.
        _write_to_stderr(f"{WorkerLostError.line_prefix}{reason}\n")
        if kind == "differ":
            job_programs.error = WorkerMismatchError(
                f"{reason}. Let all workers call the same methods of the strategy, in the same"
                " order."
            )
        else:
            job_programs.error = WorkerLostError(
                f"{reason}. {self._name} cannot go on alone. `distributary launch --max-restarts 3`"
                " starts all workers again when one is lost; let the program continue from its"
                " last checkpoint."
            )
        self._is_decided.set()
        if agreement is not None:
            agreement.shut()  # a script that waits for the others gets the error

    def _end_if_all_have_finished(self) -> None:
        if self._number == 0 and all(worker.has_finished for worker in self._workers):
            self._send_to_all("over", None)
            self._is_decided.set()

    # In the main thread, at its end

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return
        # `last_value` is set when an exception ends the program. An interactive session sets it
        # whenever it shows an exception.
        error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
        if error is not None:
            is_own = isinstance(error, WorkerMismatchError)
            if is_own or not isinstance(
                self.explain(error), (WorkerLostError, WorkerMismatchError)
            ):
                self._leave(error)
            _end(WorkerLostError.exit_code)
        self._this_worker.has_finished = True
        self._this_worker.report = self._own_report()
        self._send_to_all("finished", self._this_worker.report)
        self._end_if_all_have_finished()
        try:
            self._is_decided.wait()
        except KeyboardInterrupt as interrupt:
            self._leave(interrupt)
        if self._exit_code is not None:
            _end(self._exit_code)

    def _leave(self, error: BaseException) -> NoReturn:
        """Ends this process because of an error of its own."""
        lines = traceback.format_exception_only(error)[-1].splitlines()
        text = lines[0][:_MAX_REASON_CHARACTERS]
        self._exit_code = _INTERRUPTED_EXIT_CODE if isinstance(error, KeyboardInterrupt) else 1
        self._is_decided.set()  # the others' answers are no news
        self._send_to_all("lost", f"{self._this_worker.name} has ended with {text}")
        # JAX would wait for the others, and for its programs, which also wait for the others.
        _end(self._exit_code)

    def _send_to_all(self, kind: str, content: object) -> None:
        for worker in self._channels:
            self._send(worker, kind, content)

    def _send(self, worker: _Worker, kind: str, content: object) -> None:
        # `_receive` notices workers that are gone.
        with self._lock, contextlib.suppress(ChannelClosedError):
            self._channels[worker].send(kind, content)

    def _close(self) -> None:
        for channel in self._channels.values():
            channel.close()


def _with_positions(reason: str, workers: Sequence[_Worker]) -> str:
    """Returns a reason, and where workers are, in their own words."""
    return f"{reason}. {'; '.join(map(_position_of, workers))}"


def _position_of(worker: _Worker) -> str:
    if worker.has_finished:
        return f"{worker.name} has ended"
    if worker.silent_beats > _MAX_OLD_BEATS or not worker.report.place:
        return f"{worker.name} does not answer"
    doing, *frames = worker.report.place
    return f"{worker.name} {doing} ({' > '.join(frames)})"


def _end(code: int) -> NoReturn:
    """Ends the process without waiting for JAX, whose programs may never end."""
    _flush()
    os._exit(code)


def _write_to_stderr(text: str) -> None:
    """Writes a line, unless the reader of stderr has stopped reading."""
    with contextlib.suppress(OSError):
        if select.select([], [2], [], _WRITE_SECONDS)[1]:
            os.write(2, text.encode()[: select.PIPE_BUF])


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    logging.shutdown()
