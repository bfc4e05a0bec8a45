"""Calls between the tasks of a cluster, independent of how messages are sent; and sessions.

A link carries the calls of one task to another: numbered requests, and replies with the number of
their request. The requests of a link are handled one after the other, in the order of `start`. To
avoid waiting behind a long one, open a second link.

A session ties a task to one coordinator, always the newest, which opens one on every task. A task
forgets everything when a newer session begins or its process ends. It refuses messages of older
coordinators, and of those whose session it does not know.
"""

import builtins
import functools
import itertools
import queue
import random
import secrets
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, TypeAlias, final

from distributary import errors
from distributary._threads import start_thread
from distributary.devices import backends_started, local_devices_of, requested_cpu_devices
from distributary.errors import (
    CoordinatorReplacedError,
    DistributaryError,
    InvalidValueError,
    PSUnavailableError,
)
from distributary.job import package_versions
from distributary.servers._messages import JSON, Message, WireError

_ERROR_KIND = "error"  # a kind of reply that services do not use
_MAX_ERROR_CHARACTERS = 20_000
_NUM_PARTS = 4  # in which the time for a reply is measured; see `Link.call`
_MIN_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.05, 1.0
_random = random.Random()  # not the program's, which may be seeded: threads draw at any time


class ConnectionLostError(DistributaryError, ConnectionError):
    """A call without a reply because the connection broke. It was handled once or not at all."""


class RefusedError(ConnectionLostError):
    """A failed connection: nothing listens at the other end, as its process has ended."""


class UnauthenticatedError(ConnectionLostError):
    """A failed connection: one end does not prove that it belongs to the job of the other."""


class DeadlineError(DistributaryError, TimeoutError):
    """A call without a reply in time. It was or will be handled once, or not at all."""


@final
@dataclass(frozen=True, slots=True)
class Peer:
    """The caller of a service.

    Args:
        role: `"chief"`, `"worker"` or `"ps"`, from the certificate. Without a certificate it is
            `"local"`: a caller in the same process, or anyone if the server is insecure.
        identity: Text that identifies the peer in messages: the name in its certificate and its
            address.
    """

    role: str
    identity: str


LOCAL: Final = Peer("local", "local")


class Service(Protocol):
    """The service that a task provides to others."""

    def handle(self, message: Message, peer: Peer) -> Message:
        """Handles a request and returns the reply; called by several threads, one per link.

        It must not write to the arrays of the request. The arrays of the reply must not change
        afterwards, as they are sent later.

        Args:
            message: The request.
            peer: The sender of the request.

        Raises:
            Exception: any error; the caller gets one of the same type and text.
        """


@final
class Connection:
    """Requests on their way out over a connection, and the calls that wait for their replies.

    Args:
        target: Name of the task called, for messages.
        pause: Seconds after which to connect, roughly.

    Attributes:
        pause: The same.
        has_begun: True once there has been a request, so that a thread serves the connection.
        has_reply: True once a reply has come.
    """

    def __init__(self, target: str, pause: float = 0) -> None:
        self.pause = pause
        self.has_begun = self.has_reply = False
        self._target = target
        self._start = time.monotonic() + pause * _random.uniform(0.5, 1)
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._calls: dict[int, Future[Message]] = {}
        self._requests: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
        self._cancel: Callable[[], object] = lambda: None
        self._ended = threading.Event()
        self._error: Exception | None = None  # set by `end`

    def begin(self, request: object) -> "Future[Message]":
        """Sends a request; returns the future of its reply, which has failed after `end`."""
        future: Future[Message] = Future()
        with self._lock:  # so that requests are sent in the order of their numbers
            if self._error is None:
                number = next(self._numbers)
                self._calls[number] = future
                self._requests.put((number, request))
                return future
        future.set_exception(_again(self._error))
        return future

    def requests(self) -> Iterator[tuple[int, Any]]:
        """Yields the requests whose callers still wait, with their numbers, until `end`."""
        while (request := self._requests.get()) is not None:
            future = self._calls.get(request[0])
            if future is None:  # the connection has ended
                continue
            if future.cancelled():
                self._calls.pop(request[0], None)
            else:
                yield request

    def reply(self, number: int, message: Message) -> None:
        """Hands a reply that has come to its caller."""
        self.has_reply = True
        with self._lock:
            future = self._calls.pop(number, None)
        if future is None or not future.set_running_or_notify_cancel():  # the caller has given up
            return
        if message.kind == _ERROR_KIND:
            future.set_exception(exception_of(message.fields, self._target))
        else:
            future.set_result(message)

    def cancel_at_end(self, cancel: Callable[[], object]) -> None:
        """Calls `cancel` when the connection ends; now, if it has ended."""
        with self._lock:
            self._cancel = cancel
        if self._ended.is_set():
            cancel()

    def wait_to_connect(self) -> bool:
        """Waits until it is time to connect; returns False if the connection has ended by then."""
        return not self._ended.wait(self._start - time.monotonic())

    def end(self, error: Exception) -> None:
        """Fails all calls, present and later ones: no reply will come. The first error counts."""
        with self._lock:
            self._error = self._error or error
            futures = list(self._calls.values())
            self._calls.clear()
            self._ended.set()
        self._requests.put(None)
        self._cancel()
        for future in futures:
            if future.set_running_or_notify_cancel():
                future.set_exception(_again(self._error))


