"""Peers in processes of their own, which work only when it is their turn.

`ServedJob` starts the processes of a job and asks all of them, one line at a time; they answer from
`serve` or `serve_several`:

    losses N NAME  ->  [loss, ...]
    go N NAME      ->  seconds per step     N steps, ending with the last one's result
    quit

Imports nothing that is measured: any Python can answer.
"""

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, final

from _timing import Peer

__all__ = ["ServedJob", "ServedPeer", "serve", "serve_several", "start_peer"]

Json: TypeAlias = Any

_END_SECONDS = 30.0


@final
class ServedJob:
    """Processes that are asked together, such as the workers of one job.

    Args:
        name: What errors call it.
        commands: One per process; each calls `serve` or `serve_several`.
        environs: Their environments.
        answer_seconds: How long an answer may take; None waits as long as the processes live.
    """

    def __init__(
        self,
        name: str,
        commands: Sequence[Sequence[str]],
        environs: Sequence[Mapping[str, str]],
        answer_seconds: float | None = None,
    ) -> None:
        self.name = name
        self._answer_seconds = answer_seconds
        # Libraries greet at length; shown only if a process fails. Closed by `close`.
        self._logs = [tempfile.TemporaryFile("w+") for _ in commands]  # noqa: SIM115
        self._processes = [
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environ,
            )
            for command, environ, log in zip(commands, environs, self._logs, strict=True)
        ]

    @property
    def pids(self) -> list[int]:
        """The numbers of the processes."""
        return [process.pid for process in self._processes]

    def ask(self, question: str) -> list[Json]:
        """Asks all processes and returns their answers, in the order of the processes.

        Raises:
            RuntimeError: If one of them ends or takes too long; all of them are ended then.
        """
        self._tell(question)
        answers: list[Json] = [None] * len(self._processes)
        deadline = None if self._answer_seconds is None else time.monotonic() + self._answer_seconds
        with selectors.DefaultSelector() as selector:
            for number, process in enumerate(self._processes):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, number)
            while selector.get_map():
                ready = selector.select(deadline and max(0.0, deadline - time.monotonic()))
                if not ready:
                    self._fail(f"did not answer {question!r} within {self._answer_seconds:g} s")
                for key, _ in ready:
                    line = self._processes[key.data].stdout.readline()
                    if not line:
                        self._fail(f"ended (process {key.data}) when asked {question!r}")
                    answers[key.data] = json.loads(line)
                    selector.unregister(key.fileobj)
        return answers

    def close(self) -> None:
        """Ends the processes; again is allowed."""
        self._tell("quit")
        for process in self._processes:
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self._kill()
        self._release()

    def _tell(self, line: str) -> None:
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError, ValueError):  # it ended; was closed
                process.stdin.write(line + "\n")
                process.stdin.flush()

    def _fail(self, what: str) -> None:
        self._kill()
        logs = []
        for number, log in enumerate(self._logs):
            log.seek(0)
            logs.append(f"process {number}:\n{log.read()[-4000:]}")
        self._release()
        raise RuntimeError("\n".join([f"{self.name} {what}", *logs]))

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def _release(self) -> None:
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError):
                if process.stdin is not None:
                    process.stdin.close()
            if process.stdout is not None:
                process.stdout.close()
        for log in self._logs:
            log.close()


@final
class ServedPeer:
    """A `Peer` whose steps are taken by the processes of a job.

    Args:
        name: What the report calls it, and the processes if they serve several.
        job: Several peers may share it.
    """

    def __init__(self, name: str, job: ServedJob) -> None:
        self.name = name
        self._job = job

    def losses(self, num_steps: int) -> list[float]:
        """Takes `num_steps` steps and returns the loss of each, as the first process sees it."""
        return self._job.ask(f"losses {num_steps} {self.name}")[0]

    def time_block(self, num_steps: int) -> float:
        """Takes `num_steps` steps and returns the seconds per step of the slowest process."""
        return max(self._job.ask(f"go {num_steps} {self.name}"))

    def close(self) -> None:
        """Ends the job."""
        self._job.close()


def start_peer(name: str, command: Sequence[str], environ: Mapping[str, str]) -> ServedPeer:
    """A peer with a process of its own, which calls `serve`."""
    return ServedPeer(name, ServedJob(name, [command], [environ]))


def serve(build: Callable[[], Peer]) -> None:
    """Builds a peer and answers the questions on standard input, whatever name they give it."""

    def build_one() -> Callable[[str], Peer]:
        peer = build()
        return lambda name: peer

    _serve(build_one)


def serve_several(build: Callable[[], Sequence[Peer]]) -> None:
    """Builds peers and answers the questions on standard input, by their names."""

    def build_all() -> Callable[[str], Peer]:
        peers = {peer.name: peer for peer in build()}
        return peers.__getitem__

    _serve(build_all)


def _serve(build: Callable[[], Callable[[str], Peer]]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints must not look like an answer
    peer_of = build()
    for line in sys.stdin:
        question, *arguments = line.split()
        if question == "quit":
            return
        num_steps, name = arguments
        peer = peer_of(name)
        answer = {"losses": peer.losses, "go": peer.time_block}[question](int(num_steps))
        print(json.dumps(answer), file=answers, flush=True)
