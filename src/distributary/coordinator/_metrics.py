"""Numbers of a process as text for Prometheus, for programs on the same machine."""

import errno
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, Final, final

from distributary.errors import InvalidValueError

if TYPE_CHECKING:
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

__all__ = ["METRICS_VARIABLE", "MetricsServer", "lines_of"]

_log = logging.getLogger(__name__)

METRICS_VARIABLE: Final = "DISTRIBUTARY_METRICS_PORT"
_NUM_PORTS = 100  # one for each process of a job on this machine


@final
class MetricsServer:
    """Answers HTTP requests from this machine.

    Args:
        port: The first port to try; another process of the job may have it. 0 takes a free one.
        collect: Returns the lines of the answer.

    Attributes:
        port: The port that was taken.
    """

    def __init__(self, port: int, collect: Callable[[], Iterable[str]]) -> None:
        from http.server import BaseHTTPRequestHandler

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                try:
                    status, text = 200, "".join(f"{line}\n" for line in collect())
                except Exception as error:
                    status, text = 503, f"{type(error).__name__}: {error}\n"
                content = text.encode()
                self.send_response(status)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:
                _log.debug(format, *args)

        self._server = _listen(port, Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="distributary metrics", daemon=True
        )
        self._thread.start()
        _log.info("Metrics at http://127.0.0.1:%d/metrics", self.port)

    @classmethod
    def from_environ(
        cls, environ: Mapping[str, str], collect: Callable[[], Iterable[str]]
    ) -> "MetricsServer | None":
        """A server at the port that `DISTRIBUTARY_METRICS_PORT` names; None if it is not set.

        Raises:
            InvalidValueError: if it is no port.
        """
        text = environ.get(METRICS_VARIABLE)
        if not text:
            return None
        if not text.isdecimal() or int(text) + _NUM_PORTS > 1 << 16:
            raise InvalidValueError(
                f"{METRICS_VARIABLE} is {text!r}, expected the number of a port: the first of"
                f" {_NUM_PORTS}, of which every process of the job on this machine takes one."
            )
        return cls(int(text), collect)

    def close(self) -> None:
        """Ends its thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def lines_of(prefix: str, statistics: Any, labels: str = "") -> list[str]:
    """A line for every number of some statistics, also of those in it.

    Args:
        prefix: `"worker"` gives `distributary_worker_num_losses`.
        statistics: A dataclass, or numbers by name.
        labels: As in `{name="worker 0"}`.
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


def _listen(port: int, handler: "type[BaseHTTPRequestHandler]") -> "ThreadingHTTPServer":
    from http.server import ThreadingHTTPServer

    for other in range(port, port + _NUM_PORTS - 1):
        try:
            return ThreadingHTTPServer(("127.0.0.1", other), handler)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    return ThreadingHTTPServer(("127.0.0.1", port + _NUM_PORTS - 1), handler)
