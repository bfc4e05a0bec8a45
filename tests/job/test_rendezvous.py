"""What strangers send to the address at which workers meet ends nothing."""

import contextlib
import json
import logging
import os
import random
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from distributary.cluster_resolver import multi_worker
from distributary.errors import ClusterError
from distributary.job import _connection
from distributary.job._connection import connect_workers
from distributary.launch import free_addresses

_SECONDS = 60.0  # more than anything takes
_NUM_LINES = int(os.environ.get("DISTRIBUTARY_FUZZ_INPUTS", "1000"))


def _line_of(place):
    """Returns what a worker says to the first one."""
    peer = place.workers[0]
    with socket.create_server((peer.host, peer.port)) as server, ThreadPoolExecutor(1) as pool:
        meeting = pool.submit(connect_workers, place, _SECONDS)
        connection = server.accept()[0]
        with connection, connection.makefile("rb") as said:
            line = said.readline()
        assert isinstance(meeting.exception(), ClusterError)
    return line


def _strange_lines(line):
    """Lines that no worker sends, and what is not even a line."""
    kind, (facts, proof), size = json.loads(line)
    for name in facts:
        for value in (None, True, 1.5, -1, 1 << 200, float("nan"), "", [1], {"a": 1}):
            yield json.dumps([kind, [{**facts, name: value}, proof], size]).encode() + b"\n"
    for content in (None, [], [facts], [proof, facts], [facts, None], [facts, "\ud800"], {}):
        yield json.dumps([kind, content, size]).encode() + b"\n"
    yield from (
        b"\n",
        b"\x00\n",
        b"\xff\xfe\xfa\n",
        b"null\n",
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        b'["here", {}, 1e400]\n',
        b'["here", {}, -1]\n',
        b'["here"]\n',
        line.replace(b"here", b"beat"),
        b'{"worker": 1' + b"0" * 5000 + b"}\n",
        b"[" * 60_000 + b"\n",
        b'{"a":' * 10_000 + b"\n",
        b'{"worker": 1, "workers": ' + b"[" * 9_000 + b"]" * 9_000 + b"}\n",
        b"a" * 200_000,
        line[:-20] + b"\n",
    )
    generator = random.Random(1)
    for _ in range(_NUM_LINES):
        damaged = bytearray(line)
        for _ in range(generator.choice([1, 1, 2, 30])):
            at = generator.randrange(len(damaged) - 1)
            match generator.randrange(3):
                case 0:
                    damaged[at] ^= 1 << generator.randrange(8)
                case 1:
                    del damaged[at]
                case 2:
                    damaged.insert(at, generator.choice(b'{}[]",:0129e.-\\ntu\x00\xff'))
        try:
            is_other = json.loads(damaged) != json.loads(line)
        except ValueError:
            is_other = True
        if is_other:  # else it says the same
            yield bytes(damaged)


@pytest.fixture
def places():
    """Two workers."""
    addresses = free_addresses("127.0.0.1", 2)
    return [multi_worker({"worker": addresses}, "worker", i) for i in range(2)]


@pytest.fixture
def said(places):
    """What the second worker says to the first one."""
    return _line_of(places[1])


@pytest.fixture
def first(places):
    """The first worker, which waits for the other: what `connect_workers` returns or raises."""
    with ThreadPoolExecutor(1) as pool:
        meeting = pool.submit(connect_workers, places[0], _SECONDS)
        yield meeting
    if meeting.exception() is None:
        for connection in meeting.result().values():
            connection.close()


def _connect(place):
    """To the first worker, as soon as it listens."""
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(
                (place.workers[0].host, place.workers[0].port), _SECONDS
            )


def _check_they_meet(places, first):
    others = connect_workers(places[1], _SECONDS)
    assert [*first.result(_SECONDS)] == [1]
    others[0].close()


def test_no_line_of_a_stranger_ends_the_start(places, said, first):
    strangers = []
    for line in _strange_lines(said):
        stranger = _connect(places[0])
        with contextlib.suppress(OSError):  # it may hang up at any time
            stranger.sendall(line)
        strangers.append(stranger)
        if len(strangers) == 100:
            for one in strangers:
                one.close()
            strangers.clear()
        assert not first.done()

    _check_they_meet(places, first)
    for one in strangers:
        one.close()


def test_many_who_say_nothing_or_little_leave_room_for_workers(places, said, first):
    with contextlib.ExitStack() as stack:
        for i in range(400):
            stranger = stack.enter_context(_connect(places[0]))
            if i % 2:
                stranger.sendall(said[: i // 2])
        _check_they_meet(places, first)


def test_a_second_process_that_is_the_same_worker_ends_the_start_and_garbage_does_not():
    addresses = free_addresses("127.0.0.1", 3)
    first, second, _ = (multi_worker({"worker": addresses}, "worker", i) for i in range(3))
    line = _line_of(second)
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as stack:
        meeting = pool.submit(connect_workers, first, _SECONDS)
        for said in (line, line[:-9] + b"\n", line):
            assert not meeting.done()
            stack.enter_context(_connect(first)).sendall(said)

        with pytest.raises(ClusterError, match="Two processes are worker number 1 of the cluster"):
            meeting.result(_SECONDS)


@pytest.mark.parametrize("number", [0, 1])
def test_a_worker_says_whom_it_waits_for(number, places, monkeypatch, caplog):
    monkeypatch.setattr(_connection, "_PATIENCE_SECONDS", 0.0)
    said, log = threading.Event(), logging.getLogger(_connection.__name__)
    log.addFilter(show := lambda record: said.set() or True)
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as stack:
        stack.callback(log.removeFilter, show)
        meeting = pool.submit(connect_workers, places[number], _SECONDS)
        assert said.wait(_SECONDS)
        monkeypatch.setattr(_connection, "_PATIENCE_SECONDS", _SECONDS)
        for channels in (connect_workers(places[1 - number], _SECONDS), meeting.result(_SECONDS)):
            for channel in channels.values():
                channel.close()

    this, other = places[number].workers[number], places[number].workers[1 - number]
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"{this.name} waits for {other}, ")


def test_a_number_that_the_cluster_does_not_have_is_named(places, first):
    line = _line_of(multi_worker({"worker": free_addresses("127.0.0.1", 3)}, "worker", 2))
    with _connect(places[0]) as other:
        other.sendall(line)

        with pytest.raises(ClusterError, match="worker number 2 of the cluster"):
            first.result(_SECONDS)


def test_a_first_worker_that_says_something_else_is_named(places):
    for answer in (b"[" * 50_000 + b"\n", b"a" * 100_000, b"\xff\n", b"[]\n", b"", b"{}\n"):
        peer = places[0].workers[0]
        server = socket.create_server((peer.host, peer.port))
        with server, ThreadPoolExecutor(1) as pool:
            meeting = pool.submit(connect_workers, places[1], _SECONDS)
            connection = server.accept()[0]
            with connection, contextlib.suppress(OSError):
                connection.makefile("rb").readline()
                connection.sendall(answer)
            with pytest.raises(ClusterError, match="did not say whether the workers"):
                meeting.result(_SECONDS)
