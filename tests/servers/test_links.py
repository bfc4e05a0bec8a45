"""Calls between tasks: the same by every transport, also when things go wrong."""

import concurrent.futures
import contextlib
import os
import random
import signal
import socket
import struct
import threading

import grpc
import ml_dtypes
import numpy as np
import psutil
import pytest

from distributary.errors import ClusterError, ReplicaMismatchError
from tests.servers.wire import (
    Assembly,
    GrpcLink,
    GrpcServer,
    Message,
    damaged_frames,
    decode,
    split,
)

_SECONDS = 60.0  # more than anything takes
RNG = np.random.default_rng(0)


def test_a_call_returns_the_reply_and_tells_who_calls(link, service, request):
    arrays = [np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(2, ml_dtypes.bfloat16)]
    arrays.append(RNG.integers(0, 255, (3, 1 << 20), np.uint8))

    reply = link.call(Message("echo", {"a": [1, None]}, arrays, [b"program"]), _SECONDS)

    assert (reply.kind, reply.fields, list(reply.blobs)) == ("echo", {"a": [1, None]}, [b"program"])
    for array, expected in zip(reply.arrays, arrays, strict=True):
        np.testing.assert_array_equal(array, expected, strict=True)
    (peer,) = service.peers
    assert peer.role == ("worker" if "mtls" in request.node.name else "local")


def test_requests_of_one_link_are_handled_in_order_also_beside_those_of_other_threads(
    link, service
):
    def call(i):
        return link.call(Message("echo", {"i": i}), _SECONDS).fields["i"]

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        others = threads.map(call, range(1000, 1100))
        futures = [link.start(Message("echo", {"i": i})) for i in range(200)]
        replies = [future.result(_SECONDS) for future in futures]

    assert [reply.fields["i"] for reply in replies] == list(range(200))
    assert [i for i in service.handled if i < 1000] == list(range(200))
    assert list(others) == list(range(1000, 1100))


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("mismatch", ReplicaMismatchError, "shapes differ"),
        ("key error", KeyError, "'name'"),
        ("own error", LookupError, "OwnError: no such row"),
        ("strange", ValueError, "what is 'strange'?"),
    ],
)
def test_exceptions_of_the_service_are_raised_by_the_caller(link, kind, error, text):
    with pytest.raises(error) as caught:
        link.call(Message(kind), _SECONDS)

    assert (type(caught.value), str(caught.value)) == (error, text)
    assert "in handle" in caught.value.__notes__[0]
    assert link.call(Message("echo"), _SECONDS).kind == "echo"


def test_a_call_ends_at_its_deadline_and_the_link_stays(link, service):
    with pytest.raises(TimeoutError, match=r"ps .* has not replied within 0\.1 s"):
        link.call(Message("wait"), 0.1)
    service.go_on.set()

    assert link.call(Message("echo", {"i": 1}), _SECONDS).fields == {"i": 1}


def test_calls_under_way_raise_when_the_link_is_closed(link, service):
    first, second = link.start(Message("wait")), link.start(Message("echo"))
    service.started.wait(_SECONDS)

    link.close()

    for future in (first, second, link.start(Message("echo"))):
        with pytest.raises(ConnectionError, match=r"ps .* is closed"):
            future.result(_SECONDS)


def test_messages_beyond_the_limits_are_named(serve, connect, monkeypatch):
    monkeypatch.setattr("distributary.servers._messages.MAX_MESSAGE_BYTES", 1 << 25)
    link = connect(serve())

    with pytest.raises(ValueError, match=r"'echo' has \d+ bytes, expected 33554432 or fewer"):
        link.call(Message("echo", arrays=[np.zeros(1 << 25, np.uint8)]), _SECONDS)
    with pytest.raises(ValueError, match=r"'ok' has \d+ bytes"):
        link.call(Message("huge"), _SECONDS)

    assert link.call(Message("echo", {"i": 1}), _SECONDS).fields == {"i": 1}


def test_a_chunk_in_the_middle_of_another_message_is_refused():
    assembly = Assembly()
    (first, *_), (other, *_) = (list(split(number, [bytes(2 << 20)])) for number in (1, 2))
    assembly.add(first)

    with pytest.raises(ValueError, match=r"of message 2 .* came in the middle of message 1"):
        assembly.add(other)


def test_a_request_whose_caller_has_given_up_is_not_sent(link_in_process, faults, service):
    release = threading.Event()
    faults.append(lambda message, deliver: release.wait() and deliver(message))
    first = link_in_process.start(Message("echo", {"i": 0}))

    with pytest.raises(TimeoutError):
        link_in_process.call(Message("echo", {"i": 1}), 0.05)
    release.set()

    assert first.result(_SECONDS).fields["i"] == 0
    assert link_in_process.call(Message("echo", {"i": 2}), _SECONDS).fields == {"i": 2}
    assert service.handled == [0, 2]


