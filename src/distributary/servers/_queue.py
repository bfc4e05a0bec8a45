"""The queue of closures, their results, and the threads that give closures to workers.

When a worker is lost, other workers get its closures.
"""

import itertools
import logging
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias, final

import jax

from distributary._threads import start_thread
from distributary.devices import Nest, progress
from distributary.errors import (
    CancelledError,
    CoordinatorReplacedError,
    InvalidTypeError,
    InvalidValueError,
    PSUnavailableError,
    UnavailableError,
)
from distributary.servers._cluster import Session
from distributary.servers._links import (
    ConnectionLostError,
    DeadlineError,
    Heartbeat,
    SessionLink,
    exception_of,
)
from distributary.servers._messages import Message
from distributary.servers._statistics import WorkerStatistics, new_tally

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


#: The subject of a message: `("source", number)` or `("function", number)`.
Key: TypeAlias = tuple[str, int]

_log = logging.getLogger(__name__)

_LOST = (ConnectionLostError, DeadlineError)
_MAX_LEASED_BYTES = 1 << 24  # of the closures in a lease, not counting the last one
_SOON_SECONDS = 0.5  # to reconnect while closures wait to know whether their worker is lost
_MIN_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.05, 1.0
_random = random.Random()  # not the program's, which may be seeded: threads draw at any time


@final
class Workers:
    """The workers of a coordinator, with a thread for each.

    Args:
        session: Session of the coordinator.
        queue: Queue to take closures from.
        add_plan: Called with a closure and the shapes of data for which a worker has no plan; adds
            such a plan to the setup.

    Attributes:
        setup: The messages that workers need before they can run closures, in the order of their
            creation: by number their subject, and the message for each worker. Every change makes
            another dict.
    """

    def __init__(
        self, session: Session, queue: ClosureQueue, add_plan: Callable[[Any, Any], None]
    ) -> None:
        self.session = session
        self.queue = queue
        self.add_plan = add_plan
        self.setup: dict[int, tuple[Key, Sequence[Message]]] = {}
        self._setup_lock = threading.Lock()
        self._setup_numbers = itertools.count()
        self._changed = threading.Condition()
        self._none_since = time.monotonic()
        self._drivers = [_Driver(i, self) for i in range(len(session.cluster.workers))]
        for driver in self._drivers:
            start_thread(driver.drive, driver.stop, "distributary-driver")

    def add_setup(self, key: Key, messages: Sequence[Message]) -> int:
        """Adds a message for each worker to the setup; returns the number of the messages."""
        with self._setup_lock:
            number = next(self._setup_numbers)
            self.setup = {**self.setup, number: (key, messages)}
        return number

    def remove_setup(self, keys: Collection[Key]) -> None:
        """Removes the messages about subjects that are no longer used."""
        with self._setup_lock:
            self.setup = {n: entry for n, entry in self.setup.items() if entry[0] not in keys}

    def with_one(self, call: "Callable[[_Connection], Message]") -> Message:
        """Calls a function with the connection to any one worker, and returns the result.

        Raises:
            UnavailableError: if there is no worker for too long.
            Exception: the same errors as `Link.call`.
        """

        def ready() -> list[_Driver]:
            return [one for one in self._drivers if one.is_live and not one.connection.is_lost()]

        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: ready() or self.queue.closed.is_set(),
                    self.session.options.no_worker_timeout_seconds,
                )
                drivers = ready()
            if not drivers:
                self.queue.is_done()  # raises why it is closed
                raise self._error()
            connection = min(drivers, key=lambda driver: driver.is_running).connection
            try:
                return call(connection)
            except _LOST as error:
                connection.lose(error)

    def num_live(self) -> int:
        """Returns the number of workers that can be reached."""
        return sum(driver.is_live for driver in self._drivers)

    def note(self, driver: "_Driver", is_live: bool) -> None:
        """Notes whether a worker can be reached."""
        with self._changed:
            if driver.is_live and not is_live:
                self._none_since = time.monotonic()
            driver.is_live = is_live
            self._changed.notify_all()

    def check(self) -> None:
        """Fails the queued closures if there has been no worker for too long."""
        with self._changed:
            seconds = time.monotonic() - self._none_since
            if self.num_live() or seconds < self.session.options.no_worker_timeout_seconds:
                return
        if all(driver.is_given_up for driver in self._drivers):
            self.queue.end(self._error())
        else:
            self.queue.fail_queued(self._error())

    def statistics(self) -> tuple[WorkerStatistics, ...]:
        """Returns the statistics of each worker."""
        return tuple(driver.statistics() for driver in self._drivers)

    def _error(self) -> UnavailableError:
        seconds = time.monotonic() - self._none_since
        reasons = "; ".join(f"{driver.name}: {driver.error}" for driver in self._drivers)
        return UnavailableError(
            f"No worker has been reached for {seconds:.0f} s, so no closure can run. {reasons}"
        )


