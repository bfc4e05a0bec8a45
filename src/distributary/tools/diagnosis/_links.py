"""Round-trip time and bandwidth between all tasks of a cluster, over plain TCP, before JAX starts.

Every task listens at its address in the cluster. The other tasks connect to the first one, which
tells them one after the other to which tasks to connect. Measurements whose tasks share a host
never run at the same time.
"""

import contextlib
import functools
import queue
import socket
import statistics
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import final

from distributary._threads import start_thread
from distributary.cluster_resolver import Peer
from distributary.errors import ClusterError
from distributary.job import Channel, ConnectionAcceptor, connected, listening
from distributary.launch import free_addresses
from distributary.tools.diagnosis._machine import Check, Json

_CONNECT_SECONDS = 3.0
_TRANSFER_SECONDS = 20.0  # for one message and its answer
_REPORT_SECONDS = 60.0  # for a measurement of another task
_END_SECONDS = 600.0  # for the rest of the checks of the first task
_POLL_SECONDS = 0.1
_MAX_STRANGERS = 32  # measurements from elsewhere that a task answers at the same time

_PING_SECONDS = 0.1
_MIN_PINGS, _MAX_PINGS = 5, 500
_STREAM_SECONDS = 0.05
_FIRST_STREAM_BYTES, _MAX_STREAM_BYTES = 1 << 16, 1 << 28
_BLOCK = bytes(1 << 20)
_SIZE = struct.Struct("<Q")

# Loopback on a busy machine varies by less than this, and a link with a fault by more.
_SLOW_FACTOR = 5.0
_SLOW_SECONDS = 1e-3


@final
@dataclass(frozen=True)
class Link:
    """A measurement of one task that connected to another, or to itself.

    Args:
        source: Number of the task that connects.
        target: Number of the task at the other end.
        round_trip_seconds: Median time of an empty message and its answer; 0 without a connection.
        bytes_per_second: Rate at which the source sends; 0 without a connection.
        error: The reason why there is no connection.
    """

    source: int
    target: int
    round_trip_seconds: float = 0.0
    bytes_per_second: float = 0.0
    error: str | None = None


def slow_links(links: Sequence[Link], peers: Sequence[Peer]) -> list[tuple[Link, Link]]:
    """Returns links that are far slower than another link of their kind, each with the best one.

    Links within a host are one kind, links between hosts another.
    """

    def within_host(link: Link) -> bool:
        return peers[link.source].host == peers[link.target].host

    pairs = []
    working = [link for link in links if link.error is None]
    for link in working:
        others = [o for o in working if o is not link and within_host(o) == within_host(link)]
        if link.source == link.target or not others:
            continue
        fastest = max(others, key=lambda o: o.bytes_per_second)
        nearest = min(others, key=lambda o: o.round_trip_seconds)
        if link.bytes_per_second * _SLOW_FACTOR < fastest.bytes_per_second:
            pairs.append((link, fastest))
        elif link.round_trip_seconds > nearest.round_trip_seconds * _SLOW_FACTOR + _SLOW_SECONDS:
            pairs.append((link, nearest))
    return pairs


