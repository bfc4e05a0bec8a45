"""The channel between two processes of a job: messages of JSON, followed by bytes.

A message is one line of JSON, `[kind, content, size]`, and the `size` bytes that follow it. Every
conversation of the job uses it: the launchers of several hosts, the meeting of the workers at the
start, heartbeats, agreements.
"""

import contextlib
import hashlib
import hmac
import ipaddress
import json
import secrets
import select
import selectors
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, final

from distributary.cluster_resolver import join_address

_MAX_LINE_BYTES = 1 << 20
MAX_BLOB_BYTES = 1 << 40
_PART_BYTES = 1 << 20
_NUM_PROBES = 3
_RETRY_SECONDS = 0.1
# For one attempt to connect. Systems repeat a packet that got lost ever more rarely.
_TRY_SECONDS = 2.0
_MAX_SILENT = 64  # connections that have said nothing yet; more if more processes are expected
_MAX_FIRST_LINE_BYTES = 1 << 18  # enough for the names of thousands of workers


class ChannelClosedError(ConnectionError):
    """The other process has closed the connection, or has sent something else than messages."""


class NotAMessageError(ChannelClosedError):
    """The other process has sent something else than messages."""


class Message(NamedTuple):
    """One message.

    Attributes:
        kind: Kind of the message.
        content: Something JSON can hold.
        blob: Bytes that belong to it.
    """

    kind: str
    content: Any
    blob: bytes = b""


