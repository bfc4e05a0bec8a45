"""Calls between the tasks of a cluster, independent of how messages are sent.

A link carries the calls of one task to another: numbered requests, and replies with the number of
their request. The requests of a link are handled one after the other, in the order of `start`. To
avoid waiting behind a long one, open a second link.
"""

import itertools
import threading
import time
import traceback
from abc import ABC, abstractmethod
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
]

_ERROR_KIND = "error"  # a kind of reply that services do not use
_MAX_ERROR_CHARACTERS = 20_000
_NUM_PARTS = 4  # in which the time for a reply is measured; see `Link.call`
# Builtin exceptions that can be made of one text; no warnings.
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
    """A call without a reply because the connection broke. It was handled once or not at all."""


class RefusedError(ConnectionLostError):
    """A failed connection: nothing listens at the other end, as its process has ended."""


class UnauthenticatedError(ConnectionLostError):
    """A failed connection: one end does not know the secret of the job."""


class DeadlineError(DistributaryError, TimeoutError):
    """A call without a reply in time. It was or will be handled once, or not at all."""


@final
@dataclass(frozen=True, slots=True)
class Peer:
    """The caller of a service.

    Args:
        role: `"chief"`, `"worker"` or `"ps"`, from the certificate. Without a certificate it is
            `"local"`: a caller in the same process, one that knows the secret of the job, or
            anyone if the server is insecure.
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
class Calls:
    """The calls of a connection that wait for their reply.

    Args:
        target: Name of the task called, for messages.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._futures: dict[int, Future[Message]] = {}
        self._end: Exception | None = None  # set by `end`

    def begin(self) -> "tuple[int, Future[Message]]":
        """Returns a number for a call, and the future of its reply; after `end`, it has failed."""
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
        """Returns whether a caller still waits for a reply."""
        return number in self._futures

    def forget(self, future: "Future[Message]") -> None:
        """Notes that the caller no longer waits for a reply."""
        with self._lock:
            for number, other in self._futures.items():
                if other is future:
                    del self._futures[number]
                    return

    def reply(self, number: int, message: Message) -> None:
        """Hands a reply that has come to its caller."""
        with self._lock:
            future = self._futures.pop(number, None)
        if future is None:  # the caller has given up
            return
        if message.kind == _ERROR_KIND:
            future.set_exception(exception_of(message.fields, self.target))
        else:
            future.set_result(message)

    def end(self, error: Exception) -> None:
        """Fails all calls, present and later ones: no reply will come. The first error counts."""
        with self._lock:
            self._end = self._end or error
            futures = list(self._futures.values())
            self._futures.clear()
        for future in futures:
            future.set_exception(_again(error))


class Link(ABC):
    """A connection over which one task calls another."""

    @abstractmethod
    def _start(self, message: Message) -> "tuple[Calls, Future[Message]]":
        """Sends a request; returns the calls of its connection, and the future of its reply."""

    @abstractmethod
    def close(self) -> None:
        """Ends the link. Calls under way raise `ConnectionLostError`."""

    def start(self, message: Message) -> "Future[Message]":
        """Sends a request; replies come in the order of the requests.

        Returns:
            A future of the reply, or of an exception as raised by `call`. It cannot be cancelled.

        Raises:
            WireError: if the message cannot be encoded.
        """
        return self._start(message)[1]

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
        calls, future = self._start(message)
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
        calls.forget(future)
        raise DeadlineError(f"{calls.target} has not replied within {timeout:g} s.")


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


# Without ConnectionLostError and DeadlineError: if a service raises them, it is for another link.
_EXCEPTIONS: Final = {
    cls.__name__: cls
    for cls in (
        *(getattr(errors, name) for name in errors.__all__ if name != "DistributaryWarning"),
        WireError,
        *_BUILTINS,
    )
}
