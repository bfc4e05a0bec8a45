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
from distributary.servers._grpc import GrpcLink, GrpcServer
from distributary.servers._links import ConnectionLostError, DeadlineError, InProcessLink
from distributary.servers._messages import Assembly, Limits, Message, WireError, split
from tests.servers.frames import damaged_frames
from tests.servers.message_faults import duplicate, lose_reply, lose_request

_SECONDS = 60.0  # more than anything takes


def test_a_call_returns_the_reply(link):
    arrays = [np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(2, ml_dtypes.bfloat16)]

    reply = link.call(Message("echo", {"a": [1, None]}, arrays, [b"program"]), _SECONDS)

    assert (reply.kind, reply.fields, list(reply.blobs)) == ("echo", {"a": [1, None]}, [b"program"])
    for array, expected in zip(reply.arrays, arrays, strict=True):
        np.testing.assert_array_equal(array, expected, strict=True)


def test_requests_of_one_link_are_handled_in_order(link, service):
    futures = [link.start(Message("echo", {"i": i})) for i in range(200)]

    replies = [future.result(_SECONDS) for future in futures]

    assert [reply.fields["i"] for reply in replies] == list(range(200))
    assert service.handled == list(range(200))


def test_several_threads_share_a_link(link):
    def call(i):
        return link.call(Message("echo", {"i": i}), _SECONDS).fields["i"]

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        assert list(threads.map(call, range(100))) == list(range(100))


def test_large_arrays_arrive(link):
    array = np.random.default_rng(0).integers(0, 255, (3, 1 << 20), np.uint8)

    (doubled,) = link.call(Message("double", arrays=[array]), _SECONDS).arrays

    np.testing.assert_array_equal(doubled, 2 * array, strict=True)


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("mismatch", ReplicaMismatchError, "shapes differ"),
        ("key error", KeyError, "'name'"),
        ("timeout", TimeoutError, "too slow"),
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
    with pytest.raises(DeadlineError, match=r"ps .* has not replied within 0\.1 s"):
        link.call(Message("wait"), 0.1)
    service.go_on.set()

    assert link.call(Message("echo", {"i": 1}), _SECONDS).fields == {"i": 1}


def test_calls_under_way_raise_when_the_link_is_closed(link, service):
    first, second = link.start(Message("wait")), link.start(Message("echo"))
    service.started.wait(_SECONDS)

    link.close()

    for future in (first, second, link.start(Message("echo"))):
        with pytest.raises(ConnectionLostError, match=r"ps .* is closed"):
            future.result(_SECONDS)


def test_links_and_servers_leave_no_thread_behind(service):
    threads_before = set(threading.enumerate())
    server = GrpcServer(service, "127.0.0.1:0", insecure=True)
    links = [GrpcLink(server.address, "ps"), InProcessLink(service)]
    for link in links:
        link.call(Message("echo"), _SECONDS)

    for link in links:
        link.close()
    server.close()

    for thread in set(threading.enumerate()) - threads_before:
        thread.join(_SECONDS)
        assert not thread.is_alive(), thread.name


def test_who_calls_is_told(link, service, request):
    link.call(Message("echo"), _SECONDS)

    (peer,) = service.peers
    assert peer.role == ("worker" if "mtls" in request.node.name else "local")


@pytest.mark.parametrize("link", ["frames", "grpc"], indirect=True)
def test_messages_beyond_the_limits_are_named(link):
    with pytest.raises(WireError, match=r"'echo' has \d+ bytes, expected 16777216 or fewer"):
        link.call(Message("echo", arrays=[np.zeros(1 << 24, np.uint8)]), _SECONDS)
    with pytest.raises(WireError, match=r"'ok' has \d+ bytes"):
        link.call(Message("huge"), _SECONDS)

    assert link.call(Message("echo"), _SECONDS).kind == "echo"


def test_a_sender_with_other_limits_is_told(service):
    server = GrpcServer(
        service, "127.0.0.1:0", limits=Limits(max_message_bytes=1 << 21), insecure=True
    )
    link = GrpcLink(server.address, "ps")
    try:
        with pytest.raises(WireError, match=r"ps at .* refuses .* expected 2097152 or fewer"):
            link.call(Message("echo", arrays=[np.zeros(1 << 22, np.uint8)]), _SECONDS)

        assert link.call(Message("echo", {"i": 1}), _SECONDS).fields == {"i": 1}
    finally:
        link.close()
        server.close()


def test_chunks_are_put_together_again():
    full = (1 << 20) + (1 << 14)
    contents = [random.randbytes(n) for n in (5, 3 * full, 0, full - 5, 7)]
    chunks = list(split(7, contents))
    assembly = Assembly(Limits())

    results = [assembly.add(chunk) for chunk in chunks]

    assert [len(chunk) - 16 for chunk in chunks] == [*[full] * 4, 7]
    assert results[:-1] == [None] * 4
    assert results[-1][0] == 7
    assert bytes(results[-1][1]) == b"".join(contents)
    # Where XLA needs no copy.
    assert np.frombuffer(results[-1][1], np.uint8).ctypes.data % 64 == 0