@pytest.mark.parametrize(("end", "text"), [("cut", "was cut"), ("kill", "broke: it was killed")])
def test_calls_under_way_end_with_the_connection(end, text, link_in_process, service):
    futures = [link_in_process.start(Message(kind)) for kind in ("wait", "echo")]
    service.started.wait(_SECONDS)

    getattr(link_in_process, end)()

    for future in futures:
        with pytest.raises(ConnectionError, match=f"ps 0 {text}"):
            future.result(_SECONDS)
    later = link_in_process.start(Message("echo"))
    if end == "cut":
        assert later.result(_SECONDS).kind == "echo"
    else:
        with pytest.raises(ConnectionError, match=text):
            later.result(_SECONDS)


def test_strict_frozen_killed_and_restarted_processes(start_peer, connect):
    process, address = start_peer("127.0.0.1:0")
    link = connect(address)
    with pytest.raises(ValueError, match=r"ps at .* refuses .* expected 16777216 or fewer"):
        link.call(Message("echo", arrays=[np.zeros(1 << 24, np.uint8)]), _SECONDS)
    link.call(Message("echo"), _SECONDS)

    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)  # all its threads
    unlimited = link.start(Message("echo"))
    with pytest.raises(TimeoutError, match=rf"ps at {address} has not replied within 0\.5 s"):
        link.call(Message("echo"), 0.5)
    # Nobody says so, but the other end does not answer pings.
    with pytest.raises(ConnectionError, match=f"No connection to ps at {address}: UNAVAIL"):
        unlimited.result(30)  # gRPC by itself needs a minute
    process.send_signal(signal.SIGCONT)
    assert link.call(Message("echo", {"i": 1}), _SECONDS).fields == {"i": 1}

    under_way = link.start(Message("wait"))
    process.kill()
    with pytest.raises(ConnectionError, match=address):
        under_way.result(_SECONDS)
    with pytest.raises(ConnectionError, match="Connection refused"):
        link.call(Message("echo"), _SECONDS)

    _, same_address = start_peer(address)
    assert same_address == address
    assert link.call(Message("echo", {"i": 2}), _SECONDS).fields == {"i": 2}


def _is_refused(chunks):
    assembly = Assembly()
    try:
        for chunk in chunks:
            if (complete := assembly.add(chunk)) is not None:
                decode(complete[1])
    except ValueError:
        return True
    return False


def test_damaged_frames_leave_a_server_as_it_was(start_peer, connect, monkeypatch):
    monkeypatch.setattr("distributary.servers._messages.MAX_MESSAGE_BYTES", 1 << 24)
    process, address = start_peer("127.0.0.1:0")
    statistics = psutil.Process(process.pid)
    with grpc.insecure_channel(address) as channel:
        talk = channel.stream_stream("/distributary.Link/Talk")

        def send(chunks):
            stream = talk(iter(chunks), timeout=_SECONDS)
            with contextlib.suppress(grpc.RpcError):
                list(stream)
            assert stream.code() in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT)
            return stream.code() != grpc.StatusCode.OK

        streams = [
            [*split(1, [frame])] if len(frame) % 5 else [frame] for frame in damaged_frames(500)
        ]
        # A message of 2^60 bytes; one of 16 MiB of which nothing follows, many times.
        streams.append([struct.pack("<QQ", 1, 1 << 60) + b"dstr"])
        streams += [[struct.pack("<QQ", 1, (1 << 24) - 4) + b"dstr"]] * 100
        for chunks in streams[:100]:
            send(chunks)
        bytes_before = statistics.memory_info().rss
        refused = [send(chunks) for chunks in streams]
    with socket.create_connection(address.split(":")) as connection:
        connection.sendall(random.Random(1).randbytes(10_000))

    assert refused == [*map(_is_refused, streams)]
    assert refused[-101:] == [True] + [False] * 100
    assert statistics.memory_info().rss - bytes_before < 32 << 20
    link = connect(address)
    assert link.call(Message("echo", {"i": 1}), _SECONDS).fields == {"i": 1}
    process.stdin.close()
    assert process.wait(_SECONDS) == 0  # although there is a link


def test_more_links_than_allowed_are_refused(serve, connect):
    address = serve(max_links=2)
    *links, another = [connect(address) for _ in range(3)]
    for link in links:
        link.call(Message("echo"), _SECONDS)

    with pytest.raises(ConnectionError, match="RESOURCE_EXHAUSTED"):
        another.call(Message("echo"), _SECONDS)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_the_address_is_the_one_to_call_and_no_thread_is_left(host, service):
    threads_before = set(threading.enumerate())
    server = GrpcServer(service, f"{host}:0", insecure=True)
    link = GrpcLink(server.address, "ps")

    assert server.address.startswith(f"{host}:")
    assert link.call(Message("echo"), _SECONDS).kind == "echo"
    link.close()
    server.close()
    for thread in set(threading.enumerate()) - threads_before:
        thread.join(_SECONDS)
        assert not thread.is_alive(), thread.name


@pytest.mark.parametrize(
    "address", ["2222", ":2222", "localhost", "unix:/tmp/a:1", "localhost:many", "::1:2222"]
)
def test_what_is_no_address_is_named(address, serve):
    with pytest.raises(ClusterError, match=f"Cannot listen at {address}"):
        serve(address)