class Link(ABC):
    """A connection over which one task calls another, made again after it has broken.

    It connects at the first call. After a connection has broken, calls wait 50 ms to 1 s until the
    next one is tried.

    Args:
        name: Name of the task called, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._connection = Connection(name)

    @abstractmethod
    def _encode(self, message: Message) -> Any:
        """Returns a request in the form in which `_converse` sends it."""

    @abstractmethod
    def _converse(self, connection: Connection) -> Exception:
        """Connects, sends the requests and receives replies; returns why the connection ended."""

    def close(self) -> None:
        """Ends the link. Calls under way raise `ConnectionLostError`."""
        self._end(f"The link to {self._name} is closed.")

    def start(self, message: Message) -> "Future[Message]":
        """Sends a request; replies come in the order of the requests.

        Returns:
            A future of the reply, or of an exception as raised by `call`. If you cancel it, the
            request is not sent, unless it has been already.

        Raises:
            WireError: if the message cannot be encoded.
        """
        request = self._encode(message)
        with self._lock:
            connection = self._connection
            if not connection.has_begun:
                connection.has_begun = True
                name = f"distributary link to {self._name}"
                start_thread(functools.partial(self._serve, connection), self.close, name)
        return connection.begin(request)

    def call(self, message: Message, timeout: float | None = None) -> Message:
        """Sends a request, waits for the reply and returns it.

        Args:
            message: The request. Its arrays must not change before the reply.
            timeout: Seconds to wait; None waits for the reply or the end of the connection. It is
                split into parts. A part that took much longer than it should does not count: it
                shows that this process itself was frozen, or had no processor.

        Raises:
            ConnectionLostError: if there is no connection, or it breaks. The next call makes a new
                one.
            DeadlineError: if there is no reply in time.
            WireError: if the message cannot be sent or the other end does not understand it.
            Exception: the error that the service raised, if its type is in `distributary.errors` or
                is a common builtin; otherwise the nearest of these types. A note contains the
                traceback of the other end.
        """
        future = self.start(message)
        if timeout is None:
            return future.result()
        num_silent, part = 0, timeout / _NUM_PARTS
        while num_silent < _NUM_PARTS:
            begin = time.monotonic()
            try:
                return future.result(part)
            except TimeoutError:
                if future.done():  # the service raised a TimeoutError, or a reply has just come
                    return future.result()
            num_silent += time.monotonic() - begin < 2 * part
        future.cancel()
        raise DeadlineError(f"{self._name} has not replied within {timeout:g} s.")

    def _serve(self, connection: Connection) -> None:
        error: Exception = ConnectionLostError(f"The link to {self._name} failed.")
        try:
            if connection.wait_to_connect():
                error = self._converse(connection)
        finally:  # even after an error here, no call waits forever
            self._replace(connection, error)

    def _replace(self, connection: Connection, error: Exception) -> None:
        """Ends a connection, and makes another one for later calls."""
        pause = 0 if connection.has_reply else connection.pause
        with self._lock:
            # Replaced before the calls end, so that a repeated call uses the new connection.
            if self._connection is connection:
                pause = min(max(2 * pause, _MIN_PAUSE_SECONDS), _MAX_PAUSE_SECONDS)
                self._connection = Connection(self._name, pause)
        connection.end(error)

    def _end(self, reason: str) -> None:
        """Ends the connection, and all later ones."""
        new = Connection(self._name)
        new.has_begun = True
        new.end(RefusedError(reason))
        with self._lock:
            old, self._connection = self._connection, new
        old.end(ConnectionLostError(reason))


@final
class InProcessLink(Link):
    """A `Link` to a service in the same process. A thread handles the requests.

    Args:
        service: The service to call; None for a process that has ended.
        name: Name of the other end in messages, such as `"ps 0"`.
        fault: Function that delivers a request. It is called in the link's thread with the request
            and a function that delivers it and returns the reply; it must return the reply. In
            tests of faults, it can deliver twice, wait, or raise a `ConnectionError` before or
            after delivery, which has the effect of `cut`.
    """

    def __init__(
        self,
        service: Service | None,
        name: str,
        fault: Callable[[Message, Callable[[Message], Message]], Message],
    ) -> None:
        super().__init__(name)
        self._service = service
        self._fault = fault

    def cut(self) -> None:
        """Breaks the connection. Calls under way raise; the next call makes a new connection."""
        self._replace(self._connection, self._was_cut())

    def kill(self) -> None:
        """Breaks the connection as if the process at the other end had been killed.

        All later calls raise, too. A request that is being handled is still finished.
        """
        self._end(f"The connection to {self._name} broke: it was killed.")

    def _encode(self, message: Message) -> Message:
        return message

    def _converse(self, connection: Connection) -> Exception:
        service = self._service
        if service is None:
            return RefusedError(f"Nothing listens at {self._name}.")

        deliver = functools.partial(answer, service, peer=LOCAL)
        for number, message in connection.requests():
            try:
                reply = self._fault(message, deliver)
            except ConnectionError:
                return self._was_cut()
            except Exception as error:
                reply = error_reply(error)
            connection.reply(number, reply)
        return self._was_cut()

    def _was_cut(self) -> ConnectionLostError:
        return ConnectionLostError(f"The connection to {self._name} was cut.")


def answer(service: Service, message: Message, peer: Peer) -> Message:
    """Returns the reply of a service, or a reply that describes the exception it raised."""
    try:
        return service.handle(message, peer)
    except Exception as error:
        return error_reply(error)


def error_reply(error: Exception) -> Message:
    """Returns the reply that raises an exception at the other end."""
    name = next(cls.__name__ for cls in type(error).__mro__ if cls in _EXCEPTIONS.values())
    text = str(error.args[0]) if len(error.args) == 1 else str(error)
    if name != type(error).__name__:
        text = f"{type(error).__name__}: {text}"
    trace = "".join(traceback.format_exception(error))
    fields: dict[str, JSON] = {
        "type": name,
        "text": text[:_MAX_ERROR_CHARACTERS],
        "traceback": trace[-_MAX_ERROR_CHARACTERS:],
    }
    return Message(_ERROR_KIND, fields)


def exception_of(fields: Mapping[str, JSON], target: str) -> Exception:
    """Returns the exception described by the fields of an `error_reply` from `target`."""
    kind, text, trace = (fields.get(name) for name in ("type", "text", "traceback"))
    cls = _EXCEPTIONS.get(str(kind), RuntimeError)
    error = cls(str(text))
    error.add_note(f"Raised at {target}:\n{trace}")
    return error


def _again(error: Exception) -> Exception:
    """Returns a copy of an exception for each call, as raising one adds to its traceback."""
    return type(error)(*error.args)


_BUILTINS = vars(builtins).values()
# Exceptions that nobody raises, or that are not made of a text.
_OF_NO_TEXT = (
    *(Warning, ExceptionGroup),
    *(UnicodeDecodeError, UnicodeEncodeError, UnicodeTranslateError),
)
# Without ConnectionLostError and DeadlineError: if a service raises them, it is for another link.
_EXCEPTIONS: Final = {
    cls.__name__: cls
    for cls in (*(getattr(errors, name) for name in errors.__all__), WireError, *_BUILTINS)
    if isinstance(cls, type) and issubclass(cls, Exception) and not issubclass(cls, _OF_NO_TEXT)
}


# The roles that may send each kind of message. A message that is not in the table is refused.

# A message to any task -> name of the task, its number of devices, versions
IDENTIFY: Final = "identify"

_LOCAL: Final = "local"  # a role that may send everything
_CHIEF: Final = frozenset({"chief", _LOCAL})
_WORKER: Final = frozenset({"worker", _LOCAL})
_OF_SESSIONS: Final = (IDENTIFY, "hello", "alive")
_OF_WORKERS: Final = ("forget", "peek", "plan", "run", "source")
_OF_SERVERS: Final = ("adopt", "assign", "copy", "create", "drop", "finish", "load", "save")
#: For each type of receiving task and each kind of message, the roles that may send it. The chief
#: receives none.
SENDERS: Final[Mapping[str, Mapping[str, frozenset[str]]]] = {
    "worker": dict.fromkeys((*_OF_SESSIONS, *_OF_WORKERS), _CHIEF),
    "ps": {
        **dict.fromkeys((*_OF_SESSIONS, *_OF_SERVERS, "statistics", "update"), _CHIEF),
        "push": _WORKER,
        "read": _CHIEF | _WORKER,
    },
}
_MAX_CHARACTERS = 40


def check_sender(task: str, message: Message, peer: Peer) -> None:
    """Checks that a task gets only messages that their senders may send.

    Args:
        task: Name of the task: `"worker 1"`, `"ps 0"`.
        message: The message.
        peer: Its sender. The role `"local"` belongs to the job and may send everything.

    Raises:
        PermissionError: if the role of the sender does not allow the message.
    """
    task_type = task.partition(" ")[0]
    roles = SENDERS[task_type].get(message.kind)
    rule, part = "", ""
    if roles is None:
        rule = f"which nobody may send to a {task_type}"
    elif peer.role not in roles:
        rule = f"which only the {' and the '.join(sorted(roles - {_LOCAL}))} may send"
    elif "request" in message.fields and peer.role not in _CHIEF:
        # A message with this field is handled once, and a task keeps one number, the chief's.
        rule, part = "which only the chief may send", " with the field 'request'"
    if rule:
        kind = message.kind[:_MAX_CHARACTERS]
        raise PermissionError(f"{task} got {kind!r}{part} from {peer.identity}, {rule}.")


SessionId: TypeAlias = list[Any]  # nanoseconds, random text: the larger one is newer

# How long to try to reach a server again; the second if its machine says that no process listens.
_BREAK_SECONDS, _ENDED_SECONDS = 2.0, 0.1
_END_SECONDS = 2.0  # for the thread of a closed link to end
_UNKNOWN, _NEWER = "unknown session", "newer session"


class SessionLostError(ConnectionLostError):
    """A call to a task that does not know the session, because it was started again."""


class Tenant(ABC):
    """The service that a task provides to one session.

    Messages of a kind such as `push` are handled by the method `_on_push`. It takes the message and
    returns the reply; None stands for the reply "ok".

    Args:
        session: The session.
        name: Name of the task, for messages.

    Attributes:
        incarnation: A text that no other tenant has.
        ended: Set when the session has ended.
    """

    def __init__(self, session: SessionId, name: str) -> None:
        self.session = session
        self.name = name
        self.incarnation = secrets.token_hex(8)
        self.ended = threading.Event()
        self._once = threading.Lock()
        self._request = 0
        self._reply = Message("ok")

    def handle_once(self, message: Message) -> Message:
        """Handles a message, unless its field `request` says that it is the last one once more."""
        request = message.fields.get("request")
        if request is None:
            return self.handle(message)
        with self._once:
            if request != self._request:
                self._reply = self.handle(message)
                self._request = request
            return self._reply

    def handle(self, message: Message) -> Message:
        """Handles a message of a kind that `check_sender` allows, and returns the reply."""
        reply: Message | None = getattr(self, f"_on_{message.kind}")(message)
        return reply or Message("ok")

    def end(self) -> None:
        """Ends the session."""
        self.ended.set()
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Frees everything kept for the session, which has ended."""

    @abstractmethod
    def statistics(self) -> dict[str, float]:
        """Returns numbers about the work done, by name."""


