"""Statistics of asynchronous training, which are always collected, and a server that shows them."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final, final

from distributary.errors import InvalidValueError
from distributary.servers._http import Answer, HttpServer

_log = logging.getLogger(__name__)

METRICS_VARIABLE: Final = "DISTRIBUTARY_METRICS_PORT"
_NUM_PORTS = 100  # one for each process of a job on this machine


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


def new_tally() -> "Counter[str]":
    """Returns the running totals of a worker: the seconds and bytes of `WorkerStatistics`."""
    names = [field.name for field in fields(WorkerStatistics)]
    return Counter({name: 0 for name in names if name.endswith(("_seconds", "_bytes"))})


@contextmanager
def timed(tally: dict[str, Any], phase: str) -> Iterator[None]:
    """Runs the block, and adds its time to a phase of a tally: data, pull, compute or push."""
    start = time.monotonic()
    try:
        yield
    finally:
        tally[f"{phase}_seconds"] += time.monotonic() - start


def serve_metrics(
    environ: Mapping[str, str], collect: Callable[[], Iterable[str]]
) -> Callable[[], object]:
    """Starts an HTTP server that shows metrics to this machine; returns a function that ends it.

    Args:
        environ: The environment. `DISTRIBUTARY_METRICS_PORT` is the first port to try, as another
            process of the job may have it; 0 takes any free port. Without it, there is no server.
        collect: Returns the lines of the answer.

    Raises:
        InvalidValueError: if it is not a port.
    """
    text = environ.get(METRICS_VARIABLE)
    if not text:
        return lambda: None
    if not text.isdecimal() or int(text) + _NUM_PORTS > 1 << 16:
        raise InvalidValueError(
            f"{METRICS_VARIABLE} is {text!r}, expected the number of a port: the first of"
            f" {_NUM_PORTS}, of which every process of the job on this machine takes one."
        )

    def respond(path: str) -> Answer:
        lines = "".join(f"{line}\n" for line in collect())
        return Answer(lines.encode(), "text/plain; version=0.0.4")

    server = HttpServer("127.0.0.1", int(text), respond, "distributary metrics", _NUM_PORTS)
    _log.info("Metrics at http://127.0.0.1:%d/metrics", server.port)
    return server.close


def lines_of(prefix: str, statistics: Any, labels: str = "") -> list[str]:
    """Returns a line for every number in some statistics, including nested ones.

    Args:
        prefix: Part of each name: `"worker"` gives `distributary_worker_num_losses`.
        statistics: A dataclass, or numbers by name.
        labels: Labels, such as `{name="worker 0"}`.
    """
    if is_dataclass(statistics):
        statistics = {field.name: getattr(statistics, field.name) for field in fields(statistics)}
    lines = []
    for name, value in statistics.items():
        if isinstance(value, (int, float)):
            lines.append(f"distributary_{prefix}_{name}{labels} {value}")
        elif isinstance(value, tuple):
            for one in value:
                lines += lines_of(name.removesuffix("s"), one, f'{{name="{one.name}"}}')
    return lines
