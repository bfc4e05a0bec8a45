"""The channel between two processes of a job: messages of JSON, followed by bytes.

A message is one line of JSON, `[kind, content, size]`, and the `size` bytes that follow it. Every
conversation of the job uses it: the launchers of several hosts, the meeting of the workers at the
start, heartbeats, agreements.
"""

import contextlib
import json
import select
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, final

_MAX_LINE_BYTES = 1 << 20
MAX_BLOB_BYTES = 1 << 40
_PART_BYTES = 1 << 20
_NUM_PROBES = 3
_RETRY_SECONDS = 0.1


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

    def send(self, kind: str, content: Any = None, blob: bytes = b"") -> None:
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
            return Channel(socket.create_connection((host, port), max(left, _RETRY_SECONDS)), peer)
        except OSError:
            if left <= 0:
                raise
        time.sleep(min(_RETRY_SECONDS, left))
