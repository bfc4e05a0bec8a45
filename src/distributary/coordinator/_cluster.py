"""The tasks of a job with parameter servers, and where its variables are."""

import itertools
import threading
from collections.abc import Callable
from typing import Any, final

import numpy as np

from distributary.coordinator._in_process import InProcessLink
from distributary.coordinator._links import Link, Service
from distributary.coordinator._messages import JSON, Limits, Message
from distributary.coordinator._sources import LocalMakers
from distributary.coordinator._store import ParameterServer
from distributary.coordinator._worker import Worker
from distributary.errors import InvalidValueError
from distributary.tracing import Handle

__all__ = ["Cluster", "local_cluster"]


class Cluster:
    """Links to workers and servers, and the variables on these.

    Args:
        worker_links: To the workers.
        server_links: To the servers, by their number.
        describe: Describes functions that make data so that workers find them.
    """

    def __init__(
        self,
        worker_links: list[Link],
        server_links: list[Link],
        describe: Callable[[Any], JSON],
    ) -> None:
        self.worker_links = worker_links
        self.server_links = server_links
        self.describe = describe
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def create(self, value: np.ndarray) -> tuple[int, int]:
        """A new variable, on the next server; returns the numbers of the server and of itself."""
        with self._lock:
            number = next(self._numbers)
        server = number % len(self.server_links)
        self.server_links[server].call(Message("create", {"ids": [number]}, [value]))
        return server, number

    def read(self, place: tuple[int, int]) -> np.ndarray:
        """The value of a variable."""
        server, number = place
        (value,) = self.server_links[server].call(Message("read", {"ids": [number]})).arrays
        return np.asarray(value)

    def assign(self, place: tuple[int, int], operation: str, value: np.ndarray) -> None:
        """Changes a variable: assign, assign_add or assign_sub."""
        server, number = place
        fields = {"ids": [number], "operation": operation}
        self.server_links[server].call(Message("assign", fields, [value]))

    def place_of(self, handle: Handle) -> tuple[int, int]:
        """Where the variable of a handle is."""
        place = getattr(handle.cell(), "_place", None) if handle.cell is not None else None
        if place is None:
            raise InvalidValueError(
                f"Variable {handle.name!r} was not created in the scope of the strategy, so no"
                " server has it. Create it inside `with strategy.scope():`."
            )
        found: tuple[int, int] = place
        return found

    def close(self) -> None:
        """Ends what belongs to the cluster in this process."""
        for link in (*self.worker_links, *self.server_links):
            link.close()


@final
class _LocalCluster(Cluster):
    def __init__(self, num_workers: int, num_servers: int, limits: Limits | None) -> None:
        def link(service: Service, name: str) -> Link:
            return InProcessLink(service, name=name, limits=limits)

        makers = LocalMakers()
        self.servers = [ParameterServer(number) for number in range(num_servers)]
        server_links = [link(server, f"ps {server.number}") for server in self.servers]
        self._workers = [Worker(number, server_links, makers.find) for number in range(num_workers)]
        worker_links = [link(worker, f"worker {worker.number}") for worker in self._workers]
        super().__init__(worker_links, server_links, makers.describe)

    def close(self) -> None:
        super().close()
        for worker in self._workers:
            worker.close()

    def __repr__(self) -> str:
        return f"local_cluster(workers={len(self.worker_links)}, ps={len(self.server_links)})"


def local_cluster(workers: int = 2, ps: int = 1, *, limits: Limits | None = None) -> Cluster:
    """Workers and parameter servers in this process, for `ParameterServerStrategy`.

    Args:
        workers: Number of workers, each a thread.
        ps: Number of servers.
        limits: If given, what the tasks send each other is encoded, checked and decoded as between
            processes.

    Raises:
        InvalidValueError: if a number is not positive.
    """
    for name, number in (("workers", workers), ("ps", ps)):
        if number < 1:
            raise InvalidValueError(f"local_cluster: {name} is {number}, expected at least 1.")
    return _LocalCluster(workers, ps, limits)
