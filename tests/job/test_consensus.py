"""The connections over which workers agree."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from distributary.errors import ClusterError, WorkerMismatchError
from distributary.job import Channel, ConnectionAcceptor, Consensus

_SECONDS = 60.0


class _Workers:
    """Workers in threads of this process, connected as those of a job."""

    def __init__(self, num_workers):
        names = [f"worker {number}" for number in range(num_workers)]
        pairs = {number: socket.socketpair() for number in range(1, num_workers)}
        chief = {n: Channel(pair[0], names[n]) for n, pair in pairs.items()}
        self.channels = {n: Channel(pair[1], names[0]) for n, pair in pairs.items()}
        self.consensus = [
            Consensus(names, 0, chief),
            *(Consensus(names, n, {0: channel}) for n, channel in self.channels.items()),
        ]

    def on_all(self, function):
        """What a function of a worker's consensus and number returns or raises, per worker."""

        def outcome(number):
            try:
                return function(self.consensus[number], number)
            except (ClusterError, TimeoutError, ArithmeticError) as error:
                return error

        with ThreadPoolExecutor(len(self.consensus)) as pool:
            return list(pool.map(outcome, range(len(self.consensus))))


@pytest.fixture
def three():
    workers = _Workers(3)
    yield workers
    for one in workers.consensus:
        one.shut()


def test_every_worker_hears_the_messages_of_all(three):
    for messages in ([b"same"] * 3, [b"a", b"bb", b"x" * 2_000_000], [b"a", b"a", b"b"]):
        heard = three.on_all(lambda job, i, messages=messages: job.exchange("here", messages[i]))
        assert heard == [messages] * 3
    told = three.on_all(lambda job, i: job.agree("there", lambda: {"number": i}))
    assert told == [[{"number": 0}, {"number": 1}, {"number": 2}]] * 3
    assert three.on_all(lambda job, i: job.broadcast("x", lambda: b"chief")) == [b"chief"] * 3
    assert three.on_all(lambda job, i: [job.count("x"), job.count("x"), job.count("y")]) == (
        [[0, 1, 0]] * 3
    )


def test_workers_at_different_places_hear_of_each_other_and_can_go_on(three):
    heard = three.on_all(lambda job, i: job.exchange("there" if i == 2 else "here", b""))

    for error in heard:
        assert isinstance(error, WorkerMismatchError)
        assert "worker 1 at test_consensus.py" in str(error)
        assert " with here; worker 2 at test_consensus.py" in str(error)
    assert three.on_all(lambda job, i: job.exchange("here", b"x")) == [[b"x"] * 3] * 3


def test_an_error_of_one_worker_reaches_all(three):
    def say(number):
        return 1 // (number - 1)

    first, second, third = three.on_all(lambda job, i: job.agree("here", lambda: say(i)))

    assert isinstance(second, ZeroDivisionError)
    for error in (first, third):
        assert "worker 1 failed at here: ZeroDivisionError" in str(error)


def test_threads_with_topics_of_their_own_do_not_hear_each_other(three):
    def both(job, number):
        results = {}

        def beside():
            for i in range(50):
                results[i] = job.exchange(f"beside {i}", b"%d" % number, topic="beside")

        thread = threading.Thread(target=beside)
        thread.start()
        for i in range(50):
            assert job.exchange(f"steps {i}", b"s%d" % number) == [b"s0", b"s1", b"s2"]
        thread.join()
        return results

    assert three.on_all(both) == [{i: [b"0", b"1", b"2"] for i in range(50)}] * 3


def test_the_first_worker_tells_what_others_ask_for_later(three):
    def act(job, number):
        if number == 0:
            job.send_to_all("a", 1)
            job.send_to_all("b", 2)
            return None
        return [job.receive("b", _SECONDS), job.receive("a", _SECONDS)]

    assert three.on_all(act)[1:] == [[2, 1]] * 2
    with pytest.raises(TimeoutError):
        three.consensus[1].receive("never", 0.01)


def test_all_hear_of_a_worker_that_is_gone(three):
    three.channels[2].close()

    first, second, _ = three.on_all(lambda job, i: i < 2 and job.exchange("here", b"x"))

    assert "worker 2 has closed its connection" in str(first)
    assert "worker 0 has closed its connection" in str(second)
    with pytest.raises(ClusterError, match="was needed here"):
        three.consensus[0].exchange("here", b"x")


def test_strangers_do_not_keep_a_reception_from_hearing_the_others():
    strange = [b"GET / HTTP/1.1\r\n\r\n", b"x" * 100_000, b"[" * 60_000 + b"\n", b"\xff\n", b"1\n"]
    strange += [b'["join", 1]\n', b'["join", null, -1]\n', b"[1, 2, 0]\n", b'["x", 1, 1e99]\n', b""]

    def connect(address):
        opened = [socket.create_connection(address) for _ in range(200)]
        for data in strange:
            opened.append(socket.create_connection(address))
            opened[-1].sendall(data)
        worker = Channel(socket.create_connection(address), "worker 0")
        worker.send("join", ["token", 1])
        return opened, worker

    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        ConnectionAcceptor(server, 2) as acceptor,
        ThreadPoolExecutor(1) as pool,
    ):
        connected = pool.submit(connect, server.getsockname())
        arrivals = acceptor.first_messages(time.monotonic() + _SECONDS)
        heard = {}
        for channel, message in arrivals:
            heard[message.kind] = channel, message.content
            if message == ("join", ["token", 1], b""):
                break
        strangers, worker = connected.result()

    channel, content = heard["join"]
    assert content == ["token", 1]
    channel.send("welcome", None, b"\0\n" * 1000)
    assert worker.receive(_SECONDS) == ("welcome", None, b"\0\n" * 1000)
    for one in (*strangers, worker, *(channel for channel, _ in heard.values())):
        one.close()
