"""Activity: does the script of this process make progress, or wait for something that never comes?

In doubt it makes progress, because the answer "nothing moves" ends a job. A beat looks at the
thread of the script. It also looks at the other threads and at the children of the process, as far
as they could wake that thread.

    it compiles, computes in a library, or has come to a place with values not seen before    moves
    it waits for what ends by itself: a time, a disk, another machine, a library's threads    moves
    it waits for a lock, a child, a signal, a terminal, or a pipe that only they write        waits
    it comes back to the same places with the same values, with or without sleep              waits

Nothing moves when the thread of the script waits and so do all the others.
"""

import linecache
import logging
import os
import re
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import final

from distributary.job import _waits as waits
from distributary.job._places import Places, call_at, is_between_calls, is_waiting, stack_of
from distributary.job._waits import Kind, Wait

_logger = logging.getLogger(__name__)

# Number of looks in a beat, which ends earlier if it sees something move.
_NUM_LOOKS = 10
_LOOK_SECONDS = 0.002
# Share of a processor. Idle threads of gRPC and of profilers take less, a pool that computes takes
# more.
_BUSY_SHARE = 0.1
_BUSY_BYTES = 1 << 16  # read or written by a thread in a beat
_MAX_PLACES = 100_000

_COMPILERS = re.compile(r"[/\\]jax[/\\]_src[/\\](compiler|interpreters[/\\]mlir)\.py$")
# Code that reads a program's data. It may compute in an iterator in C, whose progress shows
# nowhere, and files that it looks for may come from another machine.
_READERS = re.compile(
    r"[/\\](distributary[/\\](inputs|datasets)|keras[/\\]src[/\\]trainers[/\\]data_adapters)[/\\]"
)
_FILE_FUNCTIONS = frozenset(
    {"exists", "getsize", "glob", "is_dir", "is_file", "isdir", "isfile", "iterdir", "listdir"}
    | {"open", "rglob", "scandir", "stat"}
)
# C functions, of locks and of `SimpleQueue`, that wait for a thread of Python.
_LOCKS = frozenset({"__enter__", "acquire", "get", "with"})
_SLEEPS = frozenset({"poll", "select", "sleep"})
_SAME_END_SECONDS = 0.005  # between the ends of a wait that a signal has interrupted
_OWN_FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_LIBRARIES = (
    _OWN_FOLDER,
    "<frozen ",
    *(
        os.path.join(sysconfig.get_path(name), "")
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
    ),
)


@final
@dataclass
class _Thread:
    """Observations of one thread since others began to wait for this process."""

    cpu_seconds: float | None = None  # at the last beat
    share: float = 0.0  # of a processor, in the last beat
    may_compute: bool = False  # at the latest look
    computing_at: list[int] = field(default_factory=list)  # places in this beat, in calls
    latest: tuple[int, Wait, float | None] = 0, Wait(Kind.NONE), None  # number, wait, time used
    num_bytes: int = 0
    seen: set[int] = field(default_factory=set)  # places
    ends: dict[Hashable, float] = field(default_factory=dict)  # end of the first wait at a place
    repeated: set[Hashable] = field(default_factory=set)  # places where a wait ended in vain

    def may_be_elsewhere(self) -> bool:
        """Returns whether the thread may have run since the latest look."""
        tid, wait, cpu_seconds = self.latest
        return wait.kind is Kind.NONE or waits.cpu_seconds_of_thread(tid) != cpu_seconds


