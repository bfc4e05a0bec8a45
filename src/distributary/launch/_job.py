"""The course of a job: the reports of the hosts, and the commands that they get.

One `Job` decides for all hosts. It knows nothing of sockets, processes and clocks:

    gathering --all ready--> running --all finished--> over
        ^                       |  (a task that the others can do without fails: it starts again)
        |                       v a worker fails, a host is lost
        +----all stopped--- stopping        (without restarts left: over)
"""

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, final, get_args

from distributary.job import Message

__all__ = [
    "Command",
    "Exit",
    "Failed",
    "Finished",
    "Interrupted",
    "Job",
    "Prepare",
    "Ready",
    "Report",
    "Restart",
    "Start",
    "Stop",
    "Stopped",
    "TaskState",
    "Tasks",
    "decode",
    "encode",
]


@final
@dataclass(frozen=True)
class Prepare:
    """Command: choose addresses for the workers of this host, and report `Ready`."""

    generation: int


@final
@dataclass(frozen=True)
class Start:
    """Command: start the workers of this host.

    Args:
        generation: Number of the attempt, which is the number of restarts before it.
        workers: Address of every worker of the job, or of every task if there are servers.
        first: Position of this host's first address.
    """

    generation: int
    workers: Sequence[str]
    first: int


@final
@dataclass(frozen=True)
class Stop:
    """Command: end the workers of this host, and report `Stopped`; a restart follows.

    Args:
        generation: Number of the next attempt.
        text: The reason, for the user.
        origin: Rank of the host that caused it.
    """

    generation: int
    text: str
    origin: int


@final
@dataclass(frozen=True)
class Restart:
    """Command: start a task of this host again, at the addresses that the job already has.

    Args:
        num_restarts: Number of times that the job, or one of its tasks, was started again.
        task: Name of the task.
        text: The reason, for the user.
    """

    num_restarts: int
    task: str
    text: str


@final
@dataclass(frozen=True)
class Exit:
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


@final
@dataclass(frozen=True)
class Ready:
    """Report: addresses that the workers of this host can have."""

    generation: int
    addresses: Sequence[str]


@final
@dataclass(frozen=True)
class Failed:
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


@final
@dataclass(frozen=True)
class Finished:
    """Report: all workers of this host have ended with exit code 0."""

    generation: int


@final
@dataclass(frozen=True)
class Stopped:
    """Report: after `Stop`, none of this host's worker processes is left."""

    generation: int


@final
@dataclass(frozen=True)
class Interrupted:
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


@final
@dataclass(frozen=True)
class Tasks:
    """Report: the tasks of this host, for the page of host 0. It does not affect the job.

    Args:
        states: States of the tasks.
        numbers: Numbers that the tasks have reported, by the names of the tasks.
    """

    states: Sequence[TaskState]
    numbers: Mapping[str, dict[str, float]]


Command = Prepare | Start | Restart | Stop | Exit
Report = Ready | Failed | Finished | Stopped | Interrupted | Tasks

_TYPES: dict[str, type[Any]] = {
    cls.__name__: cls for cls in (*get_args(Command), *get_args(Report))
}


def encode(message: Command | Report) -> tuple[str, dict[str, Any]]:
    """Returns the kind and the content of a command or report, for a `Channel`."""
    return type(message).__name__, dataclasses.asdict(message)


def decode(message: Message) -> Any:
    """Returns the command or report of a message made by `encode`.

    Raises:
        ValueError: if it is not such a message.
    """
    try:
        return _TYPES[message.kind](**message.content)
    except (KeyError, TypeError) as error:
        raise ValueError(f"launch: {message!r:.200} is not a message of the launcher.") from error


class _State(enum.Enum):
    GATHERING = enum.auto()
    RUNNING = enum.auto()
    STOPPING = enum.auto()
    OVER = enum.auto()


