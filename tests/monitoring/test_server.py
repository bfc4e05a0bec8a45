"""What strangers and slow clients cost a program that answers HTTP requests: next to nothing."""

import contextlib
import http.client
import itertools
import os
import resource
import selectors
import socket
import threading
import time
from urllib.parse import urlsplit

import jax.numpy as jnp
import psutil
import pytest

import distributary as dist
from distributary.monitoring import Answer, HttpServer

_SECONDS = 60.0  # more than anything takes
_NUM_CLIENTS = 500
_HEAD = b"GET /stats.json HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def server():
    """One that says which path was asked for."""
    server = HttpServer("127.0.0.1", 0, lambda path: Answer(path.encode()), "server")
    yield server
    server.close()


@pytest.fixture(autouse=True)
def many_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def _connected(port, num_clients=_NUM_CLIENTS):
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), _SECONDS))
            for _ in range(num_clients)
        ]


def _send(client, data):
    with contextlib.suppress(OSError):  # it was cut off
        client.sendall(data)


def _get(port, path="/"):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_SECONDS)
    with contextlib.closing(connection):
        connection.request("GET", path, headers={"Host": "localhost"})
        reply = connection.getresponse()
        return reply.status, reply.read()


def _reply(port, data):
    """What comes until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", port), _SECONDS) as client:
        client.sendall(data)
        with contextlib.suppress(ConnectionResetError):
            return b"".join(iter(lambda: client.recv(1 << 16), b""))
    return b""


def test_500_slow_clients_of_a_dashboard_take_no_thread_and_no_reader_waits(strategy_of):
    strategy = strategy_of(2)
    steps = itertools.count()
    step = lambda x: x * 2 + 1

    def take_step():
        next(steps)
        return strategy.run(step, args=(jnp.float32(1),))

    take_step()
    with dist.experimental.dashboard(strategy) as dashboard:
        port = urlsplit(dashboard.url).port
        threads = set(threading.enumerate())
        slow, deaf = range(200, 400), range(400, _NUM_CLIENTS)  # the others say nothing
        with _connected(port) as clients:
            for i in deaf:
                _send(clients[i], _HEAD)
            for byte in _HEAD[:20]:
                for i in slow:
                    _send(clients[i], bytes([byte]))
                take_step()
                assert _get(port)[0] == 200
            assert _get(port, "/stats.json")[0] == 200
            started = {thread.name for thread in set(threading.enumerate()) - threads}
            assert started <= {"distributary-statistics"}

    assert next(steps) == 21


def test_what_nobody_reads_takes_little_memory():
    content = bytes(1 << 22)
    server = HttpServer("127.0.0.1", 0, lambda path: Answer(content[1:] + b"a"), "server")
    process = psutil.Process(os.getpid())
    try:
        assert len(_get(server.port)[1]) == 1 << 22
        bytes_before = process.memory_info().rss
        with _connected(server.port) as clients:
            for client in clients:
                _send(client, _HEAD)
            for _ in range(5):
                assert len(_get(server.port)[1]) == 1 << 22
            used = process.memory_info().rss - bytes_before
    finally:
        server.close()

    assert used < 1 << 28  # of the 2 GiB that have been asked for


def test_clients_that_come_again_and_again_keep_nobody_out(server):
    """Each takes the place of the oldest; who asks at once is answered before that.

    A client whose thread the machine stops between connecting and asking is the oldest, too, and
    asks again.
    """
    stop = threading.Event()

    def answer(number):
        for _ in range(10):
            with contextlib.suppress(ConnectionError):
                return _get(server.port, f"/{number}")
        return None

    def come_again():
        with contextlib.ExitStack() as stack:
            while not stop.is_set():
                client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
                client.sendall(b"G")
                if len(stack._exit_callbacks) > 300:
                    stack.close()

    thread = threading.Thread(target=come_again)
    thread.start()
    try:
        replies = [answer(i) for i in range(100)]
    finally:
        stop.set()
        thread.join()

    assert replies == [(200, f"/{i}".encode()) for i in range(100)]


def test_a_request_that_never_ends_is_cut_off(server, monkeypatch):
    monkeypatch.setattr("distributary.monitoring._server._REQUEST_SECONDS", 1.0)
    with _connected(server.port, 3) as clients, selectors.DefaultSelector() as selector:
        clients[0].sendall(_HEAD[:9])
        clients[1].sendall(_HEAD[:-1])
        for client in clients:
            selector.register(client, selectors.EVENT_READ)
        end = time.monotonic() + _SECONDS
        closed = set()
        while len(closed) < len(clients):
            assert time.monotonic() < end
            for key, _ in selector.select(1):
                assert key.fileobj.recv(100) == b""
                selector.unregister(key.fileobj)
                closed.add(key.fileobj)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nA: " + b"a" * (1 << 15) + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"A: a\r\n" * 200 + b"\r\n", 431),
        (b"GET /" + b"a" * (1 << 16) + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 431),
        (b"POST / HTTP/1.1\r\nHost: localhost\r\n\r\n", 501),
        (b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n", 505),
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", 400),
        (b"\r\n\r\n", None),
        (b"GET / HTTP/1.1\r\n\r\n", 403),
        (b"GET / HTTP/1.1\r\nHost: attacker.example\r\nHost: localhost\r\n\r\n", 403),
    ],
)
def test_strange_requests_get_an_error_and_the_next_client_an_answer(server, data, status):
    reply = _reply(server.port, data)

    if reply and status:  # a large request may end with a reset before the reply is read
        assert f"{status}".encode() in reply.split(b"\r\n")[0]
    assert _get(server.port, "/a") == (200, b"/a")


@pytest.mark.parametrize(
    "path",
    ["/../../etc/passwd", "/%2e%2e/etc/passwd", "//etc/passwd", "/page.html", "/stats.json/.."],
)
def test_only_the_pages_that_there_are_can_be_read(path, strategy_of):
    with dist.experimental.dashboard(strategy_of(1)) as dashboard:
        assert _get(urlsplit(dashboard.url).port, path)[0] == 404


def test_closing_leaves_no_thread_and_no_connection():
    for _ in range(20):  # as some are accepted
        server = HttpServer("127.0.0.1", 0, lambda path: Answer(b""), "server")
        with _connected(server.port, 20) as clients:
            server.close()
            server.close()

            assert not server._thread.is_alive()
            for client in clients:
                with contextlib.suppress(ConnectionResetError):
                    assert client.recv(1) == b""
