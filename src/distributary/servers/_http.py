"""The HTTP server by which processes show their numbers: a page, or metrics."""

import errno
import logging
import socket
import socketserver
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any, TypeAlias, final

from distributary._threads import start_thread
from distributary.cluster_resolver import is_ip, split_port

_log = logging.getLogger(__name__)
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
