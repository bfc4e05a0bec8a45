"""Signals to the launcher, as something to wait for."""

import contextlib
import signal
import socket
import time
from types import FrameType
from typing import Any, final

__all__ = ["Signals"]

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@final
class Signals:
    """Receives SIGINT, SIGTERM and SIGHUP while it is entered; only for the main thread.

    A signal that is ignored stays ignored: `nohup distributary launch ...` survives its terminal.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._first_at = 0.0
        self._num_taken = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        self._read_end, self._write_end = socket.socketpair()
        self._read_end.setblocking(False)
        self._write_end.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._write_end.fileno())
        for number in _NUMBERS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd)
        self._read_end.close()
        self._write_end.close()

    def fileno(self) -> int:
        """The descriptor that becomes readable when a signal has come."""
        return self._read_end.fileno()

    def take(self) -> list[int]:
        """The signals that have come since the last call."""
        with contextlib.suppress(BlockingIOError):
            self._read_end.recv(4096)
        new = self.received[self._num_taken :]
        self._num_taken += len(new)
        return new

    def wants_end_now(self, grace_seconds: float) -> bool:
        """Whether a second signal has come, or the first some seconds ago."""
        if len(self.received) < 2:
            return bool(self.received) and time.monotonic() > self._first_at + grace_seconds
        return True

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if not self.received:
            self._first_at = time.monotonic()
        self.received.append(number)
