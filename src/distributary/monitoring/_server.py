"""Answers HTTP requests, by default only from this machine."""

import errno
import ipaddress
import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, final

if TYPE_CHECKING:
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

__all__ = ["Answer", "HttpServer"]

_log = logging.getLogger(__name__)


@final
@dataclass(frozen=True)
class Answer:
    """What a request is answered with.

    Args:
        content: The body.
        content_type: Its type.
        status: The HTTP status.
        headers: Further headers.
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
    """Answers GET requests from a thread.

    A web page of a stranger can have a name of its own stand for this machine, and so make a
    browser read what only this machine may (DNS rebinding). So the header Host must be an IP
    address, `localhost`, `address` or the name of this machine.

    Args:
        address: Where to listen.
        port: The first port to try; 0 takes a free one.
        respond: From the path, with its query, to the answer; None if there is no such page.
        name: Name of the thread.
        num_ports: How many ports from the first one on may be tried if they are taken.

    Attributes:
        port: The port that was taken.

    Raises:
        OSError: if no port can be had.
    """

    def __init__(
        self, address: str, port: int, respond: _Respond, name: str, num_ports: int = 1
    ) -> None:
        from http.server import BaseHTTPRequestHandler

        hosts = {"localhost", address.lower(), socket.gethostname().lower()}

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                host = _host_of(self.headers.get("Host", ""))
                is_known = host in hosts or _is_ip_address(host)
                answer = self._respond() if is_known else _BAD_HOST
                self.send_response(answer.status)
                self.send_header("Content-Type", answer.content_type)
                self.send_header("Content-Length", str(len(answer.content)))
                for header in answer.headers.items():
                    self.send_header(*header)
                self.end_headers()
                self.wfile.write(answer.content)

            def _respond(self) -> Answer:
                try:
                    return respond(self.path) or _NOT_FOUND
                except Exception as error:
                    return Answer(f"{type(error).__name__}: {error}\n".encode(), status=503)

            def log_message(self, format: str, *args: Any) -> None:
                _log.debug(format, *args)

        self._server = _listen(address, range(port, port + num_ports), Handler)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends its thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _host_of(header: str) -> str:
    """The host in `HOST:PORT`, `HOST` or `[IPV6]:PORT`."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].lower()


def _is_ip_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _listen(
    address: str, ports: range, handler: "type[BaseHTTPRequestHandler]"
) -> "ThreadingHTTPServer":
    from http.server import ThreadingHTTPServer

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in address else socket.AF_INET

    for port in ports[:-1]:
        try:
            return Server((address, port), handler)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    return Server((address, ports[-1]), handler)
