"""Between the launcher of a host and the `Job` that decides for all hosts."""

import collections
from typing import Protocol, final

from distributary.launch._job import Command, Job, Report

__all__ = ["Link", "LocalLink"]


class Link(Protocol):
    """The way to the job's `Job`."""

    address: str
    """Address of this host for the workers of other hosts."""

    wants_tasks: bool
    """Whether `Tasks` are to be sent now and then."""

    def fileno(self) -> int:
        """The descriptor that becomes readable when something comes; -1 for none.

        `receive` may have something before: call it before waiting.
        """

    def send(self, report: Report) -> None:
        """Says something; it is lost if the other end has gone, which `receive` will tell."""

    def receive(self) -> list[Command]:
        """The commands that have come.

        Raises:
            LaunchError: if the other end has gone.
        """

    def end(self) -> None:
        """Says that nothing more will be said."""

    def close(self) -> None:
        """Leaves."""


@final
class LocalLink:
    """The link of a job on one host, which decides for itself.

    Args:
        max_restarts: How often the job is started again.
    """

    address = "127.0.0.1"
    wants_tasks = False

    def __init__(self, max_restarts: int) -> None:
        self._job = Job(1, max_restarts)
        self._commands = collections.deque(command for _, command in self._job.join(0))

    def fileno(self) -> int:
        """There is nothing to wait for: `receive` has at once what `send` has caused."""
        return -1

    def send(self, report: Report) -> None:
        """Decides."""
        self._commands.extend(command for _, command in self._job.report(0, report))

    def receive(self) -> list[Command]:
        """The decisions since the last call."""
        commands = list(self._commands)
        self._commands.clear()
        return commands

    def end(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""
