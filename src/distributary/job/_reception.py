"""Lets the processes of a job connect where strangers can, too."""

import contextlib
import selectors
import socket
import time
from collections.abc import Iterator
from typing import final

from distributary.job._channel import Channel, ChannelClosedError, Message

__all__ = ["Reception"]

_MAX_SILENT = 128  # connections that have not said anything yet, if fewer workers are expected
_MAX_LINE_BYTES = 1 << 18  # the names of thousands of workers


@final
class Reception:
    """Hears the first message of everybody who connects to a listening socket.

    Whoever sends something else, or has been silent for longest while many are, is hung up on.

    Args:
        server: A listening socket.
        num_expected: Number of processes that should come.
    """

    def __init__(self, server: socket.socket, num_expected: int) -> None:
        self._server = server
        self._max_silent = max(_MAX_SILENT, num_expected)
        self._silent: dict[Channel, None] = {}  # the oldest first

    def arrivals(self, deadline: float) -> Iterator[tuple[Channel, Message]]:
        """Yields those who say something, with their first message, until a deadline.

        Args:
            deadline: As of `time.monotonic`.
        """
        self._server.setblocking(False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._server, selectors.EVENT_READ)
            try:
                while (left := deadline - time.monotonic()) > 0:
                    for key, _ in selector.select(left):
                        if key.data is None:
                            self._accept(selector)
                        elif key.data in self._silent:  # it has not been hung up on since
                            yield from self._heard(key.data, selector)
            finally:
                for channel in self._silent:
                    channel.close()
                self._silent.clear()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        with contextlib.suppress(OSError):  # it has hung up
            connection, address = self._server.accept()
            channel = Channel(connection, str(address[0]), _MAX_LINE_BYTES)
            self._silent[channel] = None
            selector.register(channel, selectors.EVENT_READ, channel)
        if len(self._silent) > self._max_silent:
            self._forget(next(iter(self._silent)), selector)

    def _heard(
        self, channel: Channel, selector: selectors.BaseSelector
    ) -> Iterator[tuple[Channel, Message]]:
        try:
            message = next(channel.arrived(), None)
        except ChannelClosedError:
            self._forget(channel, selector)
            return
        if message is None:  # not all of it has come
            return
        selector.unregister(channel)
        del self._silent[channel]
        yield channel, message

    def _forget(self, channel: Channel, selector: selectors.BaseSelector) -> None:
        selector.unregister(channel)
        del self._silent[channel]
        channel.close()
