"""Links without sockets, for clusters in one process and for fault tests."""

import functools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import final

from distributary.coordinator._links import (
    LOCAL,
    Calls,
    ConnectionLostError,
    Link,
    RefusedError,
    Service,
    answer,
    error_reply,
)
from distributary.coordinator._messages import Limits, Message, decode, encode
from distributary.dispatch import start_thread

__all__ = ["InProcessLink"]


@final
class InProcessLink(Link):
    """A `Link` to a service in the same process. A thread handles the requests.

    Args:
        service: The service to call; None for a process that has ended.
        name: Name of the other end in messages, such as `"ps 0"`.
        limits: If given, messages are encoded, checked and decoded as if they were sent over a
            network. None hands them over as they are.
        fault: Function that delivers a request in tests of faults. It is called in the link's
            thread with the request and a function that delivers it and returns the reply; it must
            return the reply. It can deliver twice, wait, or raise `ConnectionLostError` before or
            after delivery, which has the effect of `cut`.
    """

    def __init__(
        self,
        service: Service | None,
        *,
        name: str = "the service",
        limits: Limits | None = None,
        fault: Callable[[Message, Callable[[Message], Message]], Message] | None = None,
    ) -> None:
        self._name = name
        self._limits = limits
        self._fault = fault
        self._lock = threading.Lock()
        self._connection = self._connect(service, f"Nothing listens at {name}.")

    def cut(self) -> None:
        """Breaks the connection. Calls under way raise; the next call makes a new connection."""
        self._reconnect(self._connection, self._connection.service, "was cut")

    def kill(self) -> None:
        """Breaks the connection as if the process at the other end had been killed.

        All later calls raise, too. A request that is being handled is still finished.
        """
        self._reconnect(None, None, "broke: it was killed")

    def close(self) -> None:
        """Ends the link; see `Link`. A request that is being handled is still finished."""
        self._reconnect(None, None, "is closed")

    def _start(self, message: Message) -> "tuple[Calls, Future[Message]]":
        message = self._carry(message)
        with self._lock:  # so that the thread handles requests in the order of their numbers
            connection = self._connection
            number, future = connection.calls.begin()
            if connection.calls.is_waiting(number):
                connection.requests.put((number, message))
        return connection.calls, future

    def _connect(self, service: Service | None, why_not: str) -> "_Connection":
        connection = _Connection(self._name, service)
        if service is None:
            connection.end(RefusedError(why_not))
        else:
            name = f"distributary link to {self._name}"
            start_thread(functools.partial(self._serve, connection), self.close, name)
        return connection

    def _serve(self, connection: "_Connection") -> None:
        while (request := connection.requests.get()) is not None:
            self._deliver(connection, *request)

    def _deliver(self, connection: "_Connection", number: int, message: Message) -> None:
        service = connection.service
        if service is None or not connection.calls.is_waiting(number):  # cut, or given up
            return

        def deliver(message: Message, service: Service = service) -> Message:
            return self._carry(answer(service, message, LOCAL))

        try:
            reply = deliver(message) if self._fault is None else self._fault(message, deliver)
        except ConnectionLostError:
            self._reconnect(connection, service, "was cut")
        except Exception as error:
            connection.calls.reply(number, error_reply(error))
        else:
            connection.calls.reply(number, reply)

    def _carry(self, message: Message) -> Message:
        if self._limits is None:
            return message
        return decode(b"".join(encode(message, self._limits)), self._limits)

    def _reconnect(self, old: "_Connection | None", service: Service | None, event: str) -> None:
        """Replaces connection `old`, if it still is the current one. None means the current one."""
        reason = f"The connection to {self._name} {event}."
        with self._lock:
            if old is None:
                old = self._connection
            elif old is not self._connection:
                return
            self._connection = self._connect(service, reason)
        old.end(ConnectionLostError(reason))


@final
class _Connection:
    def __init__(self, name: str, service: Service | None) -> None:
        self.calls = Calls(name)
        self.service = service
        self.requests: queue.SimpleQueue[tuple[int, Message] | None] = queue.SimpleQueue()

    def end(self, error: ConnectionLostError) -> None:
        self.calls.end(error)
        self.requests.put(None)
