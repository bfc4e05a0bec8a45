"""Elements that a thread makes ahead of time."""

import contextvars
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, final

from distributary._threads import start_thread
from distributary.data._nodes import Node, Path, SameElements, Stream
from distributary.devices import Nest

# Interval at which a consumer that waits for an element checks if there is still a reason to wait.
_LOOK_SECONDS = 0.002
# To hand an element from thread to thread takes 0.05 ms, and more while both execute Python.
_SLOW_SECONDS = 0.0002
# Slow elements until there is a thread. The first ones, and some on a busy machine, are slow for
# other reasons, so each quick one makes up for a part of a slow one.
_PATIENCE = 8.0
_PATIENCE_REGAINED = 0.25


@final
@dataclass(frozen=True, eq=False)
class Prefetch(SameElements):
    """Elements that a thread makes ahead of time."""

    input: Node
    depth: int
    pattern = "prefetch"

    def elements(self, path: Path) -> Stream:
        return Prefetched(self.input.stream(path), self.depth)


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
class Prefetched(Stream):
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

    def __next__(self) -> Nest:
        return self.next_or_wait(None)

    def advance(self, count: int) -> int:
        # Until the thread has started, skipped elements need not be made.
        source = self._shared.source
        if self._thread is None and isinstance(source, Stream):
            return source.advance(count)
        return super().advance(count)

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
        context = contextvars.copy_context()
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