@final
class _Driver:
    """The thread that gives closures to one worker, and reconnects to it when it is lost."""

    def __init__(self, number: int, workers: Workers) -> None:
        self.name = workers.session.cluster.workers[number].name
        self.error: Exception | None = None
        self.is_live = self.is_running = self.is_given_up = False
        self._number = number
        self._session = workers.session
        self._queue = workers.queue
        self._workers = workers
        self._connection: _Connection | None = None
        self._num_losses = 0
        self._num_closures = 0
        self._past = new_tally()  # of its former incarnations
        self._tally: dict[str, Any] = new_tally()

    @property
    def connection(self) -> "_Connection":
        """Connection to the worker, once there has been one."""
        assert self._connection is not None
        return self._connection

    def statistics(self) -> WorkerStatistics:
        """Returns the statistics of the worker."""
        if self.is_live:
            state = "running" if self.is_running else "idle"
        elif self._num_losses or self._connection:
            state = "given up" if self.is_given_up else "lost"
        else:
            state = "connecting"
        sums: Counter[str] = Counter(self._past)
        sums.update(self._tally)
        return WorkerStatistics(self.name, state, self._num_losses, self._num_closures, **sums)

    def stop(self) -> None:
        """Ends the thread soon, as the program ends."""
        self._queue.end(CancelledError("The program ends."))
        if self._connection is not None:
            self._connection.close()

    def drive(self) -> None:
        """Runs closures until the queue is closed or the worker is given up."""
        try:
            self._drive_to_end()
        except Exception as error:  # such as CoordinatorReplacedError
            self._queue.end(error)
        finally:
            self._workers.note(self, is_live=False)
            if self._connection is not None:
                self._connection.close()

    def _drive_to_end(self) -> None:
        running: list[Closure] = []
        silence: Exception | None = None  # why it may be lost; a new connection will tell
        is_away = False
        pause = _MIN_PAUSE_SECONDS
        lost_since = time.monotonic()
        while not self._queue.closed.is_set():
            seconds = 3 * self._session.options.heartbeat_seconds
            is_same = self._connect(min(seconds, _SOON_SECONDS) if running else seconds)
            if is_same:
                self._queue.put_back(running)
            elif running:
                assert self.error is not None
                self._queue.lose(running, self.name, self.error)
            running = []
            if silence is not None and not is_same:
                self._num_losses += 1
                is_away = True
                _log.warning("%s is lost: %s", self.name, silence)
            silence = None
            if is_same is None:
                seconds = time.monotonic() - lost_since
                self.is_given_up = seconds > self._session.options.worker_timeout_seconds
                self._workers.check()
                if self.is_given_up:
                    _log.warning("%s is given up after %.0f s", self.name, seconds)
                    return
                self._queue.closed.wait(pause * _random.uniform(0.5, 1))
                pause = min(2 * pause, _MAX_PAUSE_SECONDS)
            else:
                if is_away:
                    _log.warning("%s is there again", self.name)
                is_away = False
                self._workers.note(self, is_live=True)
                running = self._serve()
                self._workers.note(self, is_live=False)
                if self.connection.is_lost() and not self._queue.closed.is_set():
                    silence = self.error
                pause = _MIN_PAUSE_SECONDS
                lost_since = time.monotonic()

    def _connect(self, seconds: float) -> bool | None:
        """Connects again; returns whether the worker kept its state, or None if not reached."""
        old = self._connection
        if old is not None:
            old.close()
        try:
            new = _Connection(self._number, self._workers, seconds)
        except _LOST as error:
            self.error = error
            return None
        self._connection = new
        if old is None or old.incarnation != new.incarnation:
            self._past.update(self._tally)
            self._tally = new_tally()
            return False
        new.known = old.known
        return True

    def _serve(self) -> list[Closure]:
        """Runs closures on the worker until it is lost; returns those it was running."""
        connection = self.connection
        while closures := self._queue.lease(self._workers.num_live(), connection.is_lost):
            self.is_running = True
            try:
                while closures and self._run(connection, closures):
                    pass
                self._session.finish_many(self._queue.num_finished)
            except _LOST as error:
                connection.lose(error)
                self.error = connection.error
                return closures
            finally:
                self.is_running = False
        self.error = connection.error
        return []

    def _run(self, connection: "_Connection", closures: list[Closure]) -> bool:
        """Runs closures on the worker, and removes those that have ended from the list.

        Returns:
            True if the worker must also run the closures that are left.
        """
        function = closures[0].function
        try:
            leased, arrays = self._lease(closures)
            message = Message(
                "run",
                {
                    "function": function.number,
                    "closures": [closure.number for closure in leased],
                    "num_args": len(function.avals),
                    "bound": [[(s.kind, s.number) for s in closure.sources] for closure in leased],
                    "finished": self._queue.num_finished,
                },
                arrays,
            )
            reply = connection.call(message)
            fields, results = reply.fields, reply.arrays
            self._tally = fields["tally"]
            for number in fields["plans"]:
                # Results that are no arrays may depend on the shapes of the data, and so the plan.
                plan = function.plans[number]
                num_results = plan.worker.num_results
                self._queue.succeed(closures.pop(0), plan.rebuild(results[:num_results]))
                results = results[num_results:]
                self._num_closures += 1
            if "error" in fields:
                raise exception_of(fields["error"], self.name)
            if "shapes" in fields:
                self._workers.add_plan(closures[0], fields["shapes"])
                return True  # on this worker, which has already taken their data
        except (*_LOST, CoordinatorReplacedError):
            raise
        except PSUnavailableError as error:
            # Maybe only this worker cannot reach the server, and others can.
            self._queue.lose([closures.pop(0)], self.name, error)
            self._queue.put_back(closures)
            self._queue.closed.wait(_MAX_PAUSE_SECONDS * _random.random())
            return False
        except Exception as error:
            # Stored for the caller that waits for the closure: nobody sees errors of a thread.
            self._queue.fail(closures.pop(0), error)
        self._queue.put_back(closures)
        return False

    def _lease(self, closures: list[Closure]) -> tuple[list[Closure], list[Any]]:
        """Returns the first closures, all of one function, and their arguments and fed arrays."""
        function = closures[0].function
        leased: list[Closure] = []
        arrays: list[Any] = []
        num_bytes = 0
        for closure in itertools.takewhile(lambda c: c.function is function, closures):
            if closure.fed is None:
                try:
                    feeds = function.feeds_of(closure.sources)
                    closure.fed = [array for feed in feeds for array in feed.next(self._number)]
                except Exception as error:
                    closure.fed = error
            if isinstance(closure.fed, Exception):
                if not leased:
                    raise closure.fed
                break  # it is the first one of the next lease, and fails then
            leased.append(closure)
            arrays += [*closure.args, *closure.fed]
            num_bytes += sum(array.nbytes for array in (*closure.args, *closure.fed))
            if num_bytes > _MAX_LEASED_BYTES:
                break
        return leased, arrays


