"""Ctrl-C that waits until the result of a step is stored."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeAlias, final

_Handler: TypeAlias = Callable[[int, FrameType | None], Any]


@final
class _Interrupts:
    """A delay of Ctrl-C: inside of `watched`, it waits for the end of a `with interrupts:` block.

    Python handles signals in its main thread; in other threads, both do nothing.
    """

    def __init__(self) -> None:
        self._handler: _Handler | None = None  # the program's own
        self._is_held = False
        self._caught: tuple[int, FrameType | None] | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Makes `with interrupts:` work. Enter it once for many steps, because it takes 20 us."""
        is_main = threading.current_thread() is threading.main_thread()
        handler = signal.getsignal(signal.SIGINT) if is_main and self._handler is None else None
        if not callable(handler):
            yield
            return
        self._handler = handler
        signal.signal(signal.SIGINT, self._receive)
        try:
            yield
        finally:
            if signal.getsignal(signal.SIGINT) == self._receive:  # else a callback has set its own
                signal.signal(signal.SIGINT, handler)
            self._handler = None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._is_held:
            self._caught = number, frame
        else:
            (self._handler or signal.default_int_handler)(number, frame)

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._is_held = True

    def __exit__(self, *exc_info: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._is_held = False
        details, self._caught = self._caught, None
        if details is not None:
            self._receive(*details)


interrupts = _Interrupts()
"""Object that delays Ctrl-C in this process."""
