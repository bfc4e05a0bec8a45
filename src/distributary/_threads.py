"""Threads that end before Python does, how many there should be, and values for a block.

The launcher, which does not import JAX, imports this.
"""

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

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
