"""Links between tasks: real sockets, one of them behind a proxy that lets little through."""

import contextlib
import dataclasses
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from distributary.cluster_resolver import Peer
from distributary.errors import ClusterError
from distributary.launch import free_addresses
from distributary.tools.diagnosis import loopback
from distributary.tools.diagnosis._links import Meeting, link_checks

_PROXY_BYTES_PER_SECOND = 1e6


def _peers(count):
    addresses = free_addresses("127.0.0.1", count)
    return [Peer("worker", number, address) for number, address in enumerate(addresses)]


def _measured(peers, number, *, any_port=True, wait_seconds=1.0):
    """What one task does, except that it reports nothing else; links, or an error."""
    meeting = Meeting(peers, number, wait_seconds, any_port=any_port)
    try:
        links = meeting.measure()
        return links, meeting.reports(f"report of {number}")
    except ClusterError as error:
        return str(error), None
    finally:
        meeting.close()


def _all_measured(views, *, wait_seconds=10.0):
    """Every task by its number, with the cluster as it sees it."""
    with ThreadPoolExecutor(len(views)) as pool:
        futures = {
            number: pool.submit(_measured, peers, number, wait_seconds=wait_seconds)
            for number, peers in views.items()
        }
        return {number: future.result() for number, future in futures.items()}


@contextlib.contextmanager
def _slow_proxy(peer):
    """An address of a proxy that passes little per second on to `peer`."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_serve, args=[server, peer], daemon=True).start()
        yield dataclasses.replace(peer, address=f"127.0.0.1:{server.getsockname()[1]}")


def _serve(server, peer):
    with contextlib.suppress(OSError):
        while True:
            near, _ = server.accept()
            threading.Thread(target=_connect, args=[near, peer], daemon=True).start()


def _connect(near, peer):
    with near, socket.create_connection((peer.host, peer.port)) as far:
        back = threading.Thread(target=_pass_on, args=[far, near, 1e12])
        back.start()
        _pass_on(near, far, _PROXY_BYTES_PER_SECOND)
        back.join()


def _pass_on(source, target, rate):
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 14):
            time.sleep(len(data) / rate)
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def test_slow_links_and_unreachable_tasks_are_named():
    peers = _peers(5)
    (closed,) = free_addresses("127.0.0.1", 1)
    # It runs, at another address; connecting to this one fails at once.
    peers[3] = Peer("worker", 3, f"255.255.255.255:{peers[3].port}")
    # Worker 4 is not started.
    with _slow_proxy(peers[2]) as behind_the_proxy:
        views = dict.fromkeys(range(4), peers)
        views[1] = [*peers[:2], behind_the_proxy, *peers[3:]]
        views[2] = [peers[0], Peer("worker", 1, closed), *peers[2:]]

        found = _all_measured(views, wait_seconds=2.0)

    links, reports = found[0]
    assert reports == [*(f"report of {number}" for number in range(4)), None]
    assert all(found[number] == (links, None) for number in (1, 2, 3))
    assert {(link.source, link.target) for link in links} == {
        (source, target) for source in range(4) for target in range(5)
    }
    checks = [*link_checks(links, peers, 2.0)]
    problems = [check.detail for check in checks if check.status == "problem"]
    assert problems[:2] == [
        f"{peers[4]}, which no other task reaches, did not connect to {peers[0]} within 2 s",
        f"worker 2 does not reach {peers[1]}: Connection refused",
    ]
    assert len(problems) == 3
    assert problems[2].startswith(f"no task reaches {peers[3]}: ")
    (slow,) = [check for check in checks if check.detail.startswith("worker 1 to worker 2 is slow")]
    assert slow.status == "warning"
    (rate,) = [x.bytes_per_second for x in links if (x.source, x.target) == (1, 2)]
    assert rate < _PROXY_BYTES_PER_SECOND * 1.1
    assert all(check.fix for check in checks)


def test_a_task_that_does_not_reach_the_first_one():
    peers = _peers(2)
    (closed,) = free_addresses("127.0.0.1", 1)
    lost = Meeting([Peer("worker", 0, closed), peers[1]], 1, 0.2, any_port=True)
    try:
        with pytest.raises(ClusterError, match=f"^worker 1 could not reach worker 0 at {closed} "):
            lost.measure()

        links, _ = _measured(peers, 0)  # it still listens
    finally:
        lost.close()

    (problem,) = [x for x in link_checks(links, peers, 1.0) if x.status == "problem"]
    assert problem.detail == (
        f"{peers[1]}, which other tasks reach, did not connect to {peers[0]} within 1 s"
    )
    assert peers[0].address in problem.fix


def test_a_port_that_is_taken_is_said_at_once():
    with socket.create_server(("127.0.0.1", 0)) as other:
        own = Peer("chief", 0, f"127.0.0.1:{other.getsockname()[1]}")

        with pytest.raises(ClusterError, match=f"chief cannot listen at {own.address}: "):
            Meeting([own], 0, 1.0, any_port=False)


def test_other_programs_that_connect_are_ignored():
    peers = _peers(2)
    meeting = Meeting(peers, 0, 10.0, any_port=False)
    try:
        deep = b"[" * 100_000 + b"\n"
        others = (b'{"join": true}\n', b'{"join": 7}\n', b'{"join": NaN}\n', b"\xff\n")
        for line in (b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b"", deep, *others):
            with socket.create_connection((peers[0].host, peers[0].port)) as stranger:
                stranger.sendall(line)
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(_measured, peers, 1, any_port=False)
            links = meeting.measure()
            reports = meeting.reports("own")
            meeting.close()
            other.result()
    finally:
        meeting.close()

    assert [link.error for link in links] == [None] * 4
    assert reports == ["own", "report of 1"]


def test_a_machine_alone_has_loopback():
    link = loopback()

    assert 0 < link.round_trip_seconds < 1
    assert link.bytes_per_second > 1e6
