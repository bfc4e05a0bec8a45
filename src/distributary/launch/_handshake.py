"""How the launchers of two hosts prove to each other that they know the token.

    host 0                          other host
      challenge (random) ------------->
      <------------ hello, with a challenge of its own and the proof of both
      welcome, with the proof of both -->

A proof is an HMAC over the two challenges, the role and the content: the token itself is never
sent, and what was overheard is worth nothing in another connection. What follows is neither
encrypted nor signed, as are the connections of the workers.
"""

import hashlib
import hmac
import json
import secrets
import socket
import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["dump", "has_proof", "keep_alive", "new_challenge", "with_proof"]

_PROOF = "proof"
_IDLE_SECONDS = 5
_NUM_PROBES = 3  # the other machine counts as gone after about 20 seconds of silence


def new_challenge() -> str:
    """A random text that no connection has seen before."""
    return secrets.token_hex(32)


def with_proof(
    fields: Mapping[str, Any], token: str, challenge: str, own_challenge: str, role: str
) -> dict[str, Any]:
    """A message with the proof that its sender knows the token.

    Args:
        fields: The message.
        token: The secret.
        challenge: What the receiver has sent.
        own_challenge: What the sender has sent, or sends with the message.
        role: Who sends, so that a proof cannot be sent back.
    """
    proof = _proof(fields, token, challenge, own_challenge, role)
    return {**fields, _PROOF: proof}


def has_proof(
    message: Mapping[str, Any], token: str, challenge: str, other_challenge: str, role: str
) -> bool:
    """Whether `with_proof` with the same arguments has made a message."""
    fields = {name: value for name, value in message.items() if name != _PROOF}
    expected = _proof(fields, token, challenge, other_challenge, role)
    return hmac.compare_digest(expected.encode(), str(message.get(_PROOF)).encode())


def dump(fields: Mapping[str, Any]) -> bytes:
    """A line of JSON."""
    return json.dumps(fields).encode() + b"\n"


def keep_alive(connection: socket.socket) -> None:
    """Makes a connection fail when the other machine does not answer any more."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _IDLE_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _NUM_PROBES)
        milliseconds = 1000 * _IDLE_SECONDS * (_NUM_PROBES + 1)  # for what is sent meanwhile
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def _proof(
    fields: Mapping[str, Any], token: str, challenge: str, own_challenge: str, role: str
) -> str:
    content = json.dumps([challenge, own_challenge, role, dict(sorted(fields.items()))])
    return hmac.new(token.encode(), content.encode(), hashlib.sha256).hexdigest()
