"""Messages split into chunks of 1 MiB, which gRPC sends several times as fast as those of 64 MiB.

A chunk holds the number of the request, the number of bytes that follow in later chunks, and bytes
of the message. The chunks of a message are sent one right after the other.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import final

import numpy as np

from distributary.coordinator._messages import Buffer, Limits, WireError, aligned_empty

__all__ = ["MAX_CHUNK_BYTES", "Assembly", "split"]

_HEAD = struct.Struct("<QQ")
# Room for 1 MiB of data and its header: a second chunk would wait until the first one is sent.
_CONTENT_BYTES = (1 << 20) + (1 << 14)
MAX_CHUNK_BYTES = _HEAD.size + _CONTENT_BYTES


def split(number: int, buffers: Sequence[Buffer]) -> Iterator[bytes]:
    """Yields the chunks of a message.

    Args:
        number: The number of the request. A reply has the number of its request.
        buffers: The message.
    """
    remaining = sum(map(len, buffers))
    parts: list[Buffer] = []
    room = _CONTENT_BYTES
    for buffer in buffers:
        view = memoryview(buffer)
        while len(view) >= room:
            remaining -= _CONTENT_BYTES
            yield b"".join((_HEAD.pack(number, remaining), *parts, view[:room]))
            view = view[room:]
            parts, room = [], _CONTENT_BYTES
        if view:
            parts.append(view)
            room -= len(view)
    if parts:
        yield b"".join((_HEAD.pack(number, 0), *parts))


@final
class Assembly:
    """The receiving end of `split`: puts chunks together, one message at a time.

    Args:
        limits: The limits of a message, checked at its first chunk.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._number = 0
        self._remaining = 0
        self._message = np.empty(0, np.uint8)

    def add(self, chunk: bytes) -> tuple[int, Buffer] | None:
        """Adds a chunk; returns the number and bytes of the message if it is complete, else None.

        Raises:
            WireError: if the chunk is malformed, or not the next one of its message.
        """
        content = memoryview(chunk)[_HEAD.size :]
        if not 0 < len(content) <= _CONTENT_BYTES:
            raise WireError(
                f"A chunk has {len(chunk)} bytes, expected {_HEAD.size + 1} to {MAX_CHUNK_BYTES}."
            )
        number, remaining = _HEAD.unpack_from(chunk)
        if not self._remaining:
            num_bytes = len(content) + remaining
            if num_bytes > self._limits.max_message_bytes:
                raise WireError(
                    f"A message has {num_bytes} bytes, expected"
                    f" {self._limits.max_message_bytes} or fewer."
                )
            if not remaining:
                return number, content
            self._number, self._message = number, aligned_empty((num_bytes,), np.dtype(np.uint8))
        elif (number, remaining + len(content)) != (self._number, self._remaining):
            raise WireError(
                f"A chunk of message {number} with {remaining} bytes to follow came in the middle"
                f" of message {self._number}, of which {self._remaining} bytes were missing."
            )
        end = len(self._message) - remaining
        self._message[end - len(content) : end] = np.frombuffer(content, np.uint8)
        self._remaining = remaining
        if remaining:
            return None
        message, self._message = self._message, np.empty(0, np.uint8)
        return number, message.data
