"""The reception of a job: hears its processes at a port to which strangers can connect, too."""

import contextlib
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from typing import Self, final

from distributary.job._channel import MAX_BLOB_BYTES, Channel, ChannelClosedError, Message

__all__ = ["Reception"]

_MAX_SILENT = 64  # connections that have said nothing yet; more if more processes are expected
_MAX_LINE_BYTES = 1 << 18  # enough for the names of thousands of workers


@final
class Reception:
    """A listener for all connections to a listening socket, for use by one thread.

    It hangs up on connections that speak another language. While many are silent, it also hangs up
    on the one that has been silent for longest.

    Args:
        server: A listening socket. The caller closes it.
        num_expected: Number of processes that should come.
        greet: Called with every new channel, before the other end has said anything.
    """

    def __init__(
        self,
        server: socket.socket,
        num_expected: int,
        greet: Callable[[Channel], None] | None = None,
    ) -> None:
        self._server = server
        self._max_silent = max(_MAX_SILENT, num_expected)
        self._greet = greet
        self._silent: dict[Channel, None] = {}  # the oldest first
        self._selector = selectors.DefaultSelector()
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for channel in self._silent:
            channel.close()
        self._selector.close()

    def arrivals(self, deadline: float) -> Iterator[tuple[Channel, Message]]:
        """Yields the first message of every connection, with its channel, until a deadline.

        The caller takes the channel and closes it.

        Args:
            deadline: As of `time.monotonic`.
        """
        for channel, message in self.messages(deadline):
            if message is not None:
                yield channel, message

    def messages(self, deadline: float) -> Iterator[tuple[Channel, Message | None]]:
        """Yields the same as `arrivals`, and the messages from kept channels.

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
            connection, address = self._server.accept()
            channel = Channel(connection, str(address[0]), _MAX_LINE_BYTES)
            channel.max_blob_bytes = 0  # it is not known yet who it is
            self._silent[channel] = None
            self._selector.register(channel, selectors.EVENT_READ, channel)
            if self._greet is not None:
                self._greet(channel)
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