@final
@dataclass(eq=False)
class Meeting:
    """The meeting of all tasks of a cluster, during which they are examined.

    Args:
        peers: The tasks; the first one leads.
        number: Number of this process's task.
        wait_seconds: Seconds for which to wait for the others.
        any_port: Whether the tasks must reach each other at every port, and not only at their ports
            in the cluster.

    Raises:
        ClusterError: if the port of this task is taken.
    """

    peers: Sequence[Peer]
    number: int
    wait_seconds: float
    any_port: bool

    def __post_init__(self) -> None:
        # By number: at the first task, connections to the others; at the others, one to the first.
        self._channels: dict[int, Channel] = {}
        self._server = _server(self.peers[self.number])
        self._arrivals: queue.SimpleQueue[tuple[int, Channel]] = queue.SimpleQueue()
        self._room = threading.Semaphore(_MAX_STRANGERS + 2 * len(self.peers))
        self._ended = threading.Event()
        self._thread = start_thread(self._listen, self._ended.set, "distributary-links")

    def measure(self) -> list[Link]:
        """Returns the links between all tasks, by source and target, at every task.

        A task that did not come has no links of its own, but the others tried to connect to it.
        After an error this task still listens, so that others learn whether they reach it.

        Raises:
            ClusterError: if the first task cannot be reached, or ends.
        """
        links = self._lead() if self.number == 0 else self._follow()
        self._stop_listening()  # because JAX is about to listen there
        return links

    def reports(self, report: Json) -> list[Json] | None:
        """Returns at the first task what every task passes, None for tasks that are gone.

        Returns None at the other tasks. They stay until the first one leaves, so that its report is
        complete before a launcher notices their end.
        """
        if self.number != 0:
            with contextlib.suppress(OSError):
                self._channels[0].send("report", report)
                self._channels[0].receive(_END_SECONDS)
            return None
        reports: list[Json] = [report, *(None for _ in self.peers[1:])]
        for number, channel in self._channels.items():
            with contextlib.suppress(OSError):
                reports[number] = channel.receive(_REPORT_SECONDS).content
        return reports

    def close(self) -> None:
        """Closes the connections."""
        self._stop_listening()
        for channel in self._channels.values():
            channel.close()

    def _stop_listening(self) -> None:
        self._ended.set()
        self._thread.join()
        self._server.close()

    def _lead(self) -> list[Link]:
        self._wait_for_members()
        sources = [0, *sorted(self._channels)]
        pairs = [(source, target) for source in sources for target in range(len(self.peers))]
        links = {(link.source, link.target): link for link in self._measured(pairs)}
        doubtful = [
            (link.source, link.target) for link, _ in slow_links([*links.values()], self.peers)
        ]
        for again in self._measured(doubtful):
            links[again.source, again.target] = _better(links[again.source, again.target], again)
        result = [links[pair] for pair in sorted(links)]
        self._stop_listening()  # before the others connect to JAX at this port
        for channel in self._channels.values():
            with contextlib.suppress(OSError):
                channel.send("links", [asdict(link) for link in result])
        return result

    def _wait_for_members(self) -> None:
        deadline = time.monotonic() + self.wait_seconds
        with contextlib.suppress(queue.Empty):
            while len(self._channels) < len(self.peers) - 1:
                left = max(0.001, deadline - time.monotonic())
                number, channel = self._arrivals.get(timeout=left)
                # Anything else is from another cluster, or not a task. The first one to come is the
                # task.
                if 0 < number < len(self.peers) and number not in self._channels:
                    self._channels[number] = channel
                else:
                    channel.close()

    def _measured(self, pairs: Sequence[tuple[int, int]]) -> Iterator[Link]:
        for together in _apart(pairs, self.peers):
            for source, target in together:
                if source:
                    with contextlib.suppress(OSError):
                        self._channels[source].send("measure", target)
            for source, target in sorted(together):  # this task first: the others are busy
                if source == 0:
                    yield self._link_to(target)
                    continue
                try:
                    yield Link(**self._channels[source].receive(_REPORT_SECONDS).content)
                except (OSError, TypeError):
                    yield Link(source, target, error=f"{self.peers[source].name} ended")

    def _follow(self) -> list[Link]:
        first = self.peers[0]
        try:
            leader = connected(first.host, first.port, str(first), self.wait_seconds)
        except OSError as error:
            raise ClusterError(
                f"{self.peers[self.number].name} could not reach {first} within"
                f" {self.wait_seconds:g} s: {_reason(error)}."
            ) from error
        self._channels[0] = leader
        try:
            leader.send("join", self.number)
            while (order := leader.receive(_END_SECONDS)).kind == "measure":
                leader.send("link", asdict(self._link_to(order.content)))
            return [Link(**link) for link in order.content]
        except OSError as problem:
            raise ClusterError(
                f"{first} ended while the links were being measured: {problem}."
            ) from None

    def _link_to(self, target: int) -> Link:
        peer = self.peers[target]
        try:
            with socket.create_connection((peer.host, peer.port), _CONNECT_SECONDS) as connection:
                round_trip, rate = _measured(connection, peer, self.any_port)
        except (OSError, ValueError, KeyError, TypeError) as error:
            return Link(self.number, target, error=_reason(error))
        return Link(self.number, target, round_trip, rate)

    # In the thread, which answers the tasks that connect to this one

    def _listen(self) -> None:
        with ConnectionAcceptor(self._server, len(self.peers)) as acceptor:
            while not self._ended.is_set():
                for channel, message in acceptor.first_messages(time.monotonic() + _POLL_SECONDS):
                    if message.kind == "join" and type(message.content) is int:
                        self._arrivals.put((message.content, channel))
                    elif message.kind == "measure" and self._room.acquire(blocking=False):
                        answer = threading.Thread(target=self._answer, args=[channel], daemon=True)
                        answer.start()
                    else:  # from a program that is not a task, or from too many of them
                        channel.close()

    def _answer(self, channel: Channel) -> None:
        try:
            with contextlib.suppress(OSError), channel.detached() as connection:
                _echo(connection)
        finally:
            self._room.release()


