"""The secret of a job, and the exchange by which two of its tasks prove that they know it.

    Greet    -> challenge                          to everybody
    Talk     challenge, own challenge, proof  ->   proof; or the end, before anything is read

A proof covers both challenges, the name of the called task and the address that was called. So a
program that listens in place of a task that has ended cannot use another task's answer as its own,
and one that listens at another address of the same host name cannot pass the exchange on. The
messages after the proof are neither encrypted nor signed: on loopback, only the administrator can
see them.
"""

import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, final

from distributary.cluster_resolver import TOKEN_VARIABLE
from distributary.errors import ClusterError
from distributary.job import is_proof, new_challenge, proof
from distributary.servers._certificates import CERTIFICATES_VARIABLE, Credentials

__all__ = ["Challenges", "Token", "credentials_of", "token_of_this_process"]

_MIN_CHARACTERS = 16
_MAX_CHALLENGES = 4096
_MAX_NAME_CHARACTERS = 40
_TASK: Final = "distributary-task"
_ADDRESS: Final = "distributary-address"
_CHALLENGE: Final = "distributary-challenge"
_OWN_CHALLENGE: Final = "distributary-own-challenge"
_PROOF: Final = "distributary-proof"


@final
@dataclass(frozen=True, slots=True)
class Token:
    """The secret of a job.

    Args:
        secret: Text of 16 characters or more.

    Raises:
        ClusterError: if it is shorter.
    """

    secret: str = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) < _MIN_CHARACTERS:
            raise ClusterError(
                f"{TOKEN_VARIABLE} has {len(self.secret)} characters, expected {_MIN_CHARACTERS} or"
                " more. `openssl rand -hex 16` makes one; give all tasks of the job the same."
            )

    @classmethod
    def new(cls) -> "Token":
        """Returns a random token."""
        return cls(secrets.token_hex(32))

    def ask(self, task: str, address: str, challenge: str) -> dict[str, str]:
        """Returns the fields that a caller sends to a task, given the challenge it got there."""
        asked = {
            _TASK: task,
            _ADDRESS: address,
            _CHALLENGE: challenge,
            _OWN_CHALLENGE: new_challenge(),
        }
        return {**asked, _PROOF: proof(self.secret, "caller", *_said(task, asked))}

    def answer(self, task: str, asked: Mapping[str, str]) -> dict[str, str]:
        """Returns the fields that a task replies to those of `ask`."""
        return {_PROOF: proof(self.secret, "task", *_said(task, asked))}

    def refusal(
        self, task: str, address: str | None, asked: Mapping[str, str], challenges: "Challenges"
    ) -> str | None:
        """Returns why a caller is refused, or None if it knows the secret.

        Args:
            task: The task that is called.
            address: Its address; None if callers may reach it at another one.
            asked: The fields that the caller has sent.
            challenges: The challenges of the task.
        """
        if asked.get(_TASK, task) != task:
            return (
                f"it takes {task} for {asked[_TASK][:_MAX_NAME_CHARACTERS]!r}. Give all tasks the"
                " same cluster, and each its own task"
            )
        if address is not None and (called := asked.get(_ADDRESS, address)) != address:
            called = repr(called[:_MAX_NAME_CHARACTERS]) if called else "another machine"
            return (
                f"it has called {called}, and {task} listens at {address}: a program in between"
                " passes the call on. Give all tasks that address in the cluster, or end the other"
                " program. With certificates, calls may be passed on: see `distributary certs`"
            )
        is_new = challenges.use(asked.get(_CHALLENGE, ""))
        if is_new and self._is_proof(asked, "caller", task, asked):
            return None
        return (
            f"it does not know the secret of the job of {task}. Start all tasks with the same"
            f" {TOKEN_VARIABLE}"
        )

    def knows_task(self, task: str, asked: Mapping[str, str], answer: Mapping[str, str]) -> bool:
        """Returns whether the task that replied to `ask` knows the secret."""
        return self._is_proof(answer, "task", task, asked)

    def _is_proof(
        self, found: Mapping[str, str], role: str, task: str, asked: Mapping[str, str]
    ) -> bool:
        return is_proof(found.get(_PROOF), self.secret, role, *_said(task, asked))


def _said(task: str, asked: Mapping[str, str]) -> tuple[str, ...]:
    """Returns what a proof covers."""
    return task, *(asked.get(name, "") for name in (_ADDRESS, _CHALLENGE, _OWN_CHALLENGE))


@final
class Challenges:
    """Random texts for callers. Each is valid for one call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, None] = {}

    def new(self) -> str:
        """Returns a new challenge. Unused ones are forgotten once there are many newer ones."""
        challenge = new_challenge()
        with self._lock:
            self._open[challenge] = None
            if len(self._open) > _MAX_CHALLENGES:
                del self._open[next(iter(self._open))]
        return challenge

    def use(self, challenge: str) -> bool:
        """Uses up a challenge; returns whether it is one that was given and not used before."""
        with self._lock:
            return self._open.pop(challenge, self) is None


_of_this_process: list[Token] = []


def token_of_this_process(make: bool = False) -> Token | None:
    """Returns the secret of servers that share a process with their chief, as in tutorials.

    Args:
        make: Whether to make one if there is none yet.
    """
    if make and not _of_this_process:
        _of_this_process.append(Token.new())
    return _of_this_process[0] if _of_this_process else None


def credentials_of(task_type: str, environ: Mapping[str, str]) -> Credentials | Token | None:
    """Returns the credentials with which a task proves that it belongs to the job.

    Args:
        task_type: `"chief"`, `"worker"` or `"ps"`.
        environ: The environment.

    Returns:
        The certificates in `DISTRIBUTARY_CERTS`, else the secret in `DISTRIBUTARY_TOKEN`, else
        None.

    Raises:
        ClusterError: if a file cannot be read, or the secret is too short.
    """
    if folder := environ.get(CERTIFICATES_VARIABLE):
        return Credentials.load(Path(folder), task_type)
    token = environ.get(TOKEN_VARIABLE)
    return Token(token) if token else None