def new_session(after: SessionId | None = None) -> SessionId:
    """Returns a session that is newer than earlier ones, and than `after`."""
    nanoseconds = time.time_ns()
    if after is not None:  # which another machine's clock may have put in the future
        nanoseconds = max(nanoseconds, after[0] + 1)
    return [nanoseconds, secrets.token_hex(8)]


@final
class SessionService:
    """A task that makes a new service for every session, and serves only the newest.

    In addition to the messages of the service, it handles these. All others contain the session:

        identify           -> task: the name; versions: those of packages; devices: their number
        hello              begins a session, or resumes it after a connection has broken
                           -> incarnation: a text that changes if the task has forgotten the
                           session in the meantime
        alive   seconds    the reply comes after that many seconds, or when the session ends

    The replies `unknown session` and `newer session` refuse a message. A message with the field
    `request` is handled once; if the same one is sent again right away, it gets the same reply.

    Args:
        name: Name of the task, for messages.
        make: Makes the service of a session.
    """

    def __init__(self, name: str, make: Callable[[SessionId], Tenant]) -> None:
        self._name = name
        self._make = make
        self._lock = threading.Lock()
        self._current: Tenant | None = None

    def handle(self, message: Message, peer: Peer) -> Message:
        """Handles a message, and returns the reply.

        Raises:
            PermissionError: if the sender may not send this message.
            InvalidValueError: for messages without a session.
        """
        check_sender(self._name, message, peer)
        if message.kind == IDENTIFY:
            started = backends_started()
            num = len(local_devices_of("CPU")) if started else requested_cpu_devices()
            fields = {"task": self._name, "versions": package_versions(), "devices": num}
            return Message("ok", fields)
        asked: Any = message.fields.get("session")
        if not isinstance(asked, list) or [type(part) for part in asked] != [int, str]:
            raise InvalidValueError(
                f"{self._name} got the message {message.kind!r} of session {asked!r}, expected"
                " [nanoseconds, text]."
            )
        if message.kind == "hello":
            self._begin(asked)
        tenant = self._current
        if tenant is None or asked > tenant.session:
            return Message(_UNKNOWN)
        if asked < tenant.session:
            return Message(_NEWER, {"session": tenant.session})
        if message.kind == "hello":
            return Message("ok", {"incarnation": tenant.incarnation})
        if message.kind == "alive":
            tenant.ended.wait(float(message.fields["seconds"]))
            return Message("ok")
        try:
            return tenant.handle_once(message)
        except Exception:
            if tenant.ended.is_set():  # the session has ended meanwhile, which explains any error
                return self.handle(message, peer)
            raise

    def statistics(self) -> dict[str, float]:
        """Returns numbers about the work done in the session, by name."""
        tenant = self._current
        return {} if tenant is None else tenant.statistics()

    def close(self) -> None:
        """Ends the session."""
        with self._lock:
            tenant, self._current = self._current, None
        if tenant is not None:
            tenant.end()

    def _begin(self, session: SessionId) -> None:
        with self._lock:
            old = self._current
            if old is not None and session <= old.session:
                return
            self._current = self._make(session)
        if old is not None:
            old.end()


