"""Sessions, which tie a task to one coordinator, always the newest.

A coordinator opens a session on every task. The task forgets everything when a newer session begins
or its process ends. It refuses messages of older coordinators, and of those whose session it does
not know.
"""

import itertools
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, final

from distributary._threads import start_thread
from distributary.devices import backends_started, local_devices_of, requested_cpu_devices
from distributary.errors import CoordinatorReplacedError, InvalidValueError, PSUnavailableError
from distributary.job import package_versions
from distributary.servers._links import (
    IDENTIFY,
    ConnectionLostError,
    DeadlineError,
    Link,
    Peer,
    RefusedError,
    check_sender,
)
from distributary.servers._messages import Message

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
        part: Another object with such methods.

    Attributes:
        incarnation: A text that no other tenant has.
        ended: Set when the session has ended.
    """

    def __init__(self, session: SessionId, name: str, part: object = None) -> None:
        self.session = session
        self.name = name
        self.incarnation = secrets.token_hex(8)
        self.ended = threading.Event()
        self._part = part
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
        name = f"_on_{message.kind}"
        owner = self if hasattr(self, name) else self._part
        reply: Message | None = getattr(owner, name)(message)
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
