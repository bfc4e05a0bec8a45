"""Statistics of asynchronous training, and the HTTP server by which processes show numbers."""

import errno
import logging
import socket
import socketserver
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any, Final, TypeAlias, final

from distributary._threads import start_thread
from distributary.cluster_resolver import is_ip, split_port
from distributary.errors import InvalidValueError

_BACKLOG = 128
_POLL_SECONDS = 0.1  # so long `close` waits at most
_REQUEST_SECONDS = 10.0  # for each part of a request and of an answer
_MAX_CLIENTS = 256  # each has a thread


@final
@dataclass(frozen=True)
class Answer:
    """An answer to a request.

    Args:
        content: The body.
        content_type: Media type of the body.
        status: The HTTP status.
        headers: Additional headers.
    """

    content: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


_Respond: TypeAlias = Callable[[str], Answer | None]
_NOT_FOUND = Answer(b"There is no such page.\n", status=404)
_BAD_HOST = Answer(b"The header Host names another machine.\n", status=403)


@final
class HttpServer:
    """A server that answers GET requests, each in a thread, and hangs up when there are too many.

    A malicious web page can make its own host name point to this machine, and so have a browser
    read what only this machine may read (DNS rebinding). So the header Host must be an IP address,
    `localhost`, `address` or the name of this machine.

    Args:
        address: Address to listen on.
        port: The first port to try; 0 takes a free one.
        respond: Returns the answer for a path with its query; None if there is no such page.
        name: Name of the thread.
        num_ports: Number of ports, from the first one on, to try if they are taken.

    Attributes:
        port: Port on which it listens.

    Raises:
        OSError: if none of the ports is available.
    """

    def __init__(
        self, address: str, port: int, respond: _Respond, name: str, num_ports: int = 1
    ) -> None:
        hosts = {"localhost", address.lower(), socket.gethostname().lower()}
        room = threading.Semaphore(_MAX_CLIENTS)

        class Handler(BaseHTTPRequestHandler):
            timeout = _REQUEST_SECONDS

            def do_GET(self) -> None:
                host, _ = split_port(self.headers.get("Host", "").lower())
                page = self._page() if host in hosts or is_ip(host) else _BAD_HOST
                self.send_response(page.status)
                self.send_header("Content-Type", page.content_type)
                self.send_header("Content-Length", str(len(page.content)))
                for header in page.headers.items():
                    self.send_header(*header)
                self.end_headers()
                self.wfile.write(page.content)

            def _page(self) -> Answer:
                try:
                    return respond(self.path) or _NOT_FOUND
                except Exception as error:
                    return Answer(f"{type(error).__name__}: {error}\n".encode(), status=503)

            def log_message(self, format: str, *args: object) -> None:
                _log.debug(format, *args)

        # Not `http.server.HTTPServer`, which looks up the name of the address when it starts.
        class Server(socketserver.ThreadingTCPServer):
            address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
            allow_reuse_address = daemon_threads = True
            request_queue_size = _BACKLOG

            def verify_request(self, request: object, client_address: object) -> bool:
                return room.acquire(blocking=False)

            def process_request_thread(self, request: Any, client_address: Any) -> None:
                try:
                    super().process_request_thread(request, client_address)
                finally:
                    room.release()

            def handle_error(self, request: object, client_address: object) -> None:
                _log.debug("A request from %s failed.", client_address, exc_info=True)

        for number in range(port, port + num_ports):
            try:
                self._server = Server((address, number), Handler)
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE or number == port + num_ports - 1:
                    raise
        self.port: int = self._server.server_address[1]
        self._thread = start_thread(
            lambda: self._server.serve_forever(_POLL_SECONDS), self._server.shutdown, name
        )

    def close(self) -> None:
        """Stops the server and ends its thread."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


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