@final
@dataclass(frozen=True, slots=True)
class Task:
    """A worker or server, as another task sees it.

    Attributes:
        name: Name and address, for messages.
        connect: Opens a link to the task.
    """

    name: str
    connect: Callable[[], Link]


@final
class SessionLink:
    """A link to a task that adds the session to every call.

    Args:
        task: The task.
        session: The session.
        is_server: Whether the task is a server: short breaks of the connection are hidden, and the
            loss of the task is a `PSUnavailableError`.

    Attributes:
        sent_bytes: Bytes of the arrays in requests.
        received_bytes: Bytes of the arrays in replies.
    """

    def __init__(self, task: Task, session: SessionId, *, is_server: bool = False) -> None:
        self.name = task.name
        self._link = task.connect()
        self._session = session
        self._is_server = is_server
        self._once = threading.Lock()
        self._requests = itertools.count(1)
        self.sent_bytes = 0
        self.received_bytes = 0

    def call(self, message: Message, timeout: float | None = None) -> Message:
        """Sends a request, to a server several times if needed, and returns the reply.

        Args:
            message: The request.
            timeout: Seconds to wait; None waits as long as it takes.

        Raises:
            PSUnavailableError: if a server cannot be reached, or has forgotten the session.
            SessionLostError: if another task does not know the session.
            CoordinatorReplacedError: if the task has begun a newer session.
            Exception: the same errors as `Link.call`.
        """
        if not self._is_server:
            return self._call(message, timeout)
        broken: float | None = None
        while True:
            try:
                reply = self._call(message, timeout)
                self.sent_bytes += sum(array.nbytes for array in message.arrays)
                self.received_bytes += sum(array.nbytes for array in reply.arrays)
                return reply
            except SessionLostError as error:
                raise self._lost("was started again, and has lost its variables") from error
            except DeadlineError as error:
                raise self._lost(f"has given no sign of life for {timeout:g} s") from error
            except ConnectionLostError as error:
                now = time.monotonic()
                broken = broken or now
                limit = _ENDED_SECONDS if isinstance(error, RefusedError) else _BREAK_SECONDS
                if now - broken > limit:
                    raise self._lost(f"cannot be reached ({error})") from error

    def call_once(self, message: Message) -> Message:
        """Sends a request that is handled once, even if it is sent several times.

        Only the coordinator uses this, with one link per server. Raises the same errors as `call`.
        """
        with self._once:
            fields = {**message.fields, "request": next(self._requests)}
            return self.call(replace(message, fields=fields))

    def close(self) -> None:
        """Ends the link."""
        self._link.close()

    def _call(self, message: Message, timeout: float | None) -> Message:
        fields = {**message.fields, "session": self._session}
        reply = self._link.call(replace(message, fields=fields), timeout)
        if reply.kind == _UNKNOWN:
            raise SessionLostError(f"{self.name} was started again.")
        if reply.kind == _NEWER:
            raise CoordinatorReplacedError(
                f"{self.name} works for another coordinator, which has started later than this"
                " one. Only one coordinator at a time can use the workers and servers of a job."
            )
        return reply

    def _lost(self, event: str) -> PSUnavailableError:
        return PSUnavailableError(
            f"{self.name} {event}. Create the strategy and its variables again, and restore"
            " them from the last checkpoint."
        )


