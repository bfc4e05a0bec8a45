"""Numbers about asynchronous training, which are always counted."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

__all__ = ["CoordinatorStatistics", "ServerStatistics", "Tally", "WorkerStatistics"]


@final
@dataclass(frozen=True, slots=True)
class WorkerStatistics:
    """What a worker has done for a coordinator.

    Attributes:
        name: Its name and address.
        state: `"connecting"` at the beginning, `"idle"`, `"running"`, `"lost"`, or `"given up"`
            after it was lost for too long.
        num_losses: How often it was lost.
        num_closures: Closures whose results it has returned.
        data_seconds: Time in which it has waited for its data.
        pull_seconds: Time in which it has read variables.
        compute_seconds: Time in which it has computed.
        push_seconds: Time in which it has sent values to the servers, and these were applied.
        received_bytes: Bytes of the arrays that it has received from servers.
        sent_bytes: Bytes of the arrays that it has sent to servers.
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
    """What a server has done for a coordinator.

    The staleness of a push is the number of others that the server has applied since the worker
    has read what it has computed with.

    Attributes:
        name: Its name and address.
        num_pushes: Pushes that it has applied.
        num_repeated: Pushes that it has refused, as they were repetitions.
        staleness_sum: Sum of the staleness of all pushes.
        max_staleness: That of the stalest push.
    """

    name: str
    num_pushes: int
    num_repeated: int
    staleness_sum: int
    max_staleness: int


@final
@dataclass(frozen=True, slots=True)
class CoordinatorStatistics:
    """What has become of the closures of a coordinator.

    Attributes:
        num_queued: Closures that wait for a worker.
        num_running: Closures that workers have.
        num_done: Closures that have returned.
        num_failed: Closures that have raised.
        num_cancelled: Closures that were not run because of an error of another one.
        num_retried: How often a closure had to be run again because its worker was lost.
        workers: By their number.
        servers: By their number.
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
    """Sums of a worker: seconds of its phases, and bytes; the fields of `WorkerStatistics`."""

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
        """Adds the time of a with block to that of a phase: data, pull, compute or push."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.sums[f"{phase}_seconds"] += time.monotonic() - start

    def add(self, other: dict[str, Any]) -> None:
        """Adds other sums."""
        for name in self.sums:
            self.sums[name] += other[name]
