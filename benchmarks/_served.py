"""Peers in processes of their own, which work only when it is their turn.

`ServedPeer` starts a script and asks, one line at a time; the script answers from `serve`:

    losses N  ->  [loss, ...]
    go N      ->  seconds per step     N steps, ending with the last one's result
    quit

Imports nothing that is measured: any Python can answer.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, final

from _timing import Peer

__all__ = ["ServedPeer", "serve"]

Json: TypeAlias = Any


@final
class ServedPeer:
    """A `Peer` whose steps are taken by another process.

    Args:
        name: What the report calls it.
        command: Starts a process that calls `serve`.
        environ: Its environment.
    """

    def __init__(self, name: str, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self.name = name
        # Libraries greet at length; shown only if the process fails. Closed by `close`.
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environ,
        )

    def losses(self, num_steps: int) -> list[float]:
        """Takes `num_steps` steps and returns the loss of each."""
        return self._ask(f"losses {num_steps}")

    def time_block(self, num_steps: int) -> float:
        """Takes `num_steps` steps, waits for the last and returns the seconds per step."""
        return self._ask(f"go {num_steps}")

    def close(self) -> None:
        """Ends the process."""
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate("quit\n")
        self._process.wait()
        self._log.close()

    def _ask(self, question: str) -> Json:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(question + "\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            self._log.seek(0)
            raise RuntimeError(
                f"the process of {self.name} ended when asked {question!r}:\n"
                f"{self._log.read()[-4000:]}"
            )
        return json.loads(answer)


def serve(build: Callable[[], Peer]) -> None:
    """Builds a peer and answers the questions on standard input until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints must not look like an answer
    peer = build()
    for line in sys.stdin:
        question, *arguments = line.split()
        if question == "quit":
            peer.close()
            return
        answer = {"losses": peer.losses, "go": peer.time_block}[question](int(arguments[0]))
        print(json.dumps(answer), file=answers, flush=True)