@final
class Channel:
    """One end of a connection between two processes of a job.

    Only one thread may receive at a time, and only one may send; the caller makes sure of it.

    Args:
        connection: A connected socket; the channel closes it.
        peer: Name of the process at the other end, for messages to people.
        max_line_bytes: Size of the longest line it accepts.

    Attributes:
        peer: As given.
        max_blob_bytes: Largest number of bytes it accepts behind a line.
    """

    def __init__(
        self, connection: socket.socket, peer: str, max_line_bytes: int = _MAX_LINE_BYTES
    ) -> None:
        self.peer = peer
        self.max_blob_bytes = MAX_BLOB_BYTES
        self._socket = connection
        self._max_line_bytes = max_line_bytes
        self._received = bytearray()
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)

    def fileno(self) -> int:
        """Returns the descriptor that becomes readable when something arrives; -1 when closed."""
        return self._socket.fileno()

    def send(self, kind: str, content: object = None, blob: bytes = b"") -> None:
        """Sends one message.

        Raises:
            ChannelClosedError: if the other process is gone.
        """
        line = json.dumps([kind, content, len(blob)]).encode() + b"\n"
        if len(blob) <= _PART_BYTES:  # one packet, if it fits
            line, blob = line + blob, b""
        self._send(memoryview(line))
        self._send(memoryview(blob))

    def receive(self, seconds: float | None = None) -> Message:
        """Waits for the next message.

        Args:
            seconds: Time to wait for the whole message; None for as long as it takes.

        Raises:
            TimeoutError: if it does not come in time.
            ChannelClosedError: if the other process is gone, or sends something else.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        while (message := self._next()) is None:
            left = None if deadline is None else deadline - time.monotonic()
            if (left is not None and left <= 0) or not self._wait(select.POLLIN, left):
                raise TimeoutError(f"{self.peer} has said nothing for {seconds:g} s")
            self._read()
        return message

    def arrived(self) -> Iterator[Message]:
        """Yields the messages that have arrived, without waiting for more.

        Raises:
            ChannelClosedError: after the last of them, if the other process is gone.
        """
        closed = None
        try:
            self._read()
        except ChannelClosedError as error:
            closed = error
        while (message := self._next()) is not None:
            yield message
        if closed is not None:
            raise closed

    def keep_alive(self, seconds: int) -> None:
        """Lets the connection break if the other machine does not answer for about `seconds`.

        Systems other than Linux use their own time.
        """
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sys.platform == "linux":
            interval = max(1, seconds // (1 + _NUM_PROBES))
            for option, value in (
                (socket.TCP_KEEPIDLE, interval),
                (socket.TCP_KEEPINTVL, interval),
                (socket.TCP_KEEPCNT, _NUM_PROBES),
                (socket.TCP_USER_TIMEOUT, 1000 * seconds),  # for data on its way
            ):
                self._socket.setsockopt(socket.IPPROTO_TCP, option, value)

    def own_address(self) -> str:
        """Returns the address of this machine to which the other one is connected."""
        return str(self._socket.getsockname()[0])

    def called_address(self, is_caller: bool) -> str:
        """Returns the address and port that was called to make this connection.

        Both ends see the same one, unless a program in between passes the connection on.
        """
        called = self._socket.getpeername() if is_caller else self._socket.getsockname()
        return join_address(*called[:2])

    def detached(self) -> socket.socket:
        """Returns the connection, in place of the channel, for bytes that are no messages."""
        self._socket.setblocking(True)
        return self._socket

    def shut(self) -> None:
        """Ends the conversation, so that a thread that waits for a message stops waiting."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Frees the connection."""
        self._socket.close()

    def _send(self, data: memoryview) -> None:
        while data:
            try:
                data = data[self._socket.send(data) :]
            except BlockingIOError:
                self._wait(select.POLLOUT, None)
            except OSError as error:
                raise ChannelClosedError(f"{self.peer} is gone: {error}") from None

    def _wait(self, event: int, seconds: float | None) -> bool:
        if self._socket.fileno() < 0:
            raise ChannelClosedError(f"the connection to {self.peer} is closed")
        poll = select.poll()
        poll.register(self._socket, event)
        return bool(poll.poll(None if seconds is None else seconds * 1000))

    def _read(self) -> None:
        try:
            data = self._socket.recv(_PART_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            raise ChannelClosedError(f"{self.peer} is gone: {error}") from None
        if not data:
            raise ChannelClosedError(f"{self.peer} has closed its connection")
        self._received += data

    def _next(self) -> Message | None:
        """Takes a complete message from the received bytes; None if there is none."""
        received = self._received
        end = received.find(b"\n")
        if end < 0:
            if len(received) > self._max_line_bytes:
                raise self._not_a_message()
            return None
        try:
            kind, content, size = json.loads(received[:end])
            is_message = type(kind) is str and type(size) is int
        except (ValueError, TypeError, RecursionError):
            is_message = False
        if not is_message or not 0 <= size <= self.max_blob_bytes:
            raise self._not_a_message()
        if len(received) < end + 1 + size:
            return None
        blob = bytes(memoryview(received)[end + 1 : end + 1 + size])
        del received[: end + 1 + size]
        return Message(kind, content, blob)

    def _not_a_message(self) -> NotAMessageError:
        return NotAMessageError(f"{self.peer} has sent {bytes(self._received[:100])!r}")


def bound_address(host: str, port: int) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    """Returns the address at which a process of a host listens, and its family.

    Raises:
        OSError: if the host is unknown.
    """
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    # IPv4 first: a name may have an IPv6 address even where IPv6 is switched off.
    family, *_, address = min(addresses, key=lambda info: info[0] != socket.AF_INET)
    return family, address


def called_host(host: str, port: int) -> str:
    """Returns the host to connect to: the bound address on loopback, else the host itself.

    A name of the loopback can have several addresses, and other users can listen at the others.

    Raises:
        OSError: if the host is unknown.
    """
    _, (address, *_) = bound_address(host, port)
    return address if ipaddress.ip_address(address.partition("%")[0]).is_loopback else host


def listening(host: str, port: int) -> socket.socket:
    """Returns a socket that listens at an address of this machine, and at no other one.

    Raises:
        OSError: if the host is unknown or not this machine, or the port is taken.
    """
    family, address = bound_address(host, port)
    return socket.create_server(address, family=family)


def connected(host: str, port: int, peer: str, seconds: float) -> Channel:
    """Connects to another process, which may only be starting, so it tries again and again.

    Args:
        host: Host of the other process.
        port: Port at which the other process listens.
        peer: Name of the other process, for messages to people.
        seconds: Time to try.

    Raises:
        OSError: if the last attempt failed.
    """
    deadline = time.monotonic() + seconds
    while True:
        left = deadline - time.monotonic()
        try:
            seconds = min(max(left, _RETRY_SECONDS), _TRY_SECONDS)
            return Channel(socket.create_connection((called_host(host, port), port), seconds), peer)
        except OSError:
            if left <= 0:
                raise
        time.sleep(min(_RETRY_SECONDS, left))


@final
@dataclass(eq=False)
class ConnectionAcceptor:
    """A listener for all connections to a listening socket, for use by one thread.

    It hangs up on connections that speak another language. While many are silent, it also hangs up
    on the one that has been silent for longest.

    Args:
        server: A listening socket. The caller closes it.
        num_expected: Number of processes that should come.
        on_connect: Called with every new channel, before the other end has said anything.
    """

    server: socket.socket
    num_expected: int
    on_connect: Callable[[Channel], None] = lambda channel: None

    def __post_init__(self) -> None:
        self._max_silent = max(_MAX_SILENT, self.num_expected)
        self._silent: dict[Channel, None] = {}  # the oldest first
        self._selector = selectors.DefaultSelector()
        self.server.setblocking(False)
        self._selector.register(self.server, selectors.EVENT_READ)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for channel in self._silent:
            channel.close()
        self._selector.close()

    def first_messages(self, deadline: float) -> Iterator[tuple[Channel, Message]]:
        """Yields the first message of every connection, with its channel, until a deadline.

        The caller takes the channel and closes it.

        Args:
            deadline: As of `time.monotonic`.
        """
        for channel, message in self.messages(deadline):
            if message is not None:
                yield channel, message

    def messages(self, deadline: float) -> Iterator[tuple[Channel, Message | None]]:
        """Yields the same as `first_messages`, and the messages from kept channels.

        None in place of a message means that a kept channel has ended.
        """
        while (left := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                if key.data is None:
                    self._accept()
                elif key.data in self._silent:
                    yield from self._first(key.data)
                elif key.data.fileno() >= 0:  # not closed since
                    yield from self._later(key.data)

    def keep(self, channel: Channel) -> None:
        """Hears a channel that has arrived from now on. `messages` closes it when it ends."""
        self._selector.register(channel, selectors.EVENT_READ, channel)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the other end has hung up
            connection, address = self.server.accept()
            channel = Channel(connection, str(address[0]), _MAX_FIRST_LINE_BYTES)
            channel.max_blob_bytes = 0  # it is not known yet who it is
            self._silent[channel] = None
            self._selector.register(channel, selectors.EVENT_READ, channel)
            self.on_connect(channel)
        if len(self._silent) > self._max_silent:
            self._hang_up(next(iter(self._silent)))

    def _first(self, channel: Channel) -> Iterator[tuple[Channel, Message]]:
        try:
            message = next(channel.arrived(), None)
        except ChannelClosedError:
            self._hang_up(channel)
            return
        if message is None:  # not complete yet
            return
        self._selector.unregister(channel)
        del self._silent[channel]
        channel.max_blob_bytes = MAX_BLOB_BYTES
        yield channel, message

    def _later(self, channel: Channel) -> Iterator[tuple[Channel, Message | None]]:
        try:
            for message in channel.arrived():
                yield channel, message
        except ChannelClosedError:
            self._selector.unregister(channel)
            channel.close()
            yield channel, None

    def _hang_up(self, channel: Channel) -> None:
        self._selector.unregister(channel)
        del self._silent[channel]
        channel.close()


# Proofs that a process knows the job's secret, without sending the secret.
#
# A proof is an HMAC over what both ends have said, including a challenge from each end. So a proof
# that was overheard proves nothing in another conversation.


def new_challenge() -> str:
    """Returns a random text that no conversation has used before."""
    return secrets.token_hex(32)


def proof(secret: str, role: str, *said: Any) -> str:
    """Returns a text that only a process that knows the secret can make.

    Args:
        secret: The secret.
        role: The side that proves it, so that nobody can send a proof back to its maker.
        said: The statements to prove, with the challenges of both ends; JSON must be able to hold
            them.
    """
    content = json.dumps([role, *said], sort_keys=True)
    return hmac.new(secret.encode(), content.encode(), hashlib.sha256).hexdigest()


def is_proof(candidate: object, secret: str, role: str, *said: Any) -> bool:
    """Returns whether `candidate` is the `proof` of the same arguments."""
    expected = proof(secret, role, *said)
    return isinstance(candidate, str) and hmac.compare_digest(expected.encode(), candidate.encode())
