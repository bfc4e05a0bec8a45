"""Metrics of a process in the text format of Prometheus, for programs on the same machine."""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Final, final

from distributary.errors import InvalidValueError
from distributary.monitoring import Answer, HttpServer

__all__ = ["METRICS_VARIABLE", "MetricsServer", "lines_of"]

_log = logging.getLogger(__name__)

METRICS_VARIABLE: Final = "DISTRIBUTARY_METRICS_PORT"
_NUM_PORTS = 100  # one for each process of a job on this machine


@final
class MetricsServer:
    """An HTTP server that shows metrics to this machine.

    Args:
        port: The first port to try, as another process of the job may have it. 0 takes any free
            port.
        collect: Returns the lines of the answer.

    Attributes:
        port: The port that was taken.
    """

    def __init__(self, port: int, collect: Callable[[], Iterable[str]]) -> None:
        def respond(path: str) -> Answer:
            text = "".join(f"{line}\n" for line in collect())
            return Answer(text.encode(), "text/plain; version=0.0.4")

        self._server = HttpServer("127.0.0.1", port, respond, "distributary metrics", _NUM_PORTS)
        self.port = self._server.port
        _log.info("Metrics at http://127.0.0.1:%d/metrics", self.port)

    @classmethod
    def from_environ(
        cls, environ: Mapping[str, str], collect: Callable[[], Iterable[str]]
    ) -> "MetricsServer | None":
        """Starts a server at the port in `DISTRIBUTARY_METRICS_PORT`; returns None if not set.

        Raises:
            InvalidValueError: if it is not a port.
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
        """Ends the server and its thread."""
        self._server.close()


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
