"""What strangers and slow clients can do to a program that serves a page: nothing."""

import contextlib
import http.client
import socket

import pytest

from distributary.servers import _statistics
from distributary.servers._statistics import Answer, HttpServer

_SECONDS = 60.0  # more than anything takes


@contextlib.contextmanager
def _server_of_paths():
    """One that says which path was asked for."""
    server = HttpServer("127.0.0.1", 0, lambda path: Answer(path.encode()), "server")
    yield server
    server.close()


def _get(port, path="/"):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_SECONDS)
    with contextlib.closing(connection):
        connection.request("GET", path, headers={"Host": "localhost"})
        reply = connection.getresponse()
        return reply.status, reply.read()


def _read(client):
    """What comes until the server closes the connection."""
    with contextlib.suppress(ConnectionResetError):
        return b"".join(iter(lambda: client.recv(1 << 16), b""))
    return b""


def _connected(server, count, stack):
    """Clients that have asked for nothing yet."""
    address = "127.0.0.1", server.port
    connect = lambda: stack.enter_context(socket.create_connection(address, _SECONDS))
    return [connect() for _ in range(count)]


def test_clients_that_never_end_a_request_delay_nobody_and_are_cut_off(monkeypatch):
    monkeypatch.setattr(_statistics, "_REQUEST_SECONDS", 0.5)
    with _server_of_paths() as server, contextlib.ExitStack() as stack:
        clients = _connected(server, 50, stack)
        for client in clients[10:]:
            client.sendall(b"GET / HT")

        assert _get(server.port, "/a") == (200, b"/a")
        assert [_read(client) for client in clients] == [b""] * 50


def test_more_clients_than_there_is_room_for_are_hung_up_on(monkeypatch):
    monkeypatch.setattr(_statistics, "_MAX_CLIENTS", 3)
    with _server_of_paths() as server, contextlib.ExitStack() as stack:
        clients = _connected(server, 4, stack)
        assert _read(clients.pop()) == b""  # while the others have not been answered

        for client in clients:
            client.sendall(b"GET /a HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert [_read(client)[-2:] for client in clients] == [b"/a"] * 3
        assert _get(server.port, "/b") == (200, b"/b")


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nA: " + b"a" * (1 << 17) + b"\r\n\r\n", 431),
        (b"GET /" + b"a" * (1 << 17) + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 414),
        (b"POST / HTTP/1.1\r\nHost: localhost\r\n\r\n", 501),
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 403),
        (b"GET / HTTP/1.1\r\nHost: \r\n\r\n", 403),
        (b"GET / HTTP/1.0\r\nHost: localhost:1\r\n\r\n", 200),
        (b"GET / HTTP/1.0\r\nHost: [::1]:80\r\n\r\n", 200),
        (b"GET / HTTP/1.1\r\nHost: attacker.example\r\nHost: localhost\r\n\r\n", 403),
    ],
)
def test_strange_requests_get_an_error_and_the_next_client_an_answer(data, status):
    with _server_of_paths() as server:
        with socket.create_connection(("127.0.0.1", server.port), _SECONDS) as client:
            client.sendall(data)
            reply = _read(client)

        if reply:  # a large request may end with a reset before the reply is read
            assert f"{status}".encode() in reply.split(b"\r\n")[0]
        assert _get(server.port, "/a") == (200, b"/a")
