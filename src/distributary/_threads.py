"""Threads that end before Python does, iterators that run in one, and values for a block.

The launcher, which does not import JAX, imports this.
"""

import atexit
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any, Final, TypeAlias, final

_EXIT_SECONDS = 5.0
# XLA:CPU runs every device of every dispatched program on one thread pool, and a device that waits
# in a collective holds its thread. With fewer than two threads per device, the devices of the next
# program can take the threads that the current one still needs: XLA then aborts the process with
# "Expected 8 threads to join the rendezvous". Measured on jax 0.10.2: pools of R + 1 threads
# deadlocked at R = 2, 4 and 8 devices, pools of 2R never did; larger ones only cost time.
_THREADS_PER_DEVICE = 2
# The value of PJRT_NPROC that `distributary launch` chose: this process's share of the cores.
SHARE_VARIABLE: Final = "DISTRIBUTARY_NPROC"

_stops: dict[threading.Thread, Callable[[], object]] = {}  # of the threads that still run
# Also those that have run and still free what they held: arrays are freed in JAX's C++ code, too.
_unfinished: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def start_thread(
    run: Callable[[], object], stop: Callable[[], object], name: str
) -> threading.Thread:
    """Starts a daemon thread that ends when the program ends; for threads that use JAX.

    Python cuts daemon threads off while the interpreter shuts down, wherever they are. If a thread
    is in JAX's C++ code at that moment, the process aborts ("FATAL: exception not rethrown").

    Args:
        run: Function that the thread runs.
        stop: Makes `run` return soon. Called when the program ends, which then waits a few seconds.
            Both functions are kept alive while the thread runs.
        name: Name of the thread.
    """

    def run_and_forget() -> None:
        try:
            run()
        finally:
            del _stops[thread]

    thread = threading.Thread(target=run_and_forget, name=name, daemon=True)
    _stops[thread] = stop
    thread.start()
    _unfinished.add(thread)
    return thread


@contextmanager
def bound(variable: ContextVar[Any], value: object) -> Iterator[None]:
    """Gives a context variable a value while the block runs."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def call_after(seconds: float, function: Callable[[], object]) -> Iterator[None]:
    """Calls a function, in a thread of its own, if the block takes longer than `seconds`."""
    timer = threading.Timer(seconds, function)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def call_when_collected(owner: object, function: Callable[[], object]) -> None:
    """Calls a function when `owner` is collected, but not when the program ends.

    The function must not hold a reference to `owner`. It runs in a thread of its own, because
    garbage may be collected in one of the threads that the function ends.
    """
    thread = threading.Thread(target=function, name="distributary-close", daemon=True)
    weakref.finalize(owner, thread.start).atexit = False


@atexit.register
def _end_all() -> None:
    for stop in list(_stops.values()):
        stop()
    end = time.monotonic() + _EXIT_SECONDS
    for thread in list(_unfinished):
        thread.join(max(0.0, end - time.monotonic()))


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # XLA counts them in the same way if it can
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_needed(num_devices: int) -> int:
    """Returns the number of threads below which that many CPU devices can deadlock."""
    # A single device waits for no other.
    return _THREADS_PER_DEVICE * num_devices if num_devices > 1 else 0


# Elements that a thread makes ahead of time.

# Interval at which a consumer that waits for an element checks if there is still a reason to wait.
_LOOK_SECONDS = 0.002
# To hand an element from thread to thread takes 0.05 ms, and more while both execute Python.
_SLOW_SECONDS = 0.0002
# Slow elements until there is a thread. The first ones, and some on a busy machine, are slow for
# other reasons, so each quick one makes up for a part of a slow one.
_PATIENCE = 8.0
_PATIENCE_REGAINED = 0.25

_Error: TypeAlias = BaseException | type[StopIteration]


def _kept(error: BaseException) -> _Error:
    # The class, as a kept exception would keep the frames that it has gone through.
    return StopIteration if isinstance(error, StopIteration) else error


class _Shared:
    """The state of thread and consumer, so that the thread need not refer to the consumer."""

    def __init__(self, source: Iterator[Any], depth: int) -> None:
        self.source = source
        # Elements, each with None; at the end None, with what the source raised.
        self.elements: queue.SimpleQueue[tuple[Any, _Error | None]] = queue.SimpleQueue()
        self.free = threading.Semaphore(depth)
        self.stopped = False

    def stop(self) -> None:
        self.stopped = True
        self.free.release()

    def make(self) -> None:
        """Makes elements until it is stopped; runs in the thread."""
        source = self.source
        while True:
            self.free.acquire()
            if self.stopped:
                break
            try:
                element = next(source)
            except BaseException as error:
                self.elements.put((None, _kept(error)))
                break
            self.elements.put((element, None))
            del element


@final
class Prefetched(Iterator[Any]):
    """An iterator that runs in a thread of its own, at most `depth` elements ahead.

    The thread starts with the first `next`. It ends with the source, after an exception, and when
    this object is closed or garbage collected.

    Args:
        source: The iterator to read ahead; it belongs to the thread from then on.
        depth: Number of elements, 1 or more, that are made or being made and not taken yet.
        only_if_slow: Makes elements in the thread that asks for them until some have taken longer
            than a thread is worth. For sources that may be read by one thread and then by another.
    """

    def __init__(self, source: Iterator[Any], depth: int, only_if_slow: bool = False) -> None:
        self._patience = _PATIENCE if only_if_slow else 0.0
        self._shared = _Shared(source, depth)
        self._thread: threading.Thread | None = None
        self._end: _Error | None = None
        self._close: Callable[[], Any] | None = None

    def __next__(self) -> Any:
        return self.next_or_wait(None)

    @property
    def has_started(self) -> bool:
        """True if the thread has begun to make elements."""
        return self._thread is not None

    def next_or_wait(self, waiting: Callable[[float], None] | None) -> Any:
        """Returns the next element.

        Args:
            waiting: Called every few milliseconds while waiting for the element, and once at the
                end, with the seconds since the last call.

        Raises:
            StopIteration: at the end, and after `close`.
            BaseException: the exception of the source, with its traceback.
        """
        if self._end is not None:
            raise self._end
        shared = self._shared
        if self._patience > 0:
            return self._make(waiting)
        if self._thread is None:
            self._start()
        try:
            element, error = shared.elements.get_nowait()
        except queue.Empty:
            element, error = shared.elements.get() if waiting is None else self._wait(waiting)
        if error is not None:  # what `close` has set stays otherwise
            self._end = error
            raise error
        shared.free.release()
        return element

    def _make(self, waiting: Callable[[float], None] | None) -> Any:
        begin = time.perf_counter()
        try:
            return next(self._shared.source)
        except BaseException as error:
            self._end = _kept(error)
            raise
        finally:
            seconds = time.perf_counter() - begin
            change = -1.0 if seconds > _SLOW_SECONDS else _PATIENCE_REGAINED
            self._patience = min(self._patience + change, _PATIENCE)
            if waiting is not None:
                waiting(seconds)

    def _wait(self, waiting: Callable[[float], None]) -> Any:
        last = time.perf_counter()
        while True:
            try:
                return self._shared.elements.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                pass
            finally:
                now = time.perf_counter()
                waiting(now - last)
                last = now

    def _start(self) -> None:
        context = copy_context()
        self._close = weakref.finalize(self, self._shared.stop)
        self._thread = start_thread(
            partial(context.run, self._shared.make), self._shared.stop, "distributary-prefetch"
        )

    def close(self) -> None:
        """Ends the thread once it has made the current element."""
        self._end = self._end or StopIteration
        if self._thread is not None and self._close is not None:
            self._close()
            self._thread.join()
