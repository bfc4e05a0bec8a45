"""Sessions: what a task does for one coordinator, and for no older one.

A coordinator opens a session at every task. The task forgets everything when a newer session
begins, and when its process ends; messages of an older coordinator, and of one whose session the
task does not know, are refused.
"""

import itertools
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, final

from distributary.coordinator._links import (
    ConnectionLostError,
    DeadlineError,
    Link,
    Peer,
    RefusedError,
    Service,
)
from distributary.coordinator._messages import Message
from distributary.errors import (
    CoordinatorReplacedError,
    InvalidValueError,
    PSUnavailableError,
)

__all__ = [
    "Heartbeat",
    "ServerLink",
    "SessionId",
    "SessionLink",
    "SessionLostError",
    "SessionService",
    "Tenant",
    "hello",
    "new_session",
]

SessionId: TypeAlias = list[Any]  # nanoseconds, random text: the larger of two is the newer one

# For a new connection to a server, also if the other machine says that its process has ended.
_BREAK_SECONDS, _ENDED_SECONDS = 2.0, 0.1
_PAUSE_SECONDS = 0.05  # before a call is repeated
_UNKNOWN, _NEWER = "unknown session", "newer session"


class SessionLostError(ConnectionLostError):
    """The task does not know the session: it was started again."""


class Tenant(Service, Protocol):
    """What a task does for one session."""

    def close(self) -> None:
        """The session has ended: frees what was kept for it."""

    def statistics(self) -> dict[str, float]:
        """Numbers about what was done, by name."""


def new_session(after: SessionId | None = None) -> SessionId:
    """A session that is newer than others."""
    nanoseconds = time.time_ns()
    if after is not None:  # by the clock of another machine
        nanoseconds = max(nanoseconds, after[0] + 1)
    return [nanoseconds, secrets.token_hex(8)]


def hello(session: SessionId) -> Message:
    """The message with which a session begins, or goes on after a connection has broken.

    The reply has a text `incarnation`, which is another one when the task has forgotten the session
    in between.
    """
    return Message("hello", {"session": session})


@final
class SessionService:
    """A task, with a service of its own for every session; only the newest is served.

    Messages, besides those of the service, all with the session:

        hello              -> incarnation; begins a session
        alive   seconds    the reply comes after as many seconds, or when the session ends

    The replies `unknown session` and `newer session` refuse a message. What has the field `request`
    is handled once and answered again if it is sent again at once.

    Args:
        name: Of the task, in messages.
        make: Makes the service of a session.
    """

    def __init__(self, name: str, make: Callable[[SessionId], Tenant]) -> None:
        self._name = name
        self._make = make
        self._lock = threading.Lock()
        self._stay: _Stay | None = None

    def handle(self, message: Message, peer: Peer) -> Message:
        """The reply to a message.

        Raises:
            InvalidValueError: for messages without a session.
        """
        asked: Any = message.fields.get("session")
        if not _is_session(asked):
            raise InvalidValueError(
                f"{self._name} got the message {message.kind!r} of session {asked!r}, expected"
                " [nanoseconds, text]."
            )
        if message.kind == "hello":
            self._begin(asked)
        stay = self._stay
        if stay is None or asked > stay.session:
            return Message(_UNKNOWN)
        if asked < stay.session:
            return Message(_NEWER, {"session": stay.session})
        if message.kind == "hello":
            return Message("ok", {"incarnation": stay.incarnation})
        if message.kind == "alive":
            stay.ended.wait(float(message.fields["seconds"]))
            return Message("ok")
        try:
            return stay.handle(message, peer)
        except Exception:
            if stay.ended.is_set():  # in the meantime; this explains any error
                return self.handle(message, peer)
            raise

    def statistics(self) -> dict[str, float]:
        """Numbers about what was done in the session, by name."""
        stay = self._stay
        return {} if stay is None else stay.tenant.statistics()

    def close(self) -> None:
        """Ends the session."""
        with self._lock:
            stay, self._stay = self._stay, None
        if stay is not None:
            stay.end()

    def _begin(self, session: SessionId) -> None:
        with self._lock:
            old = self._stay
            if old is not None and session <= old.session:
                return
            self._stay = _Stay(session, self._make(session))
        if old is not None:
            old.end()


