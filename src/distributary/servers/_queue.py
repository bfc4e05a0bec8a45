"""The queue of closures that wait for a worker, and their results."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, final

import jax

from distributary.devices import Nest, progress
from distributary.errors import CancelledError, InvalidTypeError, UnavailableError

_MAX_QUEUED = 262_144  # as in TensorFlow
_MAX_LEASED = 16


class RemoteValue:
    """The result of a scheduled function, which a worker is yet to compute.

    `ClusterCoordinator.schedule` returns it.

    Source: `tf.distribute.experimental.coordinator.RemoteValue`.
    """

    def __init__(self) -> None:
        # Not a `concurrent.futures.Future`, which makes closures that do nothing a fifth slower.
        self._ready = threading.Event()
        self._value: Nest = None
        self._error: BaseException | None = None

    def get(self) -> Nest:
        """Waits for the value, and returns it as a nest of JAX arrays.

        Raises:
            CancelledError: if the closure was cancelled because another one failed.
            Exception: the error that the function raised.
        """
        return jax.tree.map(lambda leaf: jax.numpy.asarray(leaf), self.fetch())

    def fetch(self) -> Nest:
        """Waits for the value, and returns it as a nest of NumPy arrays; raises as `get` does."""
        self._ready.wait()
        if self._error is not None:
            raise self._error
        return self._value

    def is_ready(self) -> bool:
        """Returns whether `get` and `fetch` would return or raise without waiting."""
        return self._ready.is_set()

    def _end(self, value: Nest, error: BaseException | None = None) -> None:
        self._value, self._error = value, error
        self._ready.set()

    def _refuse_number(self, *_: object) -> NoReturn:
        raise InvalidTypeError(
            "A RemoteValue is not a number: a worker computes it. Write value.fetch(), which waits"
            " for the number; more rarely than in every step, or the workers wait for you."
        )

    __float__ = __int__ = __add__ = __radd__ = __sub__ = __rsub__ = _refuse_number
    __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __lt__ = __gt__ = _refuse_number
    __round__ = __getitem__ = __iter__ = numpy = item = _refuse_number

    def __format__(self, spec: str) -> str:
        return self._refuse_number() if spec else str(self)

    def __repr__(self) -> str:
        state = "waiting" if not self._ready.is_set() else "failed" if self._error else "ready"
        return f"<RemoteValue: {state}>"


@final
@dataclass(slots=True, eq=False)
class Closure:
    """One call of a function, to be run by any worker.

    Attributes:
        number: Number of the closure, counted per coordinator. Servers apply the pushes of each
            number once.
        function: The function to call.
        args: The arrays among its arguments, as a flat list.
        call: The Python function of these arrays, for tracing it again.
        sources: The sources of worker data among the arguments.
        fed: The arrays that the coordinator has taken from its datasets for the closure, or the
            error if it could not.
        result: Receives the return value.
        lost: Names of the workers that were lost while they ran it.
    """

    number: int
    function: Any
    args: list[Any]
    call: Callable[..., Any]
    sources: Sequence[Any]
    fed: list[Any] | Exception | None = None
    result: RemoteValue = field(default_factory=RemoteValue)
    lost: list[str] = field(default_factory=list)


@final
class ClosureQueue:
    """Closures in the order in which they were scheduled, and the first error among them.

    After an error, queued closures are cancelled. The next call that checks for errors waits until
    nothing is running, and raises the error once; then the queue is as good as new. After `end`,
    every such call raises the error, and `closed` is set.

    Args:
        max_losses: Number of lost workers after which a closure that was running on all of them
            fails.
        settle: Called with `num_finished` after closures have failed or were cancelled that a
            worker, believed to be lost, may still be running.

    Attributes:
        closed: Set after `end`.
        num_finished: All closures with smaller numbers have ended.
    """

    def __init__(self, max_losses: int, settle: Callable[[int], None]) -> None:
        self._max_losses = max_losses
        self._settle = settle
        lock = threading.RLock()
        self._has_work = threading.Condition(lock)
        self._has_room = threading.Condition(lock)
        self._has_ended = threading.Condition(lock)
        self._lock = lock
        self._queued: deque[Closure] = deque()
        self._running: set[Closure] = set()
        self._error: BaseException | None = None
        self.closed = threading.Event()
        self._is_unsettled = False
        self._next_number = 0
        self.num_finished = 0
        # The closures that have ended after one that has not.
        self._ended: set[int] = set()
        self._counts = dict.fromkeys(("done", "failed", "cancelled", "retried"), 0)

    def put(
        self, function: object, args: list[Any], call: Callable[..., Any], sources: Sequence[Any]
    ) -> RemoteValue:
        """Queues a closure; waits while too many are queued; raises an earlier error."""
        with self._lock:
            # Also bounds `_ended` and the matching set on the servers.
            self._has_room.wait_for(
                lambda: self._error or self._next_number - self.num_finished < _MAX_QUEUED
            )
            self._raise_error()
            closure = Closure(self._next_number, function, args, call, sources)
            self._next_number += 1
            self._queued.append(closure)
            self._has_work.notify()
        return closure.result

    def lease(self, num_workers: int, is_lost: Callable[[], bool]) -> list[Closure]:
        """Waits for closures, and leases some of them to a worker.

        Args:
            num_workers: Number of workers that share the queue.
            is_lost: Returns whether the worker is lost. Call `wake` when that changes.

        Returns:
            One closure or more; none if the worker is lost or the queue is closed.
        """
        with self._lock:
            self._has_work.wait_for(lambda: self._queued or self.closed.is_set() or is_lost())
            if self.closed.is_set():
                return []
            if is_lost():
                self._has_work.notify()  # passes it on, in case it was about new closures
                return []
            # One at a time if its worker was lost: any of these closures may be what ended it.
            share = 1 if self._queued[0].lost else len(self._queued) // max(1, num_workers)
            taken = [self._queued.popleft()]
            while len(taken) < min(share, _MAX_LEASED) and not self._queued[0].lost:
                taken.append(self._queued.popleft())
            self._running.update(taken)
        return taken

    def wake(self) -> None:
        """Makes threads that wait in `lease` check again whether their worker is lost."""
        with self._lock:
            self._has_work.notify_all()

    def succeed(self, closure: Closure, value: Nest) -> None:
        """Notes that a closure has returned `value`."""
        with self._lock:
            if self._stop([closure]):
                closure.result._end(value)
                self._counts["done"] += 1
                if progress.is_watched:
                    progress.add(1, 0)
                self._finish(closure)

    def fail(self, closure: Closure, error: BaseException) -> None:
        """Notes that a closure has raised an error."""
        with self._lock:
            if self._stop([closure]):
                closure.result._end(None, error)
                self._counts["failed"] += 1
                self._is_unsettled |= bool(closure.lost)
                self._set_error(error)
                self._finish(closure)

    def put_back(self, closures: Sequence[Closure]) -> None:
        """Puts closures that were running back to the front of the queue, for any worker."""
        with self._lock:
            closures = self._stop(closures)
            if self._error is None:
                self._queued.extendleft(reversed(closures))
                self._has_work.notify(len(closures))
            else:
                self._is_unsettled = True
                self._cancel(closures, self._error)

    def lose(self, closures: Sequence[Closure], worker: str, error: BaseException) -> None:
        """Puts back closures that were running when their worker was lost.

        Args:
            closures: The closures.
            worker: Name of the worker.
            error: The reason why it is believed to be lost.
        """
        with self._lock:
            for closure in closures:
                closure.lost.append(worker)
                if len(closure.lost) >= self._max_losses:
                    self.fail(closure, _error_of_losses(closure, error))
                else:
                    self._counts["retried"] += 1
            self.put_back(closures)

    def fail_queued(self, error: BaseException) -> None:
        """Cancels the queued closures, if any, with an error: there is no worker to run them."""
        with self._lock:
            if self._queued:
                self._set_error(error)
                self._has_ended.notify_all()

    def end(self, error: BaseException) -> None:
        """Closes the queue with an error, and cancels all closures, even running ones."""
        with self._lock:
            if self.closed.is_set():
                return
            self.closed.set()
            self._error = None  # replaced by the new error, which explains an earlier one
            self._set_error(error)
            self._cancel(list(self._running), error)
            self._running.clear()
            for condition in (self._has_work, self._has_room, self._has_ended):
                condition.notify_all()

    def join(self) -> None:
        """Waits until all closures have ended; raises the first error."""
        with self._lock:
            self._has_ended.wait_for(
                lambda: self._error is not None or not (self._queued or self._running)
            )
            self._raise_error()

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Waits like `join`, then runs the block; other threads can schedule nothing meanwhile."""
        with self._lock:
            self.join()
            yield

    def is_done(self) -> bool:
        """Returns whether all closures have ended; raises the first error."""
        with self._lock:
            self._raise_error()
            return not (self._queued or self._running)

    def counts(self) -> dict[str, int]:
        """Returns the numbers of closures queued, running, done, failed, cancelled and retried."""
        with self._lock:
            return {"queued": len(self._queued), "running": len(self._running), **self._counts}

    def _set_error(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
            self._cancel(self._queued, error)
            self._queued.clear()
            self._has_room.notify_all()

    def _cancel(self, closures: Iterable[Closure], cause: BaseException) -> None:
        for closure in closures:
            error = CancelledError(
                f"This closure was not run, because another one failed: {cause!r}"
            )
            error.__cause__ = cause
            closure.result._end(None, error)
            self._counts["cancelled"] += 1
            self._finish(closure)

    def _stop(self, closures: Sequence[Closure]) -> list[Closure]:
        """Returns those of the closures that were running, which none is after `end`."""
        stopped = [closure for closure in closures if closure in self._running]
        self._running.difference_update(stopped)
        if not self._running:
            self._has_ended.notify_all()
        return stopped

    def _finish(self, closure: Closure) -> None:
        self._ended.add(closure.number)
        if closure.number == self.num_finished:
            while self.num_finished in self._ended:
                self._ended.remove(self.num_finished)
                self.num_finished += 1
            self._has_room.notify_all()

    def _raise_error(self) -> None:
        if self._error is not None:
            self._has_ended.wait_for(lambda: not self._running)
            error = self._error
            if error is None:  # another thread has raised it
                return
            if not self.closed.is_set():
                self._error = None
                if self._is_unsettled:
                    self._is_unsettled = False
                    self._settle(self.num_finished)
            raise error


def _error_of_losses(closure: Closure, error: BaseException) -> BaseException:
    if isinstance(error, UnavailableError):  # the workers have not ended: a server is lost
        return error
    poison = UnavailableError(
        f"Closure {closure.number}, a call of {closure.function.name}, was running on"
        f" {', '.join(closure.lost)} when these were lost. It is not tried again, as it seems to"
        f" end its workers: look at their output. The last error: {error}"
    )
    poison.__cause__ = error
    return poison