@final
class Job:
    """A job, which decides when its hosts start, stop, restart and end.

    Every method returns the commands to send, each with the host that gets it.

    Args:
        num_hosts: Number of hosts.
        max_restarts: Number of restarts that are allowed, of all workers or of one that the others
            can do without.
    """

    def __init__(self, num_hosts: int, max_restarts: int) -> None:
        self._num_hosts = num_hosts
        self._max_restarts = max_restarts
        self._generation = 0
        self._num_restarts = 0
        self._state = _State.STOPPING  # nothing is running, and nobody has joined
        self._joined: set[int] = set()
        self._stopped: set[int] = set()
        self._finished: set[int] = set()
        self._addresses: dict[int, Sequence[str]] = {}

    @property
    def is_over(self) -> bool:
        """True once all hosts were told to end."""
        return self._state is _State.OVER

    @property
    def missing(self) -> list[int]:
        """Ranks of the hosts that have not joined."""
        return sorted(set(range(self._num_hosts)) - self._joined)

    def join(self, host: int) -> list[tuple[int, Command]]:
        """Takes note that a host has come, or has come back."""
        self._joined.add(host)
        self._stopped.add(host)
        return self._gather_if_possible()

    def lose(self, host: int, text: str) -> list[tuple[int, Command]]:
        """Takes note that a host has disappeared without notice."""
        self._joined.discard(host)
        if self._state is _State.STOPPING:  # the restart can wait for it to come back
            self._stopped.discard(host)
            return []
        return self._fail(1, text, host, ())

    def fail(self, text: str) -> list[tuple[int, Command]]:
        """Ends the job for a reason that has nothing to do with a worker."""
        return self._exit(Exit(1, text))

    def report(self, host: int, report: Report) -> list[tuple[int, Command]]:
        """Takes note of what a host reports."""
        match report:
            case Interrupted(code, text):
                return self._exit(Exit(code, text, host))
            case Stopped(generation) if generation == self._generation:
                self._stopped.add(host)
                return self._gather_if_possible()
            case Failed(generation, code, text, lines, task) if generation == self._generation:
                return self._fail(code, text, host, lines, task)
            case Ready(generation, addresses) if generation == self._generation:
                self._addresses[host] = addresses
                return self._start_if_possible()
            case Finished(generation) if generation == self._generation:
                self._finished.add(host)
                if self._state is _State.RUNNING and len(self._finished) == self._num_hosts:
                    return self._exit(Exit(0))
        return []

    def _gather_if_possible(self) -> list[tuple[int, Command]]:
        if self._state is not _State.STOPPING:
            return []
        if len(self._joined & self._stopped) < self._num_hosts:
            return []
        return self._gather()

    def _gather(self) -> list[tuple[int, Command]]:
        self._state = _State.GATHERING
        self._addresses.clear()
        self._finished.clear()
        return [(host, Prepare(self._generation)) for host in range(self._num_hosts)]

    def _start_if_possible(self) -> list[tuple[int, Command]]:
        if self._state is not _State.GATHERING or len(self._addresses) < self._num_hosts:
            return []
        hosts = range(self._num_hosts)
        workers = [address for host in hosts for address in self._addresses[host]]
        if len(set(workers)) < len(workers):  # two hosts on the same machine chose the same port
            return self._gather()
        self._state = _State.RUNNING
        first = [sum(len(self._addresses[h]) for h in range(host)) for host in hosts]
        return [(host, Start(self._generation, workers, first[host])) for host in hosts]

    def _fail(
        self, code: int, text: str, host: int, lines: Sequence[str], task: str = ""
    ) -> list[tuple[int, Command]]:
        if self._state not in (_State.GATHERING, _State.RUNNING):
            return []  # others fail because of the first
        if self._num_restarts == self._max_restarts:
            return self._exit(Exit(code, text, host, lines))
        self._num_restarts += 1
        if task:
            return [(host, Restart(self._num_restarts, task, text))]
        self._generation = self._num_restarts
        stop = Stop(self._generation, text, host)
        self._state = _State.STOPPING
        self._stopped.clear()
        return [(joined, stop) for joined in sorted(self._joined)]

    def _exit(self, command: Exit) -> list[tuple[int, Command]]:
        if self.is_over:
            return []
        self._state = _State.OVER
        return [(host, command) for host in sorted(self._joined)]