def test_a_chunk_in_the_middle_of_another_message_is_refused():
    assembly = Assembly(Limits())
    (first, *_), (other, *_) = (list(split(number, [bytes(2 << 20)])) for number in (1, 2))
    assembly.add(first)

    with pytest.raises(WireError, match=r"of message 2 .* came in the middle of message 1"):
        assembly.add(other)


class _Faults:
    """Does with the next request what it is told."""

    def __init__(self):
        self.next = None

    def __call__(self, message, deliver):
        fault, self.next = self.next, None
        return deliver(message) if fault is None else fault(message, deliver)


@pytest.fixture
def faults():
    return _Faults()


@pytest.fixture
def faulty_link(service, faults):
    link = InProcessLink(service, name="ps 0", limits=Limits(), fault=faults)
    yield link
    service.go_on.set()
    link.close()


@pytest.mark.parametrize(
    ("fault", "handled", "arrives"),
    [(lose_request, [2], False), (lose_reply, [1, 2], False), (duplicate, [1, 1, 2], True)],
)
def test_messages_can_be_lost_and_duplicated(fault, handled, arrives, faulty_link, faults, service):
    faults.next = fault
    future = faulty_link.start(Message("echo", {"i": 1}))

    if arrives:
        future.result(_SECONDS)
    else:
        with pytest.raises(ConnectionLostError, match=r"The connection to ps 0 was cut\."):
            future.result(_SECONDS)

    assert faulty_link.call(Message("echo", {"i": 2}), _SECONDS).fields == {"i": 2}
    assert service.handled == handled


def test_messages_can_be_held_back(faulty_link, faults, service):
    release = threading.Event()
    faults.next = lambda message, deliver: release.wait() and deliver(message)
    futures = [faulty_link.start(Message("echo", {"i": i})) for i in range(3)]

    with pytest.raises(DeadlineError):
        faulty_link.call(Message("echo", {"i": 3}), 0.05)
    assert service.handled == []
    release.set()

    assert [future.result(_SECONDS).fields["i"] for future in futures] == [0, 1, 2]
    assert faulty_link.call(Message("echo", {"i": 4}), _SECONDS).fields == {"i": 4}
    assert service.handled == [0, 1, 2, 4]  # nobody waited for 3 any more


def test_a_cut_ends_calls_under_way_and_no_others(faulty_link, service):
    handled, queued = (faulty_link.start(Message(kind)) for kind in ("wait", "echo"))
    service.started.wait(_SECONDS)

    faulty_link.cut()

    for future in (handled, queued):
        with pytest.raises(ConnectionLostError, match="ps 0 was cut"):
            future.result(_SECONDS)
    assert faulty_link.call(Message("echo", {"i": 1}), _SECONDS).kind == "echo"


def test_a_killed_service_is_unreachable(faulty_link, service):
    under_way = faulty_link.start(Message("wait"))
    service.started.wait(_SECONDS)

    faulty_link.kill()

    for future in (under_way, faulty_link.start(Message("echo"))):
        with pytest.raises(ConnectionLostError, match="ps 0 broke: it was killed"):
            future.result(_SECONDS)


def test_frozen_killed_and_restarted_processes(start_peer):
    process, address = start_peer("127.0.0.1:0")
    link = GrpcLink(address, "ps")
    try:
        link.call(Message("echo"), _SECONDS)

        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)  # all its threads
        unlimited = link.start(Message("echo"))
        with pytest.raises(DeadlineError, match=rf"ps at {address} has not replied within 0\.5 s"):
            link.call(Message("echo"), 0.5)
        # Nobody says so, but the other end does not answer pings.
        with pytest.raises(ConnectionLostError, match=f"No connection to ps at {address}: UNAVAIL"):
            unlimited.result(30)  # gRPC by itself needs a minute
        process.send_signal(signal.SIGCONT)
        assert link.call(Message("echo", {"i": 1}), _SECONDS).fields == {"i": 1}

        under_way = link.start(Message("wait"))
        process.kill()
        with pytest.raises(ConnectionLostError, match=address):
            under_way.result(_SECONDS)
        with pytest.raises(ConnectionLostError, match="Connection refused"):
            link.call(Message("echo"), _SECONDS)

        _, same_address = start_peer(address)
        assert same_address == address
        assert link.call(Message("echo", {"i": 2}), _SECONDS).fields == {"i": 2}
    finally:
        link.close()


def _forward(source, target, num_bytes):
    """Passes bytes on until there are no more, or as many as given, and ends both connections."""
    while num_bytes > 0 and (data := source.recv(min(num_bytes, 1 << 16))):
        target.sendall(data)
        num_bytes -= len(data)
    for one in (source, target):
        with contextlib.suppress(OSError):  # the other thread was first
            one.shutdown(socket.SHUT_RDWR)


