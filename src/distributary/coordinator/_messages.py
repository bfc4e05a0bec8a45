"""What coordinator, workers and servers say to each other."""

from dataclasses import dataclass, field
from typing import Any, Protocol, final

import numpy as np


@final
@dataclass(frozen=True, slots=True)
class Message:
    """A request or a reply.

    Attributes:
        kind: What is asked for, or "ok".
        fields: JSON.
        arrays: Arrays.
        blobs: Serialized programs.
    """

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    arrays: list[np.ndarray] = field(default_factory=list)
    blobs: list[bytes] = field(default_factory=list)


class Service(Protocol):
    """What answers messages."""

    def handle(self, message: Message, peer: Any) -> Message:
        """The reply to a message."""


class Link(Protocol):
    """The way to a service."""

    def call(self, message: Message, timeout: float | None = None) -> Message:
        """Sends a message and waits for the reply."""


@final
class InProcessLink:
    """The way to a service of this process."""

    def __init__(self, service: Service, peer: Any = "local") -> None:
        self._service = service
        self._peer = peer

    def call(self, message: Message, timeout: float | None = None) -> Message:
        """See `Link`."""
        return self._service.handle(message, self._peer)
