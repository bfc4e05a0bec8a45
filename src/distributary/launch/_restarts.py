"""The course of a job: the reports of the hosts, and the commands that they get.

One `Job` decides for all hosts. It knows nothing of sockets, processes and clocks:

    gathering --all ready--> running --all finished--> over
        ^                       |  (a task that the others can do without fails: it starts again)
        +--a worker fails, or---+          (without restarts left: over)
           a host is lost, or
           one comes that was missing

"All" are the hosts that have joined, once there are as many as the job needs.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypedDict, final, get_args

from distributary.job import Message


class Prepare(NamedTuple):
    """Command: end the workers of this host if there are any, and report `Ready`; a start follows.

    Args:
        generation: Number of the next attempt, which is the number of restarts before it.
        text: The reason of a restart, for the user; `""` for the first start.
        origin: Rank of the host that caused the restart.
    """

    generation: int
    text: str = ""
    origin: int = -1


class Start(NamedTuple):
    """Command: start the workers of this host.

    Args:
        generation: Number of the attempt.
        workers: Address of every worker of the job, or of every task if there are servers.
        first: Position of this host's first address.
    """

    generation: int
    workers: Sequence[str]
    first: int


class Restart(NamedTuple):
    """Command: start a task of this host again, at the addresses that the job already has.

    Args:
        num_restarts: Number of times that the job, or one of its tasks, was started again.
        task: Name of the task.
        text: The reason, for the user.
    """

    num_restarts: int
    task: str
    text: str


class Exit(NamedTuple):
    """Command: end the workers of this host, then the launcher with an exit code.

    Args:
        code: Exit code.
        text: The reason, for the user; `""` after success.
        origin: Rank of the host that caused it.
        last_lines: The last lines that the failed worker wrote.
    """

    code: int
    text: str = ""
    origin: int = -1
    last_lines: Sequence[str] = ()


class Ready(NamedTuple):
    """Report: none of this host's worker processes is left, and new ones can have these addresses.

    Args:
        generation: Number of the attempt, from `Prepare`.
        addresses: An address for every task of this host.
    """

    generation: int
    addresses: Sequence[str]


class Failed(NamedTuple):
    """Report: a worker of this host has failed.

    Args:
        generation: Number of the attempt in which it failed.
        code: Exit code of the worker.
        text: Which worker ended, and how.
        last_lines: The last lines that it wrote.
        task: Name of the task, if the others can continue and it may be started again alone.
    """

    generation: int
    code: int
    text: str
    last_lines: Sequence[str]
    task: str = ""


class Finished(NamedTuple):
    """Report: all workers of this host have ended with exit code 0."""

    generation: int


class Interrupted(NamedTuple):
    """Report: the launcher of this host was told to end."""

    code: int
    text: str


@final
class TaskState(TypedDict):
    """The state of a task, for a page."""

    name: str
    state: str  # "running", or how the task has ended
    has_failed: bool
    num_restarts: int


class Tasks(NamedTuple):
    """Report: the tasks of this host, for the page of host 0. It does not affect the job.

    Args:
        states: States of the tasks.
        numbers: Numbers that the tasks have reported, by the names of the tasks.
    """

    states: Sequence[TaskState]
    numbers: Mapping[str, dict[str, float]]


Command = Prepare | Start | Restart | Exit
Report = Ready | Failed | Finished | Interrupted | Tasks

_TYPES: dict[str, type[Any]] = {
    cls.__name__: cls for cls in (*get_args(Command), *get_args(Report))
}


def encode(message: Command | Report) -> Message:
    """Returns a command or report as a message of a `Channel`."""
    # Not in the line, which has a largest size: workers report as many numbers as they like.
    return Message(type(message).__name__, None, json.dumps(message._asdict()).encode())


def decode(message: Message) -> Any:
    """Returns the command or report of a message made by `encode`.

    Raises:
        ValueError: if it is not such a message.
    """
    try:
        return _TYPES[message.kind](**json.loads(message.blob))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"launch: {message!r:.200} is not a message of the launcher.") from error


@final
class Job:
    """A job, which decides when its hosts start, stop, restart and end.

    Every method returns the commands to send, each with the host that gets it.

    Args:
        num_hosts: Number of hosts.
        max_restarts: Number of restarts that are allowed after failures, of all workers or of one
            that the others can do without. A host that comes later is no failure.
        min_hosts: Number of hosts that are enough; None for all. Before the first start, the job
            waits for all of them until `stop_waiting`.

    Attributes:
        is_over: True once all hosts were told to end.
    """

    def __init__(self, num_hosts: int, max_restarts: int, min_hosts: int | None = None) -> None:
        self.is_over = False
        self._is_running = False  # otherwise the hosts gather, or the job is over
        self._num_hosts = self._num_needed = num_hosts
        self._min_hosts = num_hosts if min_hosts is None else min_hosts
        self._max_restarts = max_restarts
        self._generation = 0
        self._num_restarts = 0
        self._num_late = 0  # restarts for hosts that came later
        self._joined: set[int] = set()
        self._addresses: dict[int, Sequence[str]] = {}  # of the hosts that are ready
        self._finished: set[int] = set()

    @property
    def missing(self) -> list[int]:
        """Ranks of the hosts that have not joined."""
        return sorted(set(range(self._num_hosts)) - self._joined)

    @property
    def is_short(self) -> bool:
        """True if there are too few hosts for a start."""
        return len(self._joined) < self._num_needed

    def join(self, host: int) -> list[tuple[int, Command]]:
        """Takes note that a host has come, or has come back."""
        self._joined.add(host)
        if self._is_running:
            if self._finished:  # the job is about to end without it
                return []
            self._num_late += 1
            return self._start_again(f"host {host} has joined", host)
        # Nothing reserves the addresses of a host, so all of them are chosen at the last moment.
        return [] if self.is_short else self._gather(Prepare(self._generation))

    def stop_waiting(self) -> list[tuple[int, Command]]:
        """Starts with the hosts that are there, if they are enough."""
        self._num_needed = self._min_hosts
        return [] if self.is_short else self._gather(Prepare(self._generation))

    def lose(self, host: int, text: str) -> list[tuple[int, Command]]:
        """Takes note that a host has disappeared without notice.

        If hosts gather, the others wait for it to come back, unless they are enough. But at the
        very first start, once all hosts are there, it is a failure: it could not do what it was
        told.
        """
        is_first_start = self._generation == 0 and not self.missing and not self.is_over
        self._joined.discard(host)
        self._addresses.pop(host, None)
        if self._is_running or is_first_start:
            return self._fail(1, text, host, ())
        return self._start_if_possible()

    def fail(self, text: str) -> list[tuple[int, Command]]:
        """Ends the job for a reason that has nothing to do with a worker."""
        return self._exit(Exit(1, text))

    def report(self, host: int, report: Report) -> list[tuple[int, Command]]:
        """Takes note of what a host reports."""
        match report:
            case Interrupted(code, text):
                return self._exit(Exit(code, text, host))
            case Ready(generation, addresses) if generation == self._generation:
                self._addresses[host] = addresses
                return self._start_if_possible()
            case Failed(generation, code, text, lines, task) if generation == self._generation:
                if self._is_running:  # others fail because of the first
                    return self._fail(code, text, host, lines, task)
            case Finished(generation) if generation == self._generation:
                self._finished.add(host)
                if self._is_running and self._finished >= self._addresses.keys():
                    return self._exit(Exit(0))
        return []

    def _gather(self, command: Prepare) -> list[tuple[int, Command]]:
        self._is_running = False
        self._addresses.clear()
        self._finished.clear()
        return [(host, command) for host in sorted(self._joined)]

    def _start_if_possible(self) -> list[tuple[int, Command]]:
        are_ready = self._addresses.keys() == self._joined and not self.is_short
        if self.is_over or self._is_running or not are_ready:
            return []
        hosts = sorted(self._joined)
        workers = [address for host in hosts for address in self._addresses[host]]
        if len(set(workers)) < len(workers):  # two hosts on the same machine chose the same port
            return self._gather(Prepare(self._generation))
        self._is_running, self._num_needed = True, self._min_hosts
        first = [sum(len(self._addresses[h]) for h in hosts if h < host) for host in hosts]
        starts = [Start(self._generation, workers, number) for number in first]
        return list(zip(hosts, starts, strict=True))

    def _fail(
        self, code: int, text: str, host: int, lines: Sequence[str], task: str = ""
    ) -> list[tuple[int, Command]]:
        if self._num_restarts == self._max_restarts:
            return self._exit(Exit(code, text, host, lines))
        self._num_restarts += 1
        if task:
            return [(host, Restart(self._num_restarts, task, text))]
        return self._start_again(text, host)

    def _start_again(self, text: str, host: int) -> list[tuple[int, Command]]:
        self._generation = self._num_restarts + self._num_late
        return self._gather(Prepare(self._generation, text, host))

    def _exit(self, command: Exit) -> list[tuple[int, Command]]:
        if self.is_over:
            return []
        self.is_over, self._is_running = True, False
        return [(host, command) for host in sorted(self._joined)]
