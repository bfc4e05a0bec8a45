"""A server for HTTP requests, by default only from this machine."""

import asyncio
import contextlib
import errno
import io
import ipaddress
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Final, TypeAlias, final

from distributary.dispatch import start_thread

_log = logging.getLogger(__name__)


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


_BACKLOG = 128
_MAX_CLIENTS = 256  # more than one accept can bring, so that each gets its turn
_MAX_REQUEST_BYTES = 1 << 14
_MAX_WAITING_BYTES = 1 << 26
_SEND_BUFFER_BYTES = 1 << 17
_PART_BYTES = 1 << 16  # part of an answer that is sent at once, because asyncio copies it
_REQUEST_SECONDS, _ANSWER_SECONDS = 10.0, 30.0
_CLOSE_SECONDS = 5.0  # for an answer that is still being made

_NOTHING: Final = memoryview(b"")

_Respond: TypeAlias = Callable[[str], Answer | None]
_NOT_FOUND = Answer(b"There is no such page.\n", status=404)
_BAD_HOST = Answer(b"The header Host names another machine.\n", status=403)


@final
@dataclass
class _Client:
    """A connection, the rest of the answer that is left to send, and the answer's whole size."""

    transport: asyncio.WriteTransport
    unread: memoryview = _NOTHING
    num_bytes: int = 0


@final
class HttpServer:
    """A server that answers GET requests in one thread, for any number of clients, even slow ones.

    A client has ten seconds for its request and half a minute to read the answer. If there are too
    many clients, or too much is waiting to be read, the client that has been there longest is cut
    off. So idle connections, however many, neither keep others out nor take more than some
    megabytes.

    A malicious web page can make its own host name point to this machine, and so have a browser
    read what only this machine may read (DNS rebinding). So the header Host must be an IP address,
    `localhost`, `address` or the name of this machine.

    Args:
        address: Address to listen on.
        port: The first port to try; 0 takes a free one.
        respond: Returns the answer for a path with its query; None if there is no such page. Runs
            for one request at a time.
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
        self._respond = respond
        self._hosts = {"localhost", address.lower(), socket.gethostname().lower()}
        self._socket = _listen(address, range(port, port + num_ports))
        self.port: int = self._socket.getsockname()[1]
        self._clients: dict[asyncio.Task[None], _Client] = {}  # the oldest comes first
        self._closing = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = start_thread(self._run, self._stop, name)

    def close(self) -> None:
        """Stops the server and ends its thread."""
        self._stop()
        self._thread.join(_CLOSE_SECONDS)

    def _stop(self) -> None:
        with contextlib.suppress(RuntimeError):  # raised if the thread has ended
            self._loop.call_soon_threadsafe(self._closing.set)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(
            self._accept, sock=self._socket, limit=_MAX_REQUEST_BYTES, backlog=_BACKLOG
        )
        await self._closing.wait()
        # `close` comes later: here it would leave connections open that are being accepted.
        self._loop.remove_reader(self._socket.fileno())
        for client in list(self._clients):
            self._cut_off(client)
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others)
        server.close()
        await asyncio.sleep(0)  # lets connections that were cut off close

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._closing.is_set():
            writer.transport.abort()
            return
        client = asyncio.create_task(self._talk(reader, writer))
        self._clients[client] = _Client(writer.transport)
        self._make_room(client)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = asyncio.current_task()
        assert client is not None
        place = self._clients[client]
        try:
            async with asyncio.timeout(_REQUEST_SECONDS):
                try:
                    head = await reader.readuntil(b"\r\n\r\n")
                except asyncio.LimitOverrunError:
                    head = None
            # Not in a variable of this function, which stays for a while when it is cut off.
            place.unread = memoryview(_Request(head, self._respond, self._hosts).answer.getvalue())
            place.num_bytes = len(place.unread)
            self._make_room(client)
            async with asyncio.timeout(_ANSWER_SECONDS):
                while place.unread:
                    writer.write(place.unread[:_PART_BYTES])
                    place.unread = place.unread[_PART_BYTES:]
                    await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (asyncio.IncompleteReadError, OSError, TimeoutError):  # client gone, or too slow
            pass
        finally:
            if client in self._clients:  # it was not cut off
                self._cut_off(client)

    def _make_room(self, newest: asyncio.Task[None]) -> None:
        """Cuts off the oldest clients if there are too many, or too much is waiting."""
        total = sum(client.num_bytes for client in self._clients.values())
        for oldest in list(self._clients):
            if len(self._clients) <= _MAX_CLIENTS and total <= _MAX_WAITING_BYTES:
                break
            if oldest is not newest:
                total -= self._clients[oldest].num_bytes
                self._cut_off(oldest)

    def _cut_off(self, client: asyncio.Task[None]) -> None:
        place = self._clients.pop(client)
        place.unread = _NOTHING  # because the exception that ends the task keeps it for a while
        if place.transport.get_extra_info("socket").fileno() >= 0:  # not yet closed by asyncio
            place.transport.abort()
        client.cancel()


@final
class _Request(BaseHTTPRequestHandler):
    """A request, whose answer is in `answer`.

    Args:
        head: The request up to the empty line; None if it is too long.
        respond: As of `HttpServer`.
        hosts: Names that the header Host may have, besides IP addresses.
    """

    # The base class would read from a socket.
    def __init__(self, head: bytes | None, respond: _Respond, hosts: set[str]) -> None:
        self._respond = respond
        self._hosts = hosts
        self.rfile = io.BytesIO(head or b"")
        self.wfile = self.answer = io.BytesIO()
        self.requestline, self.request_version, self.command = "", "HTTP/1.0", ""
        if head is None:
            self.send_error(431)
        else:
            self.handle_one_request()

    def do_GET(self) -> None:
        host = _host_of(self.headers.get("Host", ""))
        answer = self._page() if host in self._hosts or _is_ip_address(host) else _BAD_HOST
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.content)))
        for header in answer.headers.items():
            self.send_header(*header)
        self.end_headers()
        self.wfile.write(answer.content)

    def _page(self) -> Answer:
        try:
            return self._respond(self.path) or _NOT_FOUND
        except Exception as error:
            return Answer(f"{type(error).__name__}: {error}\n".encode(), status=503)

    def log_message(self, format: str, *args: object) -> None:
        _log.debug(format, *args)


def _host_of(header: str) -> str:
    """Returns the host in `HOST:PORT`, `HOST` or `[IPV6]:PORT`."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].lower()


def _is_ip_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _listen(address: str, ports: range) -> socket.socket:
    is_ipv6 = ":" in address
    family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
    both = is_ipv6 and socket.has_dualstack_ipv6()
    for port in ports:
        try:
            listener = socket.create_server(
                (address, port), family=family, backlog=_BACKLOG, dualstack_ipv6=both
            )
        except OSError as error:
            if error.errno != errno.EADDRINUSE or port == ports[-1]:
                raise
        else:
            # Limits the send buffers of connections: unread answers also take memory of the system.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
            return listener
    raise AssertionError("there are no ports")