def test_a_connection_that_breaks_in_the_middle_of_a_message(service):
    array = np.ones(1 << 22, np.uint8)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        contextlib.ExitStack() as sockets,
        concurrent.futures.ThreadPoolExecutor(4) as threads,
        contextlib.ExitStack() as stack,
    ):
        server = GrpcServer(service, "127.0.0.1:0", insecure=True)
        stack.callback(server.close)
        link = GrpcLink(f"127.0.0.1:{listener.getsockname()[1]}", "ps")
        stack.callback(link.close)

        def send(num_bytes_of_connection):
            future = link.start(Message("double", {"i": num_bytes_of_connection}, [array]))
            near = sockets.enter_context(listener.accept()[0])
            far = sockets.enter_context(socket.create_connection(server.address.split(":")))
            threads.submit(_forward, near, far, num_bytes_of_connection)
            threads.submit(_forward, far, near, 1 << 30)
            return future.result(_SECONDS)

        with pytest.raises(ConnectionLostError):
            send(2_500_000)
        reply = send(1 << 30)

    np.testing.assert_array_equal(reply.arrays[0], 2 * array)
    assert service.handled == [1 << 30]


def test_damaged_frames_leave_a_server_as_it_was(start_peer):
    process, address = start_peer("127.0.0.1:0")
    statistics = psutil.Process(process.pid)
    num_refused = 0
    with grpc.insecure_channel(address) as channel:
        talk = channel.stream_stream("/distributary.Link/Talk")

        def send(chunks):
            stream = talk(iter(chunks), timeout=_SECONDS)
            with contextlib.suppress(grpc.RpcError):
                list(stream)
            assert stream.code() in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT)
            return stream.code() != grpc.StatusCode.OK

        frames = list(damaged_frames(1000))
        for frame in frames[:100]:
            send(split(1, [frame]))
        bytes_before = statistics.memory_info().rss
        for frame in frames[100:]:
            num_refused += send(split(1, [frame]) if len(frame) % 5 else [frame])
        # A message of 2^60 bytes; one of 16 MiB of which nothing follows, many times.
        num_refused += send([struct.pack("<QQ", 1, 1 << 60) + b"dstr"])
        for _ in range(100):
            send([struct.pack("<QQ", 1, (1 << 24) - 4) + b"dstr"])
    with socket.create_connection(address.split(":")) as connection:
        connection.sendall(random.Random(1).randbytes(10_000))

    assert 500 < num_refused < 900
    assert statistics.memory_info().rss - bytes_before < 32 << 20
    link = GrpcLink(address, "ps")
    try:
        assert link.call(Message("echo", {"i": 1}), _SECONDS).fields == {"i": 1}

        process.stdin.close()
        assert process.wait(_SECONDS) == 0  # although there is a link
    finally:
        link.close()


def test_more_links_than_allowed_are_refused(service):
    server = GrpcServer(service, "127.0.0.1:0", max_links=2, insecure=True)
    links = [GrpcLink(server.address, "ps") for _ in range(3)]
    try:
        for link in links[:2]:
            link.call(Message("echo"), _SECONDS)

        with pytest.raises(ConnectionLostError, match="RESOURCE_EXHAUSTED"):
            links[2].call(Message("echo"), _SECONDS)
    finally:
        for link in links:
            link.close()
        server.close()


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.0.2.1:0"])
def test_other_addresses_than_loopback_need_certificates(address, service):
    with pytest.raises(ClusterError, match=r"without certificates would .* insecure=True"):
        GrpcServer(service, address)


def test_insecure_is_spelled_out(service):
    server = GrpcServer(service, "0.0.0.0:0", insecure=True)
    link = GrpcLink(server.address, "ps")
    try:
        assert link.call(Message("echo"), _SECONDS).kind == "echo"
    finally:
        link.close()
        server.close()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_the_address_is_the_one_to_call(host, service):
    server = GrpcServer(service, f"{host}:0", insecure=True)
    link = GrpcLink(server.address, "ps")
    try:
        assert server.address.startswith(f"{host}:")
        assert link.call(Message("echo"), _SECONDS).kind == "echo"
    finally:
        link.close()
        server.close()


@pytest.mark.parametrize(
    "address", ["2222", ":2222", "localhost", "unix:/tmp/a:1", "localhost:many", "::1:2222"]
)
def test_what_is_no_address_is_named(address, service):
    with pytest.raises(ClusterError, match=f"Cannot listen at {address}"):
        GrpcServer(service, address)


def test_a_port_in_use_is_named(service):
    server = GrpcServer(service, "127.0.0.1:0", insecure=True)
    try:
        with pytest.raises(ClusterError, match=f"{server.address}: .* Is the port in use"):
            GrpcServer(service, server.address, insecure=True)
    finally:
        server.close()