@final
class _Stay:
    """A session at a task."""

    def __init__(self, session: SessionId, tenant: Tenant) -> None:
        self.session = session
        self.incarnation = secrets.token_hex(8)
        self.ended = threading.Event()
        self.tenant = tenant
        self._once = threading.Lock()
        self._request = 0
        self._reply = Message("ok")

    def handle(self, message: Message, peer: Peer) -> Message:
        request = message.fields.get("request")
        if request is None:
            return self.tenant.handle(message, peer)
        with self._once:
            if request != self._request:
                self._reply = self.tenant.handle(message, peer)
                self._request = request
            return self._reply

    def end(self) -> None:
        self.ended.set()
        self.tenant.close()


@final
class SessionLink:
    """Calls a task within a session.

    Args:
        link: To the task.
        name: Of the task, in messages.
        session: The session.
    """

    def __init__(self, link: Link, name: str, session: SessionId) -> None:
        self._link = link
        self.name = name
        self._session = session

    def call(self, message: Message, timeout: float | None = None) -> Message:
        """The reply to a request, as `Link.call`.

        Raises:
            SessionLostError: if the task does not know the session.
            CoordinatorReplacedError: if it has begun a newer one.
        """
        fields = {**message.fields, "session": self._session}
        reply = self._link.call(
            Message(message.kind, fields, message.arrays, message.blobs), timeout
        )
        if reply.kind == _UNKNOWN:
            raise SessionLostError(f"{self.name} was started again.")
        if reply.kind == _NEWER:
            raise CoordinatorReplacedError(
                f"{self.name} works for another coordinator, which has started later than this"
                " one. Only one coordinator at a time can use the workers and servers of a job."
            )
        return reply

    def close(self) -> None:
        """Ends the link."""
        self._link.close()


@final
class ServerLink:
    """Calls a server within a session; short breaks of the connection are not seen.

    Args:
        link: To the server.

    Attributes:
        sent_bytes: Of the arrays of requests.
        received_bytes: Of the arrays of replies.
    """

    def __init__(self, link: SessionLink) -> None:
        self._link = link
        self._once = threading.Lock()
        self._requests = itertools.count(1)
        self.sent_bytes = 0
        self.received_bytes = 0

    def call(self, message: Message, timeout: float | None = None) -> Message:
        """The reply to a request, which may be sent several times.

        Args:
            message: The request.
            timeout: Seconds to wait; None waits.

        Raises:
            PSUnavailableError: if the server cannot be reached, or has forgotten the session.
            CoordinatorReplacedError: if it has begun a newer one.
            Exception: as `Link.call`.
        """
        broken: float | None = None
        while True:
            try:
                reply = self._link.call(message, timeout)
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
            time.sleep(_PAUSE_SECONDS)

    def call_once(self, message: Message) -> Message:
        """The reply to a request, which is handled once even if it is sent several times.

        Only the coordinator uses it, and one link for each server. Errors are those of `call`.
        """
        with self._once:
            fields = {**message.fields, "request": next(self._requests)}
            return self.call(Message(message.kind, fields, message.arrays, message.blobs))

    def close(self) -> None:
        """Ends the link."""
        self._link.close()

    def _lost(self, event: str) -> PSUnavailableError:
        return PSUnavailableError(
            f"{self._link.name} {event}. Create the strategy and its variables again, and restore"
            " them from the last checkpoint."
        )


@final
class Heartbeat:
    """Listens to a task, in a thread.

    Args:
        link: To the task; for nothing else.
        seconds: Time between two signs of life.
        on_lost: Called once, with the error, when there are none any more.
    """

    def __init__(
        self, link: SessionLink | ServerLink, seconds: float, on_lost: Callable[[Exception], None]
    ) -> None:
        self._link = link
        self._seconds = seconds
        self._on_lost = on_lost
        self._stopped = False
        threading.Thread(target=self._listen, name="distributary heartbeat", daemon=True).start()

    def stop(self) -> None:
        """Ends it, and its link."""
        self._stopped = True
        self._link.close()

    def _listen(self) -> None:
        # The task keeps the request, so that a connection that breaks is seen at once.
        message = Message("alive", {"seconds": self._seconds})
        try:
            while not self._stopped:
                self._link.call(message, 3 * self._seconds)
        except Exception as error:
            if not self._stopped:
                self._on_lost(error)


def _is_session(value: Any) -> bool:
    match value:
        case [int(), str()]:
            return True
    return False