@final
class Activity:
    """A judge of whether the thread that runs the script makes progress.

    One thread calls `beat`; any thread may call `where`.

    Args:
        thread_id: `threading.get_ident()` of the thread; the main thread if None.
        ignored: Returns ids of threads (`ident` or `native_id`) and of child processes that serve
            this library: they never wake the script.
    """

    def __init__(
        self,
        thread_id: int | None = None,
        ignored: Callable[[], Collection[int]] = frozenset,
    ) -> None:
        self._thread_id = threading.main_thread().ident if thread_id is None else thread_id
        self._ignored = ignored
        self._can_look = waits.can_look()
        self._still_beats = 0
        self._forget()

    def beat(self, closely: bool = True) -> int:
        """Looks once, and returns the number of beats in a row in which nothing has moved.

        Args:
            closely: Whether others wait for this process. If not, it looks at nothing, forgets its
                observations, and returns 0.
        """
        if not closely:
            if self._beat_at is not None:
                self._forget()
            return 0
        try:
            moves = self._moves()
        except Exception as error:
            # Threads, files and children come and go. If a look fails, the script is not blamed.
            _logger.debug("Activity: a look has failed: %r", error)
            moves = True
        self._still_beats = 0 if moves else self._still_beats + 1
        return self._still_beats

    def where(self, max_frames: int = 8) -> list[str]:
        """Returns the stack of the script's thread, and the places of other threads of the script.

        There is a line per frame, the innermost last: `train.py:40 in load: batch = queue.get()`.
        If there are frames of the script, frames of libraries are left out, except the innermost
        one if it is not ours.
        """
        frames = sys._current_frames()
        stack = list(stack_of(frames.pop(self._thread_id or 0, None)))
        own = [frame for frame in stack[1:] if _is_of_script(frame.f_code)]
        innermost = [] if own and _is_of_this_library(stack[0].f_code) else stack[:1]
        shown = [*innermost, *(own or stack[1:])][:max_frames]
        lines = [_line_of(frame) for frame in reversed(shown)]
        ignored = {threading.get_ident(), *self._ignored()}
        for ident, frame in frames.items():
            script = next((f for f in stack_of(frame) if _is_of_script(f.f_code)), None)
            if script is not None and ident not in ignored and _tid_of(ident) not in ignored:
                thread = _threads().get(ident)
                name = ident if thread is None else thread.name
                lines.append(f"thread {name}: {_line_of(script)}")
        return lines

    def _forget(self) -> None:
        self._still_beats = 0
        self._beat_at: float | None = None
        self._threads: dict[int, _Thread] = {}  # by ident
        self._natives: dict[int, float] = {}  # processor time of threads that are not Python's
        self._children: dict[int, float] = {}
        self._child_ends: dict[tuple[int, int], float] = {}
        self._repeated_in_children: set[tuple[int, int]] = set()
        self._places = Places()

    def _moves(self) -> bool:
        ignored = {threading.get_ident(), threading.get_native_id(), *self._ignored()}
        now = time.monotonic()
        seconds = None if self._beat_at is None else now - self._beat_at
        self._beat_at = now
        if not self._can_look:
            return self._frames_move(ignored)
        tree = [os.getpid(), *waits.children_of(os.getpid(), ignored)]
        # Call all of them, because each remembers what it sees.
        python_moves, needs_children = self._python_moves(ignored, tree, seconds)
        natives_move = self._natives_move(ignored, seconds)
        children_move = self._children_move(tree, seconds)
        return python_moves or natives_move or (needs_children and children_move) or _is_alarm_set()

    # Threads of Python

    def _python_moves(
        self, ignored: Collection[int], tree: Collection[int], seconds: float | None
    ) -> tuple[bool, bool]:
        """Returns whether a thread of Python moves, and whether a child could wake one."""
        self._find_threads(ignored)
        if self._thread_id not in self._threads:  # it is at an interactive prompt, or has ended
            return True, False
        for ident, thread in self._threads.items():
            before = thread.cpu_seconds
            thread.cpu_seconds = waits.cpu_seconds_of_thread(_tid_of(ident))
            thread.share = _share(before, thread.cpu_seconds, seconds)
        moves = needs_children = False
        for number in range(_NUM_LOOKS):
            # After a sleep this thread has just taken the lock of Python, and hands it on after
            # 5 ms at the earliest. So the frames, values and waits that it sees belong together.
            time.sleep(_LOOK_SECONDS)
            for ident, thread in self._threads.items():
                # A thread that has not run since the latest look is still at the same place.
                if number == 0 or (
                    (ident == self._thread_id or thread.may_compute) and thread.may_be_elsewhere()
                ):
                    does_move, needs = self._thread_moves(ident, thread, tree)
                    moves |= does_move
                    needs_children |= needs
            if moves:
                break
        # On a machine that is too busy, a library may have computed without being seen.
        for thread in self._threads.values():
            computing_at = thread.computing_at
            moves |= len(computing_at) == _NUM_LOOKS and len(set(computing_at)) == 1
            computing_at.clear()
        return moves, needs_children

    def _find_threads(self, ignored: Collection[int]) -> None:
        self._threads = {
            ident: self._threads.get(ident) or _Thread()
            for ident in sys._current_frames()
            if ident == self._thread_id or not {ident, _tid_of(ident)} & set(ignored)
        }

    def _thread_moves(
        self, ident: int, thread: _Thread, tree: Collection[int]
    ) -> tuple[bool, bool]:
        """Returns whether a thread moves, and whether a child could wake it."""
        frame = sys._current_frames().get(ident)
        if frame is None:  # it has just ended
            return True, False
        tid = _tid_of(ident)
        wait = waits.wait_of(os.getpid(), tid) if tid else Wait(Kind.UNKNOWN)
        thread.latest = tid, wait, waits.cpu_seconds_of_thread(tid)
        thread.may_compute = wait.kind is Kind.NONE or thread.share > _BUSY_SHARE
        place = self._places.of(frame)
        is_new = place not in thread.seen
        if len(thread.seen) > _MAX_PLACES:
            thread.seen.clear()
        thread.seen.add(place)
        has_repeated = self._has_repeated(thread, place, wait, tid)
        if is_new or wait.kind is Kind.UNKNOWN or _moves_bytes(thread, tid) or _compiles(frame):
            return True, False
        reader = _reader_of_data(frame)
        if reader and (thread.share > _BUSY_SHARE or (has_repeated and _looks_for_files(reader))):
            return True, False
        if wait.kind is Kind.NONE:
            if is_between_calls(frame):
                return False, True
            thread.computing_at.append(place)
            return waits.computes_without_python(tid), True
        if not _is_wait_of_python(frame, wait) or (wait.end is not None and not has_repeated):
            return True, False
        is_input = call_at(frame) == "input" and wait.files == ((0, False),)
        is_script = ident == self._thread_id
        if not is_input and waits.is_from_elsewhere(wait, os.getpid(), tree, servers=is_script):
            return True, False
        is_private_lock = wait.kind is Kind.LOCK and wait.end is None and wait.is_private
        return False, not is_private_lock

    def _has_repeated(self, thread: _Thread, place: int, wait: Wait, tid: int) -> bool:
        """Returns whether a wait at this place has ended before without a change."""
        if wait.end is not None:
            # Without a deadline, a thread that has run since then must have waited before.
            end = wait.end / 1e9 or waits.cpu_seconds_of_thread(tid) or 0.0
            tolerance = _SAME_END_SECONDS if wait.end else 0.0
            if abs(end - thread.ends.setdefault((place, bool(wait.end)), end)) > tolerance:
                thread.repeated.add(place)
        return place in thread.repeated

    def _frames_move(self, ignored: Collection[int]) -> bool:
        """Returns whether a thread moves, judged by frames alone.

        Every call may end by itself, except for endless waits in `threading`.
        """
        self._find_threads(ignored)
        moves = self._thread_id not in self._threads
        for _ in range(_NUM_LOOKS):
            time.sleep(_LOOK_SECONDS)
            frames = sys._current_frames()
            for ident, thread in self._threads.items():
                frame = frames.get(ident)
                if frame is None:
                    return True
                place = self._places.of(frame)
                is_still = is_between_calls(frame) or _waits_without_end(frame)
                moves |= not is_still or place not in thread.seen
                thread.seen.add(place)
        return moves

    # Other threads and processes

    def _natives_move(self, ignored: Collection[int], seconds: float | None) -> bool:
        """Returns whether threads of libraries compute."""
        of_python = {_tid_of(ident) for ident in self._threads}
        natives = {}
        for tid in waits.tasks_of(os.getpid()):
            cpu_seconds = waits.cpu_seconds_of_thread(tid)
            if tid not in of_python and tid not in ignored and cpu_seconds is not None:
                natives[tid] = cpu_seconds
        before, self._natives = self._natives, natives
        return any(
            _share(before.get(tid, 0.0), cpu, seconds) > _BUSY_SHARE for tid, cpu in natives.items()
        )

    def _children_move(self, tree: Collection[int], seconds: float | None) -> bool:
        before, self._children = self._children, {}
        moves = False
        for pid in tree:
            cpu_seconds = waits.cpu_seconds_of_process(pid)
            if pid == os.getpid() or cpu_seconds is None:
                continue
            self._children[pid] = cpu_seconds
            if waits.is_stopped(pid):
                continue
            moves |= (
                _share(before.get(pid), cpu_seconds, seconds) > _BUSY_SHARE or pid not in before
            )
            for tid in waits.tasks_of(pid):
                moves |= self._thread_of_child_moves(pid, tid, cpu_seconds, tree)
        return moves

    def _thread_of_child_moves(
        self, pid: int, tid: int, cpu_seconds: float, tree: Collection[int]
    ) -> bool:
        """Returns whether a thread of a child moves.

        Its frames cannot be seen, so it may sleep as often as it wants.
        """
        wait = waits.wait_of(pid, tid)
        if wait.kind in (Kind.NONE, Kind.UNKNOWN, Kind.SLEEP):
            return True
        if wait.end is not None:
            end = wait.end or cpu_seconds
            if end != self._child_ends.setdefault((pid, tid), end):
                self._repeated_in_children.add((pid, tid))
            if (pid, tid) not in self._repeated_in_children:
                return True
        return waits.is_from_elsewhere(wait, pid, tree, servers=False)