def call_all(
    links: Sequence[SessionLink] | Mapping[int, SessionLink], messages: Mapping[int, Message]
) -> dict[int, Message]:
    """Calls servers at the same time, and returns the replies, by server number.

    Args:
        links: The links, by server number.
        messages: The message for each server that is called.
    """
    with ThreadPoolExecutor(max(1, len(messages))) as threads:
        calls = {i: threads.submit(links[i].call, message) for i, message in messages.items()}
    return {i: call.result() for i, call in calls.items()}


@final
class Heartbeat:
    """A thread that listens for signs of life of a task.

    Args:
        link: A link to the task, used for nothing else.
        seconds: Time between two signs of life.
        on_lost: Called once, with the error, when the signs of life stop.
    """

    def __init__(
        self, link: SessionLink, seconds: float, on_lost: Callable[[Exception], None]
    ) -> None:
        self._link = link
        self._seconds = seconds
        self._on_lost = on_lost
        self._stopped = False
        self._thread = start_thread(self._listen, self._end, "distributary heartbeat")

    def stop(self) -> None:
        """Ends the thread and its link."""
        self._end()
        if threading.current_thread() is not self._thread:
            self._thread.join(_END_SECONDS)

    def _end(self) -> None:
        self._stopped = True
        self._link.close()

    def _listen(self) -> None:
        # The task holds the request back, so that a broken connection is noticed at once.
        message = Message("alive", {"seconds": self._seconds})
        try:
            while not self._stopped:
                self._link.call(message, 3 * self._seconds)
        except Exception as error:
            if not self._stopped:
                self._on_lost(error)
