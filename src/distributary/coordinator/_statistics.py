"""Statistics of asynchronous training. They are always collected."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

__all__ = ["CoordinatorStatistics", "ServerStatistics", "Tally", "WorkerStatistics"]


@final
@dataclass(frozen=True, slots=True)
class WorkerStatistics:
    """The work that one worker has done for a coordinator.

    Attributes:
        name: Name and address of the worker.
        state: `"connecting"` at the beginning, then `"idle"`, `"running"`, `"lost"`, or
            `"given up"` once it has been lost for too long.
        num_losses: Number of times it was lost.
        num_closures: Number of closures whose results it has returned.
        data_seconds: Time spent waiting for its data.
        pull_seconds: Time spent reading variables.
        compute_seconds: Time spent computing.
        push_seconds: Time spent sending values to the servers, until they were applied.
        received_bytes: Bytes of the arrays received from servers.
        sent_bytes: Bytes of the arrays sent to servers.
    """

    name: str
    state: str
    num_losses: int
    num_closures: int
    data_seconds: float
    pull_seconds: float
    compute_seconds: float
    push_seconds: float
    received_bytes: int
    sent_bytes: int


@final
@dataclass(frozen=True, slots=True)
class ServerStatistics:
    """The work that one server has done for a coordinator.

    The staleness of a push is the number of other pushes that the server applied after the worker
    read the values it computed with.

    Attributes:
        name: Name and address of the server.
        num_pushes: Number of pushes applied.
        num_repeated: Number of pushes refused because they were repetitions.
        staleness_sum: Sum of the staleness of all pushes.
        max_staleness: Largest staleness of a push.
    """

    name: str
    num_pushes: int
    num_repeated: int
    staleness_sum: int
    max_staleness: int


@final
@dataclass(frozen=True, slots=True)
class CoordinatorStatistics:
    """The closures of a coordinator, counted by state, and the work of its workers and servers.

    Attributes:
        num_queued: Number of closures that wait for a worker.
        num_running: Number of closures that workers are running.
        num_done: Number of closures that have returned.
        num_failed: Number of closures that have raised an error.
        num_cancelled: Number of closures that were not run because another one failed.
        num_retried: Number of times that a closure was run again because its worker was lost.
        workers: Statistics of each worker, by worker number.
        servers: Statistics of each server, by server number.
    """

    num_queued: int
    num_running: int
    num_done: int
    num_failed: int
    num_cancelled: int
    num_retried: int
    workers: tuple[WorkerStatistics, ...]
    servers: tuple[ServerStatistics, ...]


@final
class Tally:
    """The running totals of a worker: the seconds and bytes of `WorkerStatistics`."""

    def __init__(self) -> None:
        self.sums: dict[str, Any] = {
            "data_seconds": 0.0,
            "pull_seconds": 0.0,
            "compute_seconds": 0.0,
            "push_seconds": 0.0,
            "received_bytes": 0,
            "sent_bytes": 0,
        }

    @contextmanager
    def time(self, phase: str) -> Iterator[None]:
        """Runs the block, and adds its time to a phase: data, pull, compute or push."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.sums[f"{phase}_seconds"] += time.monotonic() - start

    def add(self, other: dict[str, Any]) -> None:
        """Adds the totals of another tally."""
        for name in self.sums:
            self.sums[name] += other[name]
