"""Peers that are measured in turns, in this process or in processes of their own.

A process of its own runs this file with the name of a module, whose function `peers` it calls. It
works only when it is asked, by a line on its standard input:

    losses N NAME  ->  [loss, ...]
    go N NAME      ->  seconds per step
    memory N NAME  ->  MiB by kind, while so many steps are taken
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

__all__ = ["Job", "Json", "Peer", "command", "scheduled", "stepping", "timed"]

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
        cpu_seconds: Returns the CPU time that its processes have taken.
    """

    name: str
    time_block: Callable[[int], float]
    losses: Callable[[int], list[float]] = lambda num_steps: []
    num_checked: int = 20
    num_steps: int | None = None
    group: str = ""
    cpu_seconds: Callable[[], float] = time.process_time


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


def scheduled(
    name: str, coordinator: Any, step: Callable[..., Any], args: tuple[Any, ...] = ()
) -> Peer:
    """Returns a peer whose steps are closures of a coordinator; a block ends when all have."""

    def run(num_steps: int) -> list[Any]:
        values = [coordinator.schedule(step, args) for _ in range(num_steps)]
        coordinator.join()
        return values

    return timed(name, run, losses=lambda count: [float(value.fetch()) for value in run(count)])


def command(module: str, python: str = sys.executable, **arguments: Json) -> list[str]:
    """Returns the command line of a process that serves `module.peers(**arguments)`.

    Args:
        module: Name of a module of this folder, or the path of another one.
        python: Its interpreter.
        arguments: Of `peers`.
    """
    return [python, str(Path(__file__).resolve()), module, json.dumps(arguments)]


@final
class Job:
    """Processes that are asked together, such as workers of one job. They end with this process.

    Args:
        name: What errors call it.
        commands: One per process, see `command`.
        environs: Their environments.
        helpers: More processes, which are not asked.
    """

    def __init__(
        self,
        name: str,
        commands: Sequence[Sequence[str]],
        environs: Sequence[Mapping[str, str]],
        helpers: Sequence[subprocess.Popen[bytes]] = (),
    ) -> None:
        self.name = name
        self._helpers = helpers
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

    def peer(self, name: str, served: str | None = None, **more: Any) -> Peer:
        """Returns a peer of all processes, which know it by the name `served`."""
        served = served or name
        return Peer(
            name,
            lambda num_steps: max(self.ask(f"go {num_steps} {served}")),
            lambda num_steps: self.ask(f"losses {num_steps} {served}")[0],
            cpu_seconds=self.cpu_seconds,
            **more,
        )

    def cpu_seconds(self) -> float:
        """Returns the CPU time of all processes, helpers included."""
        pids = [one.pid for one in self._processes] + [one.pid for one in self._helpers]
        return sum(map(_cpu_seconds, pids))

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
        for helper in self._helpers:
            helper.kill()
            helper.wait()

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


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _serve(module: str, arguments: str) -> None:
    """Builds the peers of a module and answers the questions on standard input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints must not look like an answer
    path = Path(module)
    if path.suffix:
        sys.path.insert(0, str(path.parent))
    served = importlib.import_module(path.stem)
    peers = {peer.name: peer for peer in served.peers(**json.loads(arguments))}
    for line in sys.stdin:
        question, *rest = line.strip().split(" ", 2)
        if question == "quit":
            return
        num_steps, name = rest
        answer = _answer(peers[name], question, int(num_steps))
        print(json.dumps(answer), file=answers, flush=True)


def _answer(peer: Peer, question: str, num_steps: int) -> Json:
    if question == "memory":
        from _memory import memory_of  # which needs JAX

        return memory_of(peer, num_steps)
    return {"losses": peer.losses, "go": peer.time_block}[question](num_steps)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
