"""The threads that give closures to workers, and to other workers when one is lost."""

import itertools
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias, final

from distributary._threads import start_thread
from distributary.errors import (
    CancelledError,
    CoordinatorReplacedError,
    InvalidValueError,
    PSUnavailableError,
    UnavailableError,
)
from distributary.servers._cluster import Session
from distributary.servers._links import ConnectionLostError, DeadlineError, exception_of
from distributary.servers._messages import Message
from distributary.servers._queue import Closure, ClosureQueue
from distributary.servers._sessions import Heartbeat, SessionLink
from distributary.servers._statistics import WorkerStatistics, new_tally

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

    def set_up(self, key: Key, messages: Sequence[Message]) -> Message:
        """Tells one worker; if it replies "ok", the others are told before they run closures.

        Args:
            key: The source or function that the messages are about.
            messages: The message for each worker.

        Returns:
            The reply of the first worker.

        Raises:
            Exception: the same errors as `call`.
        """
        return self._with_some(lambda connection: connection.set_up(key, messages))

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

    def call(self, message: Message) -> Message:
        """Sends a message to any one worker, and returns the reply.

        Raises:
            UnavailableError: if there is no worker for too long.
            Exception: the same errors as `Link.call`.
        """
        return self._with_some(lambda connection: connection.call(message))

    def _with_some(self, call: "Callable[[_Connection], Message]") -> Message:
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
