"""Proves to another process of a job that this one knows the job's secret, without sending it.

A proof is an HMAC over what both ends have said. A challenge of each end belongs to that: so what
somebody has overheard proves nothing in another conversation.
"""

import hashlib
import hmac
import json
import secrets
from typing import Any

__all__ = ["is_proof", "new_challenge", "proof"]


def new_challenge() -> str:
    """Returns a random text that no conversation has had before."""
    return secrets.token_hex(32)


def proof(secret: str, role: str, *said: Any) -> str:
    """Returns what only those can make who know a secret.

    Args:
        secret: The secret.
        role: Who proves it, so that nobody can send a proof back to its maker.
        said: What the proof is about, with the challenges of both ends: what JSON can hold.
    """
    content = json.dumps([role, *said], sort_keys=True)
    return hmac.new(secret.encode(), content.encode(), hashlib.sha256).hexdigest()


def is_proof(found: object, secret: str, role: str, *said: Any) -> bool:
    """Returns whether something is the `proof` of the same arguments."""
    expected = proof(secret, role, *said)
    return isinstance(found, str) and hmac.compare_digest(expected.encode(), found.encode())
