"""Proofs that a process knows the job's secret, without sending the secret.

A proof is an HMAC over what both ends have said, including a challenge from each end. So a proof
that was overheard proves nothing in another conversation.
"""

import hashlib
import hmac
import json
import secrets
from typing import Any


def new_challenge() -> str:
    """Returns a random text that no conversation has used before."""
    return secrets.token_hex(32)


def proof(secret: str, role: str, *said: Any) -> str:
    """Returns a text that only a process that knows the secret can make.

    Args:
        secret: The secret.
        role: The side that proves it, so that nobody can send a proof back to its maker.
        said: The statements to prove, with the challenges of both ends; JSON must be able to hold
            them.
    """
    content = json.dumps([role, *said], sort_keys=True)
    return hmac.new(secret.encode(), content.encode(), hashlib.sha256).hexdigest()


def is_proof(candidate: object, secret: str, role: str, *said: Any) -> bool:
    """Returns whether `candidate` is the `proof` of the same arguments."""
    expected = proof(secret, role, *said)
    return isinstance(candidate, str) and hmac.compare_digest(expected.encode(), candidate.encode())