@final
class _Connection:
    """A connection to a worker, until it is lost.

    Args:
        number: Number of the worker.
        workers: All workers, with the session, and the queue in which its thread may be waiting.
        seconds: Time that the worker may take to reply.

    Raises:
        ConnectionLostError: if the worker cannot be reached.
        DeadlineError: if it does not reply in time.
        CoordinatorReplacedError: if the worker works for a newer coordinator.

    Attributes:
        incarnation: Id that changes when the worker has forgotten everything.
        known: Keys of the setup messages that the worker knows, by message number.
        error: The reason why the connection was lost, or None.
    """

    def __init__(self, number: int, workers: Workers, seconds: float) -> None:
        session = workers.session
        task = session.cluster.workers[number]
        self._number = number
        self.known: dict[int, Key] = {}
        self._known_setup: Any = None  # the messages of the setup, all of which the worker has
        self.error: Exception | None = None
        self._workers = workers
        self._queue = workers.queue
        self._lock = threading.Lock()
        self._link = SessionLink(task, session.id)
        try:
            reply = self._link.call(Message("hello"), seconds)
        except BaseException:
            self._link.close()
            raise
        self.incarnation = reply.fields["incarnation"]
        self._heartbeat = Heartbeat(
            SessionLink(task, session.id), session.options.heartbeat_seconds, self.lose
        )

    def call(self, message: Message) -> Message:
        """Tells the worker what it has to know, then calls it; raises as `Link.call` does."""
        with self._lock:
            self._send_setup()
        return self._link.call(message)

    def set_up(self, key: Key, messages: Sequence[Message]) -> Message:
        """Sends a message, and adds it to the setup of all workers if the reply is "ok"."""
        with self._lock:
            self._send_setup()
            reply = self._link.call(messages[self._number])
            if reply.kind == "ok":
                self.known[self._workers.add_setup(key, messages)] = key
            return reply

    def is_lost(self) -> bool:
        """Returns whether the connection is lost, so that a new one is needed."""
        return self.error is not None

    def lose(self, error: Exception) -> None:
        """Marks the connection as lost: ends its calls, and wakes the thread of the worker."""
        self.error = self.error or error
        self._link.close()
        self._queue.wake()

    def close(self) -> None:
        """Closes the links, and ends the thread of the heartbeat."""
        self._heartbeat.stop()
        self._link.close()

    def _send_setup(self) -> None:
        setup = self._workers.setup
        if self._known_setup is setup:
            return
        if gone := self.known.keys() - setup.keys():
            self._link.call(Message("forget", {"keys": [self.known[number] for number in gone]}))
            for number in gone:
                del self.known[number]
        for number, (key, messages) in setup.items():
            if number in self.known:
                continue
            reply = self._link.call(messages[self._number])
            if reply.kind != "ok":
                raise InvalidValueError(
                    f"{self._link.name} cannot make the data that another worker has made:"
                    f" {reply.fields['why']}. Run the same script on all workers."
                )
            self.known[number] = key
        self._known_setup = setup
