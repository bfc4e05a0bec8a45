"""What all workers of a job tell each other, on the host."""

import atexit
import hmac
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import final

import numpy as np

from distributary.cluster_resolver import MultiWorker
from distributary.errors import ClusterError
from distributary.strategies._rendezvous import bind_address
from distributary.topology import job_programs

_CONNECT_SECONDS = 60.0
_GREETING_SECONDS = 5.0
_TOKEN_BYTES = 16
_LENGTH = struct.Struct("<I")


@final
class Exchange:
    """A message of every worker to every worker, over connections to the first one.

    Made and called by all workers at the same points of their programs. It takes tens of
    microseconds, where JAX's key-value store takes about a millisecond, and a collective of the
    devices would wait for the steps before it.

    Args:
        place: The cluster and which of its workers this process is.
        from_chief: Gives all workers the arrays of the first one.

    Raises:
        ClusterError: if the workers cannot connect.
    """

    def __init__(
        self, place: MultiWorker, from_chief: Callable[[list[np.ndarray]], list[np.ndarray]]
    ) -> None:
        self.names = tuple(peer.name for peer in place.workers)
        peers = tuple(map(str, place.workers))
        self._lock = threading.Lock()
        number = place.worker_number
        assert number is not None
        self.number = number
        server = _listening(place) if number == 0 else None
        port = 0 if server is None else server.getsockname()[1]
        token = np.frombuffer(secrets.token_bytes(_TOKEN_BYTES), np.uint8)
        agreed_port, token = from_chief([np.array([port], np.int32), token])
        if not agreed_port[0]:
            raise ClusterError(
                f"{peers[0]} cannot listen for the other workers: the address of a worker"
                " must be one of its own machine."
            )
        if server is not None:
            with server:
                links = _accepted(server, token.tobytes(), peers)
        else:
            first = place.workers[0]
            try:
                connection = socket.create_connection(
                    (first.host, int(agreed_port[0])), _CONNECT_SECONDS
                )
                connection.sendall(token.tobytes() + _LENGTH.pack(number))
            except OSError as error:
                raise ClusterError(
                    f"{self.names[number]} cannot connect to {first}, port {agreed_port[0]}:"
                    f" {error}. Workers must reach every port of the first one."
                ) from error
            links = [_Link(connection, str(first))]
        for link in links:
            link.connection.settimeout(None)
            link.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._is_first = server is not None
        self._links = links
        # Before JAX waits for the other workers at the end, who may be waiting here for this one.
        atexit.register(weakref.finalize(self, _close, links))

    def __call__(self, message: bytes) -> list[bytes]:
        """The messages of all workers, in worker order; none may be empty.

        Raises:
            ClusterError: if a worker is gone.
            WorkerLostError: if that was noticed.
        """
        with self._lock:
            try:
                return self._collect(message) if self._is_first else self._ask(message)
            except _GoneError as gone:
                _close(self._links)  # so that the others hear of it, too
                error = ClusterError(
                    f"{gone.peer} has closed its connection, and what it has to say was needed"
                    " here. Look at its output. If it ended without an error: all workers must take"
                    " the same steps over the same datasets."
                )
                explain = job_programs.explain
                raise (error if explain is None else explain(error)) from None

    def _collect(self, message: bytes) -> list[bytes]:
        messages = [message, *(link.receive() for link in self._links)]
        # Mostly all say the same.
        answer = [b""] if messages.count(message) == len(messages) else messages
        for link in self._links:
            link.send(answer)
        return messages

    def _ask(self, message: bytes) -> list[bytes]:
        (link,) = self._links
        link.send([message])
        first = link.receive()
        if not first:
            return [message] * len(self.names)
        return [first, *(link.receive() for _ in self.names[1:])]


class _GoneError(Exception):
    def __init__(self, peer: str) -> None:
        self.peer = peer


@final
class _Link:
    """The connection to another worker."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        self.connection = connection
        # One for the whole life of the connection: it reads ahead.
        self._reader = connection.makefile("rb")
        self.peer = peer

    def send(self, messages: Sequence[bytes]) -> None:
        data = b"".join([_LENGTH.pack(len(message)) + message for message in messages])
        try:
            self.connection.sendall(data)
        except OSError:
            raise _GoneError(self.peer) from None

    def receive(self) -> bytes:
        (size,) = _LENGTH.unpack(self.read(_LENGTH.size))
        return self.read(size)

    def read(self, size: int) -> bytes:
        try:
            data = self._reader.read(size)
        except (OSError, ValueError):  # ValueError once it is closed
            data = b""
        if len(data) < size:
            raise _GoneError(self.peer)
        return data

    def close(self) -> None:
        self._reader.close()
        self.connection.close()


def _listening(place: MultiWorker) -> socket.socket | None:
    """A socket on a free port of the first worker's address, None if that is not possible."""
    host, _, _ = bind_address(place.workers[0]).rpartition(":")
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    try:
        return socket.create_server((host.strip("[]"), 0), family=family)
    except OSError:
        return None


def _accepted(server: socket.socket, token: bytes, peers: Sequence[str]) -> list[_Link]:
    """The connections to the other workers, in worker order."""
    arrived: dict[int, _Link] = {}
    deadline = time.monotonic() + _CONNECT_SECONDS
    while len(arrived) < len(peers) - 1:
        server.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            connection, _ = server.accept()
        except TimeoutError:
            missing = [p for number, p in enumerate(peers) if number and number not in arrived]
            raise ClusterError(
                f"{', '.join(missing)} did not connect to {peers[0]} within {_CONNECT_SECONDS:g} s."
                " Workers must reach every port of the first one."
            ) from None
        connection.settimeout(_GREETING_SECONDS)
        link = _Link(connection, "")
        try:
            known = hmac.compare_digest(link.read(_TOKEN_BYTES), token)
            (number,) = _LENGTH.unpack(link.read(_LENGTH.size))
        except _GoneError:
            known = False
        if not known:  # somebody else's program
            link.close()
            continue
        link.peer = peers[number]
        arrived[number] = link
    return [arrived[number] for number in range(1, len(peers))]


def _close(links: Sequence[_Link]) -> None:
    for link in links:
        link.close()