def loopback() -> Link:
    """Returns the link of this machine to itself."""
    peer = Peer("worker", 0, free_addresses("127.0.0.1", 1)[0])
    with contextlib.closing(Meeting([peer], 0, 0.0, any_port=False)) as meeting:
        return meeting.measure()[0]


def _server(peer: Peer) -> socket.socket:
    # Others may know this machine by an address that it does not have itself.
    for host in (peer.host, "::" if ":" in peer.host else "0.0.0.0"):
        try:
            return listening(host, peer.port)
        except OSError as error:
            problem = error
    raise ClusterError(f"{peer.name} cannot listen at {peer.address}: {_reason(problem)}.")


def _echo(connection: socket.socket) -> None:
    """Answers every message, of any size, with one byte, until no more come."""
    connection.settimeout(_TRANSFER_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    host = connection.getsockname()[0]
    with socket.create_server((host, 0), family=connection.family) as other:
        other.settimeout(_TRANSFER_SECONDS)
        connection.sendall(_SIZE.pack(other.getsockname()[1]))
        buffer = memoryview(bytearray(len(_BLOCK)))
        while header := connection.recv(_SIZE.size, socket.MSG_WAITALL):
            (left,) = _SIZE.unpack(header)
            while left:
                received = connection.recv_into(buffer, min(left, len(buffer)))
                if not received:
                    return
                left -= received
            connection.sendall(b"\0")


def _measured(connection: socket.socket, peer: Peer, any_port: bool) -> tuple[float, float]:
    """Returns the median round trip in seconds, and bytes per second."""
    connection.settimeout(_TRANSFER_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    Channel(connection, peer.name).send("measure")
    connection.settimeout(_TRANSFER_SECONDS)
    (port,) = _SIZE.unpack(_received(connection, _SIZE.size))
    if any_port:
        try:
            socket.create_connection((peer.host, port), _CONNECT_SECONDS).close()
        except OSError as error:
            raise ConnectionError(
                f"port {peer.port} answers, but port {port} does not ({_reason(error)}), and"
                " workers also use ports that the system chooses"
            ) from error
    round_trips: list[float] = []
    end = time.perf_counter() + _PING_SECONDS
    while len(round_trips) < _MIN_PINGS or (
        time.perf_counter() < end and len(round_trips) < _MAX_PINGS
    ):
        round_trips.append(_send(connection, 0))
    num_bytes = _FIRST_STREAM_BYTES
    while (seconds := _send(connection, num_bytes)) < _STREAM_SECONDS:
        if num_bytes == _MAX_STREAM_BYTES:
            break
        num_bytes *= 2
    return statistics.median(round_trips), num_bytes / seconds


def _send(connection: socket.socket, num_bytes: int) -> float:
    """Returns the seconds until a message is answered."""
    start = time.perf_counter()
    connection.sendall(_SIZE.pack(num_bytes))
    for sent in range(0, num_bytes, len(_BLOCK)):
        connection.sendall(memoryview(_BLOCK)[: num_bytes - sent])
    _received(connection, 1)
    return time.perf_counter() - start


def _received(connection: socket.socket, size: int) -> bytes:
    data = connection.recv(size, socket.MSG_WAITALL)
    if len(data) < size:
        raise ConnectionError("it closed the connection; another program may be listening there")
    return data


def _apart(
    pairs: Iterable[tuple[int, int]], peers: Sequence[Peer]
) -> Iterator[list[tuple[int, int]]]:
    """Yields the pairs in groups in which no host appears twice."""
    left = list(pairs)
    while left:
        busy: set[str] = set()
        group, later = [], []
        for pair in left:
            hosts = {peers[number].host for number in pair}
            if busy & hosts:
                later.append(pair)
            else:
                group.append(pair)
                busy |= hosts
        yield group
        left = later


def _better(one: Link, other: Link) -> Link:
    if one.error is not None or other.error is not None:
        return one if other.error is not None else other
    round_trip = min(one.round_trip_seconds, other.round_trip_seconds)
    rate = max(one.bytes_per_second, other.bytes_per_second)
    return Link(one.source, one.target, round_trip, rate)


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return getattr(error, "strerror", None) or str(error)


def link_checks(
    links: Sequence[Link], peers: Sequence[Peer], wait_seconds: float
) -> Iterator[Check]:
    """Yields what is wrong with the links between tasks, or one check that says that all work.

    Args:
        links: The measurements of all tasks that came.
        peers: The tasks.
        wait_seconds: Seconds for which the first task waited for the others.
    """
    problem = functools.partial(Check, "links", "problem")
    sources = {link.source for link in links}
    for number, peer in enumerate(peers):
        if number in sources:
            continue
        if any(link.error is None for link in links if link.target == number):
            state = "which other tasks reach"
            fix = (
                "Compare the cluster in its TF_CONFIG with the one here, and open"
                f" {peers[0].address} for it in the firewall"
            )
        else:
            state = "which no other task reaches"
            fix = f"Start the doctor on {peer.name} too, and look at what it prints"
        yield problem(
            f"{peer}, {state}, did not connect to {peers[0]} within {wait_seconds:g} s", fix
        )
    broken = [link for link in links if link.error is not None and link.target in sources]
    for number, peer in enumerate(peers):
        to_it = [link for link in broken if link.target == number]
        if len(to_it) == len(sources):
            yield problem(
                f"no task reaches {peer}: {to_it[0].error}",
                f"Give {peer.name} in TF_CONFIG an address at which the other tasks reach its"
                " machine, and open its ports in the firewall",
            )
            continue
        for link in to_it:
            yield problem(
                f"{peers[link.source].name} does not reach {peer}: {link.error}",
                f"Open the ports of {peer.host} for {peers[link.source].host} in the firewalls"
                " between them",
            )
    slow = slow_links(links, peers)
    for link, best in slow:
        detail = f"{_text(link, peers, ' is slow:')}; {_text(best, peers, ' has')}"
        fix = _fix_of_slow(peers[link.source].host, peers[link.target].host)
        yield Check("links", "warning", detail, fix)
    working = [link for link in links if link.error is None and link.source != link.target]
    if working and not broken and not slow and len(sources) == len(peers):
        slowest = min(working, key=lambda link: link.bytes_per_second)
        detail = f"all {len(working)} work; the slowest, {_text(slowest, peers, ', has')}"
        yield Check("links", "ok", detail)


def _fix_of_slow(source: str, target: str) -> str:
    if source == target:
        return f"Look on {source} for other programs with `top`, and for a limit with `tc qdisc`"
    return f"Check cables, switches, drivers and bandwidth limits between {source} and {target}"


def _text(link: Link, peers: Sequence[Peer], verb: str) -> str:
    round_trip, rate = link.round_trip_seconds * 1e6, link.bytes_per_second / 1e6
    return (
        f"{peers[link.source].name} to {peers[link.target].name}{verb} {round_trip:.0f} us round"
        f" trip, {rate:.0f} MB/s"
    )
