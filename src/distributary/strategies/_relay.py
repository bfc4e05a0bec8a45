"""A way to JAX's coordination service that does not break when the service dies."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable

__all__ = ["relay_to"]

_PART_BYTES = 1 << 16
_CONNECT_SECONDS = 5.0
_RETRY_SECONDS = 0.02


def relay_to(address: tuple[str, int]) -> str:
    """A loopback address of this process whose connections are passed on to `address`.

    JAX's client ends the process from C++, without a sentence, as soon as its connection to the
    service breaks. A connection of the relay stays open then; who is lost is told by `Liveness`.

    Args:
        address: Host and port of the service.

    Returns:
        `"127.0.0.1:PORT"`.
    """
    server = socket.create_server(("127.0.0.1", 0))
    _start(_accept, server, address)
    return f"127.0.0.1:{server.getsockname()[1]}"


def _accept(server: socket.socket, address: tuple[str, int]) -> None:
    while True:
        client, _ = server.accept()
        try:
            service = _connect(address)
        except OSError:
            client.close()  # which tries again
            continue
        for connection in (client, service):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _start(_to_service, client, service)
        _start(_to_client, service, client)


def _connect(address: tuple[str, int]) -> socket.socket:
    # The service is started at this moment. Left to itself, the client would pause for a second.
    end = time.monotonic() + _CONNECT_SECONDS
    while True:
        try:
            return socket.create_connection(address)
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
        time.sleep(_RETRY_SECONDS)


def _to_service(client: socket.socket, service: socket.socket) -> None:
    with client, service:
        _pass_on(client, service)


def _to_client(service: socket.socket, client: socket.socket) -> None:
    _pass_on(service, client)  # and leaves the client's connection as it is


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(_PART_BYTES):
            target.sendall(data)


def _start(function: Callable[..., None], *args: object) -> None:
    threading.Thread(target=function, args=args, name="distributary-relay", daemon=True).start()
