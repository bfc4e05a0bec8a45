"""The closures that wait for a worker."""

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any, final

from distributary.coordinator._values import RemoteValue
from distributary.errors import CancelledError

__all__ = ["Closure", "ClosureQueue"]

_MAX_QUEUED = 262_144  # as in TensorFlow


@final
@dataclass(slots=True, eq=False)
class Closure:
    """One call of a function by some worker.

    Attributes:
        number: Counts the closures of a coordinator; servers apply what each pushes once.
        function: What is called.
        args: Its arguments, flat.
        fed: Arrays that the coordinator has taken from its datasets for it; or why it could not.
        result: Receives what it returns.
    """

    number: int
    function: Any
    args: list[Any]
    fed: list[Any] | Exception | None = None
    result: RemoteValue = field(default_factory=RemoteValue)


@final
class ClosureQueue:
    """Closures in the order in which they were scheduled, and the first error among them.

    After an error nothing that is queued runs any more. The error is raised once, by whoever comes
    next and when nothing is running; then everything is as at the beginning.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queued: deque[Closure] = deque()
        self._running: set[Closure] = set()
        self._error: BaseException | None = None
        self._next_number = 0
        self._is_closed = False

    def put(self, function: Any, args: list[Any]) -> RemoteValue:
        """Queues a closure; waits while too many are queued; raises an earlier error."""
        with self._changed:
            self._raise_error()
            self._changed.wait_for(lambda: len(self._queued) < _MAX_QUEUED)
            closure = Closure(self._next_number, function, args)
            self._next_number += 1
            self._queued.append(closure)
            self._changed.notify_all()
        return closure.result

    def take(self, max_closures: int) -> list[Closure]:
        """Some closures for a worker, at least one; none when the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queued or self._is_closed)
            if self._is_closed:
                return []
            taken = [self._queued.popleft() for _ in range(min(max_closures, len(self._queued)))]
            self._running.update(taken)
            self._changed.notify_all()
        return taken

    def succeed(self, closure: Closure, value: Any) -> None:
        """A closure has returned `value`."""
        closure.result._set(value)
        self._end(closure)

    def fail(self, closure: Closure, error: BaseException) -> None:
        """A closure has raised."""
        closure.result._fail(error)
        with self._changed:
            if self._error is None:
                self._error = error
                self._cancel(error)
        self._end(closure)

    def put_back(self, closures: list[Closure]) -> None:
        """The worker of running closures was lost: another one has to run them."""
        with self._changed:
            self._running.difference_update(closures)
            if self._error is None:
                self._queued.extendleft(reversed(closures))
            else:
                self._cancel_all(closures, self._error)
            self._changed.notify_all()

    def join(self) -> None:
        """Waits until all closures have ended; raises the first error."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._error is not None or not (self._queued or self._running)
            )
            self._raise_error()

    def is_done(self) -> bool:
        """Whether all closures have ended; raises the first error."""
        with self._changed:
            self._raise_error()
            return not (self._queued or self._running)

    def num_finished(self) -> int:
        """All closures with a smaller number have ended."""
        with self._changed:
            unfinished = [closure.number for closure in (*self._running, *self._queued)]
            return min(unfinished, default=self._next_number)

    def close(self) -> None:
        """Lets `take` return at once, and cancels what is queued."""
        with self._changed:
            self._is_closed = True
            self._cancel(None)
            self._changed.notify_all()

    def _end(self, closure: Closure) -> None:
        with self._changed:
            self._running.discard(closure)
            self._changed.notify_all()

    def _cancel(self, cause: BaseException | None) -> None:
        self._cancel_all(self._queued, cause)
        self._queued.clear()

    def _cancel_all(self, closures: Any, cause: BaseException | None) -> None:
        why = "the coordinator was closed" if cause is None else f"another one failed: {cause!r}"
        for closure in closures:
            error = CancelledError(f"This closure was not run, because {why}.")
            error.__cause__ = cause
            closure.result._fail(error)

    def _raise_error(self) -> None:
        if self._error is not None:
            self._changed.wait_for(lambda: not self._running)
            error, self._error = self._error, None
            if error is not None:
                raise error
