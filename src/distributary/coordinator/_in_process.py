"""Links without sockets, for clusters in one process and for tests of faults."""

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
    Peer,
    RefusedError,
    Service,
    answer,
    error_reply,
    wait,
)
from distributary.coordinator._messages import Limits, Message, decode, encode
from distributary.topology import start_thread

__all__ = ["InProcessLink"]


@final
class InProcessLink:
    """A `Link` to a service in the same process; a thread handles the requests.

    Args:
        service: Who is called; None for a process that has ended.
        peer: As whom the service sees the caller.
        name: The name of the other end in messages, `"ps 0"`.
        limits: Messages are encoded, checked and decoded, as if they went over a wire; None hands
            them over as they are.
        fault: What happens to a request on its way, for tests. It is called in the link's thread
            with the request and a function that delivers it and returns the reply, and returns the
            reply. It may deliver twice, wait, or raise `ConnectionLostError` before or after, which
            is what `cut` does.
    """

    def __init__(
        self,
        service: Service | None,
        peer: Peer = LOCAL,
        *,
        name: str = "the service",
        limits: Limits | None = None,
        fault: Callable[[Message, Callable[[Message], Message]], Message] | None = None,
    ) -> None:
        self._peer = peer
        self._name = name
        self._limits = limits
        self._fault = fault
        self._lock = threading.Lock()
        self._connection = self._connect(service, f"Nothing listens at {name}.")

    def start(self, message: Message) -> "Future[Message]":
        """Sends a request; see `Link`."""
        return self._start(message)[1]

    def call(self, message: Message, timeout: float | None = None) -> Message:
        """The reply to a request; see `Link`."""
        connection, future = self._start(message)
        return wait(connection.calls, future, timeout)

    def cut(self) -> None:
        """Breaks the connection: calls under way raise, the next one makes a new connection."""
        self._reconnect(self._connection, self._connection.service, "was cut")

    def kill(self) -> None:
        """Breaks the connection as if the process at the other end had been killed.

        Calls raise until `revive`. A request that is being handled is handled to its end.
        """
        self._reconnect(None, None, "broke: it was killed")

    def revive(self, service: Service) -> None:
        """Calls reach a service again, that of the process started in place of the killed one."""
        self._reconnect(None, service, "was cut")

    def close(self) -> None:
        """Ends the link; see `Link`. What is being handled is handled to its end."""
        self._reconnect(None, None, "is closed")

    def _start(self, message: Message) -> "tuple[_Connection, Future[Message]]":
        message = self._carry(message)
        with self._lock:  # so that the numbers are in the order of the thread's work
            connection = self._connection
            number, future = connection.calls.begin()
            if connection.calls.is_waiting(number):
                connection.requests.put((number, message))
        return connection, future

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
            return self._carry(answer(service, message, self._peer))

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
        """Replaces a connection unless that was done, or the present one if `old` is None."""
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
