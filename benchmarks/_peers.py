"""Peers that are measured in turns, in this process or in processes of their own.

A process of its own runs this file with the name of a module, whose function `peers` it calls. It
works only when it is asked, by a line on its standard input:

    losses N NAME  ->  [loss, ...]
    go N NAME      ->  seconds per step
    quit

Imports nothing that is measured: any Python can answer.
"""

import contextlib
import importlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, final

__all__ = ["Job", "Json", "Peer", "command", "stepping", "timed"]

Json: TypeAlias = Any

Output: TypeAlias = Any
"""The result of one step: an array or a container of arrays that may still be computed."""

_ANSWER_SECONDS = 300.0
_END_SECONDS = 30.0


@dataclass
class Peer:
    """One implementation of a workload. Its state goes on from call to call.

    Attributes:
        name: What the report calls it.
        time_block: Takes so many steps, waits for the last and returns the seconds per step.
        losses: Takes so many steps and returns the loss of each.
        num_checked: Steps whose losses are compared with those of other peers.
        num_steps: Steps per block; None lets the clock choose.
        group: Peers of one group compute the same losses.
    """

    name: str
    time_block: Callable[[int], float]
    losses: Callable[[int], list[float]] = lambda num_steps: []
    num_checked: int = 20
    num_steps: int | None = None
    group: str = ""


def timed(name: str, run: Callable[[int], object], **more: Any) -> Peer:
    """Returns a peer that takes all steps of a block in one call of `run`."""

    def time_block(num_steps: int) -> float:
        start = time.perf_counter()
        run(num_steps)
        return (time.perf_counter() - start) / num_steps

    return Peer(name, time_block, **more)


def stepping(
    name: str,
    step: Callable[[int], Output],
    wait: Callable[[Output], object],
    to_float: Callable[[Output], float] = float,
) -> Peer:
    """Returns a peer that takes one step after the other.

    Args:
        name: What the report calls it.
        step: Takes the number of the step and dispatches it, without waiting for its result.
        wait: Blocks until a step's output is computed on every device.
        to_float: Returns the loss on the host.
    """
    numbers = itertools.count()

    def run(num_steps: int) -> None:
        output = None
        for _ in range(num_steps):
            output = step(next(numbers))
        wait(output)

    return timed(
        name, run, losses=lambda count: [to_float(step(next(numbers))) for _ in range(count)]
    )


def command(module: str, python: str = sys.executable, **arguments: Json) -> list[str]:
    """Returns the command line of a process that serves `module.peers(**arguments)`."""
    return [python, str(Path(__file__).resolve()), module, json.dumps(arguments)]


@final
class Job:
    """Processes that are asked together, such as workers of one job. They end with this process.

    Args:
        name: What errors call it.
        commands: One per process, see `command`.
        environs: Their environments.
    """

    def __init__(
        self, name: str, commands: Sequence[Sequence[str]], environs: Sequence[Mapping[str, str]]
    ) -> None:
        self.name = name
        # Libraries greet at length; shown only if a process fails. Closed by `close`.
        self._logs = [tempfile.TemporaryFile("w+") for _ in commands]  # noqa: SIM115
        self._processes = [
            subprocess.Popen(
                one,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environ,
            )
            for one, environ, log in zip(commands, environs, self._logs, strict=True)
        ]

    @property
    def pids(self) -> list[int]:
        """The numbers of the processes."""
        return [process.pid for process in self._processes]

    def peer(self, name: str, served: str | None = None, **more: Any) -> Peer:
        """Returns a peer of all processes, which know it by the name `served`."""
        served = served or name
        return Peer(
            name,
            lambda num_steps: max(self.ask(f"go {num_steps} {served}")),
            lambda num_steps: self.ask(f"losses {num_steps} {served}")[0],
            **more,
        )

    def ask(self, question: str) -> list[Json]:
        """Asks all processes and returns their answers, in the order of the processes.

        Raises:
            RuntimeError: If one of them ends or takes too long; all of them are ended then.
        """
        self._tell(question)
        # A worker whose partner has ended may wait forever.
        watchdog = threading.Timer(_ANSWER_SECONDS, self._kill)
        watchdog.start()
        try:
            answers = [p.stdout.readline() for p in self._processes if p.stdout is not None]
        finally:
            watchdog.cancel()
        if not all(answers):
            raise RuntimeError(self._failure(question, answers.index("")))
        return [json.loads(answer) for answer in answers]

    def close(self) -> None:
        """Ends the processes; again is allowed."""
        self._tell("quit")
        for process in self._processes:
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self._kill()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        for log in self._logs:
            log.close()

    def _tell(self, line: str) -> None:
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError, ValueError):  # it ended; was closed
                process.stdin.write(line + "\n")
                process.stdin.flush()

    def _failure(self, question: str, number: int) -> str:
        self._kill()
        logs = []
        for log in self._logs:
            log.seek(0)
            logs.append(log.read()[-4000:])
        self.close()
        return (
            f"{self.name}: process {number} ended, or was ended after {_ANSWER_SECONDS:g} s, when"
            f" asked {question!r}\n" + "\n".join(logs)
        )

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def _serve(module: str, arguments: str) -> None:
    """Builds the peers of a module and answers the questions on standard input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints must not look like an answer
    made = importlib.import_module(module).peers(**json.loads(arguments))
    peers = {peer.name: peer for peer in made}
    for line in sys.stdin:
        question, *rest = line.split()
        if question == "quit":
            return
        num_steps, name = rest
        # A process with one peer need not know what the report calls it.
        peer = peers[name] if name in peers or len(peers) > 1 else next(iter(peers.values()))
        function = {"losses": peer.losses, "go": peer.time_block}[question]
        print(json.dumps(function(int(num_steps))), file=answers, flush=True)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