def _share(before: float | None, after: float | None, seconds: float | None) -> float:
    """Returns the share of the time since the last beat that was spent on a processor."""
    if before is None or after is None or not seconds:
        return 0.0
    return (after - before) / seconds


def _is_alarm_set() -> bool:
    delay, interval = signal.getitimer(signal.ITIMER_REAL)
    return delay > 0 and not interval  # profilers repeat


def _is_wait_of_python(frame: FrameType, wait: Wait) -> bool:
    """Returns whether Python itself waits.

    Libraries wait for threads of their own.
    """
    if wait.kind not in (Kind.LOCK, Kind.SLEEP) or is_waiting(frame):
        return True
    name = call_at(frame)
    if wait.kind is Kind.SLEEP:
        return name in _SLEEPS or frame.f_globals.get(name) is time.sleep
    # A thread that waits for the lock of Python requests it repeatedly.
    is_for_python = wait.end and wait.end / 1e9 - time.monotonic() <= sys.getswitchinterval()
    return name in _LOCKS or bool(is_for_python)


def _moves_bytes(thread: _Thread, tid: int) -> bool:
    before, thread.num_bytes = thread.num_bytes, waits.num_bytes_moved(tid)
    return before > 0 and thread.num_bytes - before > _BUSY_BYTES


def _compiles(frame: FrameType) -> bool:
    return any(_COMPILERS.search(f.f_code.co_filename) for f in stack_of(frame))


