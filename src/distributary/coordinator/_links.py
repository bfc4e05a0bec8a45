"""How the tasks of a cluster call each other, whatever is in between.

A link carries the calls of one task to another one: numbered requests, and replies that are matched
by number. Requests of one link are handled one after the other, in the order of `start`; who does
not want to wait behind a long one opens a second link.
"""

import itertools
import threading
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, Protocol, final

from distributary import errors
from distributary.coordinator._messages import JSON, Message, WireError
from distributary.errors import DistributaryError

__all__ = [
    "LOCAL",
    "Calls",
    "ConnectionLostError",
    "DeadlineError",
    "Link",
    "Peer",
    "RefusedError",
    "Service",
    "UnauthenticatedError",
    "answer",
    "error_reply",
    "exception_of",
    "wait",
]

_ERROR_KIND = "error"  # of replies; services do not use it
_MAX_ERROR_CHARACTERS = 20_000
_NUM_PARTS = 4  # of the time that a reply may take
# Those that are made of a text, and no warnings.
_BUILTINS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    BufferError,
    EOFError,
    Exception,
    FileExistsError,
    FileNotFoundError,
    FloatingPointError,
    ImportError,
    IndexError,
    IsADirectoryError,
    KeyError,
    LookupError,
    MemoryError,
    ModuleNotFoundError,
    NameError,
    NotADirectoryError,
    NotImplementedError,
    OSError,
    OverflowError,
    PermissionError,
    RecursionError,
    ReferenceError,
    RuntimeError,
    StopIteration,
    TimeoutError,
    TypeError,
    UnicodeError,
    ValueError,
    ZeroDivisionError,
)


class ConnectionLostError(DistributaryError, ConnectionError):
    """A call has no reply because the connection broke: it was handled once or not at all."""


class RefusedError(ConnectionLostError):
    """There is no connection because nothing listens at the other end: its process has ended."""


class UnauthenticatedError(ConnectionLostError):
    """There is no connection because one end does not know the secret of the job."""


class DeadlineError(DistributaryError, TimeoutError):
    """A call has no reply within its time: it was or will be handled once or not at all."""


@final
@dataclass(frozen=True, slots=True)
class Peer:
    """Who calls.

    Args:
        role: `"chief"`, `"worker"` or `"ps"` from the certificate, or `"local"` if there is none:
            the same process, who knows the secret of the job, or anybody if it is insecure.
        identity: What identifies the peer in messages: the name in its certificate and its address.
    """

    role: str
    identity: str


LOCAL: Final = Peer("local", "local")


class Service(Protocol):
    """What a task does for others."""

    def handle(self, message: Message, peer: Peer) -> Message:
        """The reply to a request; called by several threads, one for each link.

        The arrays of the request must not be written to; those of the reply must not change any
        more, as they are sent later.

        Args:
            message: The request.
            peer: Who sent it.

        Raises:
            Exception: what the caller gets raised, by type and text.
        """


class Link(Protocol):
    """Calls one task."""

    def start(self, message: Message) -> "Future[Message]":
        """Sends a request; replies come in the order of the requests.

        Returns:
            The reply to come, or an exception of `call`. It cannot be cancelled.

        Raises:
            WireError: if the message cannot be encoded.
        """

    def call(self, message: Message, timeout: float | None = None) -> Message:
        """The reply to a request.

        Args:
            message: The request. Its arrays must not change before the reply.
            timeout: Seconds to wait; None waits for the reply or the end of the connection.

        Raises:
            ConnectionLostError: if there is no connection, or none any more. The next call makes a
                new one.
            DeadlineError: if there is no reply in time.
            WireError: if the message cannot be sent or the other end does not understand it.
            Exception: what the service has raised, if the type is one of `distributary.errors` or
                a usual builtin; else the nearest of these. A note has the other end's traceback.
        """

    def close(self) -> None:
        """Ends the link: calls under way raise `ConnectionLostError`."""


@final
class Calls:
    """The calls of a connection that wait for their reply.

    Args:
        target: Whom they are for, in messages.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._futures: dict[int, Future[Message]] = {}
        self._end: Exception | None = None  # after `end`

    def begin(self) -> "tuple[int, Future[Message]]":
        """A number and what becomes the reply; after `end`, the exception."""
        future: Future[Message] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            number = next(self._numbers)
            if self._end is None:
                self._futures[number] = future
            else:
                future.set_exception(_again(self._end))
        return number, future

    def is_waiting(self, number: int) -> bool:
        """Whether anybody waits for a reply."""
        return number in self._futures

    def forget(self, future: "Future[Message]") -> None:
        """Nobody waits for a reply any more."""
        with self._lock:
            for number, other in self._futures.items():
                if other is future:
                    del self._futures[number]
                    return

    def reply(self, number: int, message: Message) -> None:
        """A reply has come."""
        with self._lock:
            future = self._futures.pop(number, None)
        if future is None:  # the caller has given up
            return
        if message.kind == _ERROR_KIND:
            future.set_exception(exception_of(message.fields, self.target))
        else:
            future.set_result(message)

    def end(self, error: Exception) -> None:
        """No reply will come: every call raises an exception, this one if it is the first."""
        with self._lock:
            self._end = self._end or error
            futures = list(self._futures.values())
            self._futures.clear()
        for future in futures:
            future.set_exception(_again(error))


def answer(service: Service, message: Message, peer: Peer) -> Message:
    """The reply of a service, which may say that it has raised an exception."""
    try:
        return service.handle(message, peer)
    except Exception as error:
        return error_reply(error)


def error_reply(error: Exception) -> Message:
    """The reply that raises an exception at the other end."""
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


def wait(calls: Calls, future: "Future[Message]", timeout: float | None) -> Message:
    """The reply, as `Link.call` returns or raises it.

    Silence is counted in parts of the time: one that took much longer than it should says that this
    process was frozen or had no processor itself, and does not count.
    """
    if timeout is None:
        return future.result()
    num_silent, part = 0, timeout / _NUM_PARTS
    while num_silent < _NUM_PARTS:
        begin = time.monotonic()
        try:
            return future.result(part)
        except TimeoutError:
            if future.done():  # an exception of the service, or a reply that has just come
                return future.result()
        num_silent += time.monotonic() - begin < 2 * part
    calls.forget(future)
    raise DeadlineError(f"{calls.target} has not replied within {timeout:g} s.")


def exception_of(fields: Mapping[str, JSON], target: str) -> Exception:
    """The exception that `error_reply` has described in its fields, raised at `target`."""
    kind, text, trace = (fields.get(name) for name in ("type", "text", "traceback"))
    cls = _EXCEPTIONS.get(str(kind), RuntimeError)
    error = cls(str(text))
    error.add_note(f"Raised at {target}:\n{trace}")
    return error


def _again(error: Exception) -> Exception:
    """An exception of its own for every call: raising one adds to its traceback."""
    return type(error)(*error.args)


# Not ConnectionLostError and DeadlineError: those of the service are about another link.
_EXCEPTIONS: Final = {
    cls.__name__: cls
    for cls in (
        *(getattr(errors, name) for name in errors.__all__ if name != "DistributaryWarning"),
        WireError,
        *_BUILTINS,
    )
}
