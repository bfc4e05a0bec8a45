"""Threads that end before Python does, and what is ended with an object."""

import atexit
import threading
import time
import weakref
from collections.abc import Callable

__all__ = ["call_when_collected", "start_thread"]

_EXIT_SECONDS = 5.0

_stops: dict[threading.Thread, Callable[[], object]] = {}  # of those that run


def start_thread(
    run: Callable[[], object], stop: Callable[[], object], name: str
) -> threading.Thread:
    """Starts a daemon thread that is ended when the program ends; for threads that use JAX.

    Left alone, a daemon thread is cut off while the interpreter shuts down, wherever it is; in
    JAX's C++ code that aborts the process ("FATAL: exception not rethrown").

    Args:
        run: What the thread does.
        stop: Makes `run` return soon. Called when the program ends, which waits some seconds. Both
            are kept as long as the thread runs.
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
    return thread


def call_when_collected(owner: object, function: Callable[[], object]) -> None:
    """Calls a function, which must not keep `owner`, when `owner` is collected; not at the end.

    In a thread, as whoever collects garbage may be one of those that the function ends.
    """
    thread = threading.Thread(target=function, name="distributary-close", daemon=True)
    weakref.finalize(owner, thread.start).atexit = False


@atexit.register
def _end_all() -> None:
    stops = list(_stops.items())
    for _, stop in stops:
        stop()
    end = time.monotonic() + _EXIT_SECONDS
    for thread, _ in stops:
        thread.join(max(0.0, end - time.monotonic()))
