"""The signals that the launcher gets, with a descriptor to wait for."""

import contextlib
import signal
import socket
import time
from types import FrameType
from typing import Any, final

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@final
class Signals:
    """A receiver of SIGINT, SIGTERM and SIGHUP inside its `with` block, in the main thread.

    An ignored signal stays ignored, so `nohup distributary launch ...` survives its terminal.

    Args:
        patience_seconds: Seconds after the first signal in which the launcher may wait for others.

    Attributes:
        received: Numbers of all signals that have arrived, in this order.
    """

    def __init__(self, patience_seconds: float) -> None:
        self.received: list[int] = []
        self._patience_seconds = patience_seconds
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
        """Returns the descriptor that becomes readable when a signal has arrived."""
        return self._read_end.fileno()

    def take(self) -> list[tuple[int, bool]]:
        """Returns the signals that have arrived since the last call, and whether each is the first.

        Only one of all is the first.
        """
        with contextlib.suppress(BlockingIOError):
            self._read_end.recv(4096)
        first, self._num_taken = self._num_taken, len(self.received)
        return [(self.received[i], i == 0) for i in range(first, self._num_taken)]

    def want_end_now(self) -> bool:
        """Returns whether there was a second signal, or the first was too long ago."""
        if len(self.received) < 2:
            is_late = time.monotonic() > self._first_at + self._patience_seconds
            return bool(self.received) and is_late
        return True

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if not self.received:
            self._first_at = time.monotonic()
        self.received.append(number)
