"""The connection between the launcher of a host and the `Job` that decides for all hosts."""

import collections
from typing import Protocol, final

from distributary.launch._job import Command, Job, Report

__all__ = ["Link", "LocalLink"]


class Link(Protocol):
    """A connection to the `Job` of the job."""

    address: str
    """Address of this host for the workers of other hosts."""

    wants_tasks: bool
    """True if `Tasks` should be sent from time to time."""

    def fileno(self) -> int:
        """Returns the descriptor that becomes readable when something arrives; -1 for none.

        `receive` may have something even before that: call it before you wait.
        """

    def send(self, report: Report) -> None:
        """Sends a report; it is lost if the other end has gone, in which case `receive` raises."""

    def receive(self) -> list[Command]:
        """Returns the commands that have arrived.

        Raises:
            LaunchError: if the other end has gone.
        """

    def end(self) -> None:
        """Tells the other end that no more reports follow."""

    def close(self) -> None:
        """Closes the connection."""


@final
class LocalLink:
    """The link of a job on a single host, which decides for itself.

    Args:
        max_restarts: Number of times that the job is started again.
    """

    address = "127.0.0.1"
    wants_tasks = False

    def __init__(self, max_restarts: int) -> None:
        self._job = Job(1, max_restarts)
        self._commands = collections.deque(command for _, command in self._job.join(0))

    def fileno(self) -> int:
        """Returns -1: no need to wait, because `receive` has the results of `send` at once."""
        return -1

    def send(self, report: Report) -> None:
        """Passes a report to the job, which decides."""
        self._commands.extend(command for _, command in self._job.report(0, report))

    def receive(self) -> list[Command]:
        """Returns the decisions since the last call."""
        commands = list(self._commands)
        self._commands.clear()
        return commands

    def end(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""
