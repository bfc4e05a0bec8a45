"""The setup: the messages that a worker needs before it can run closures."""

import itertools
import threading
from collections.abc import Callable, Collection
from typing import TypeAlias, final

from distributary.coordinator._messages import Message

__all__ = ["Key", "Setup"]

#: The subject of a message: `("source", number)` or `("function", number)`.
Key: TypeAlias = tuple[str, int]


@final
class Setup:
    """The messages for workers, in the order of their creation, as long as their subject is used.

    Safe to use from any thread.

    Attributes:
        version: Number that changes with every change.
    """

    def __init__(self) -> None:
        self.version = 0
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._messages: dict[int, tuple[Key, Callable[[int], Message]]] = {}

    def add(self, key: Key, message: Callable[[int], Message]) -> int:
        """Adds a message, a function of the worker's number; returns the number of the message."""
        with self._lock:
            number = next(self._numbers)
            self._messages[number] = key, message
            self.version += 1
        return number

    def remove(self, keys: Collection[Key]) -> None:
        """Removes the messages about subjects that are no longer used."""
        with self._lock:
            self._messages = {n: own for n, own in self._messages.items() if own[0] not in keys}
            self.version += 1

    def all(self) -> tuple[int, dict[int, tuple[Key, Callable[[int], Message]]]]:
        """Returns the version, and its messages by number."""
        with self._lock:
            return self.version, dict(self._messages)