def _reader_of_data(frame: FrameType) -> list[FrameType]:
    """Returns the frames of a program that this library or Keras has called for data, if any."""
    inner: list[FrameType] = []
    for each in stack_of(frame):
        inner.append(each)
        if _READERS.search(each.f_code.co_filename):
            return inner
    return []


def _looks_for_files(frames: list[FrameType]) -> bool:
    return any(not _FILE_FUNCTIONS.isdisjoint(frame.f_code.co_names) for frame in frames)


def _waits_without_end(frame: FrameType) -> bool:
    if frame.f_code.co_filename != threading.__file__:
        return False
    return frame.f_locals.get("timeout", 0) in (None, -1)


def _threads() -> dict[int, threading.Thread]:
    # `threading.enumerate` waits for a lock, which the script may hold forever.
    return threading._active  # type: ignore[attr-defined]


def _tid_of(ident: int) -> int:
    """Returns the number that the system has given to a thread; 0 if Python does not know it."""
    if ident == threading.main_thread().ident:
        return os.getpid()  # the same on Linux, and `native_id` is the parent's after a fork
    return getattr(_threads().get(ident), "native_id", None) or 0


def _is_of_script(code: CodeType) -> bool:
    return not code.co_filename.startswith(_LIBRARIES)


def _is_of_this_library(code: CodeType) -> bool:
    return code.co_filename.startswith(_OWN_FOLDER)


def _line_of(frame: FrameType) -> str:
    code = frame.f_code
    text = linecache.getline(code.co_filename, frame.f_lineno).strip()
    place = f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_qualname}"
    return f"{place}: {text}" if text else place
