"""The program that `_connection.py` runs, which passes connections on.

It runs with only the standard library and without importing distributary:

    python -I -S _relay_process.py SERVER_FD PARENT_PID HOST PORT

`SERVER_FD` is a listening socket. The program ends when its stdin is closed or its parent process
ends; a child that the parent has forked may keep its end of stdin open.
"""

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

_PART_BYTES = 1 << 16
_CONNECT_SECONDS = 5.0
_RETRY_SECONDS = 0.02
_LOOK_SECONDS = 0.5


def _accept(server: socket.socket, address: tuple[str, int]) -> None:
    while True:
        client, _ = server.accept()
        try:
            service = _connect(address)
        except OSError:
            client.close()  # the client tries again
            continue
        for connection in (client, service):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _start(_pass_on, client, service, True)
        _start(_pass_on, service, client, False)  # leaves the client's connection open


def _connect(address: tuple[str, int]) -> socket.socket:
    # The service is only just starting. Without retries here, the client would pause for a second.
    end = time.monotonic() + _CONNECT_SECONDS
    while True:
        try:
            return socket.create_connection(address)
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
        time.sleep(_RETRY_SECONDS)


def _pass_on(source: socket.socket, target: socket.socket, closes: bool) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(_PART_BYTES):
            target.sendall(data)
    if closes:
        source.close()
        target.close()


def _start(function: Callable[..., None], *args: object) -> None:
    threading.Thread(target=function, args=args, daemon=True).start()


def _main() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    server_fd, parent, host, port = sys.argv[1:]
    _start(_accept, socket.socket(fileno=int(server_fd)), (host, int(port)))
    while os.getppid() == int(parent) and not select.select([0], [], [], _LOOK_SECONDS)[0]:
        pass
    os._exit(0)


if __name__ == "__main__":
    _main()
