"""The connections over which workers tell each other about their data."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from distributary.cluster_resolver import multi_worker
from distributary.errors import ClusterError
from distributary.strategies._exchange import Exchange


class _Workers:
    """Workers in threads, with what a broadcast of the strategy would do."""

    def __init__(self, addresses):
        self.addresses = addresses
        self.at_broadcast = lambda port: None
        self._chiefs = None
        self._barrier = threading.Barrier(len(addresses))

    def on_all(self, function):
        """What a function of the worker number returns or raises, per worker."""

        def outcome(number):
            try:
                return function(number)
            except ClusterError as error:
                return error

        with ThreadPoolExecutor(len(self.addresses)) as pool:
            return list(pool.map(outcome, range(len(self.addresses))))

    def exchange(self, number):
        def from_chief(values):
            if number == 0:
                self._chiefs = values
                self.at_broadcast(int(values[0][0]))
            self._barrier.wait()
            return self._chiefs

        return Exchange(multi_worker({"worker": self.addresses}, "worker", number), from_chief)


@pytest.fixture
def three():
    return _Workers([f"127.0.0.1:{2000 + i}" for i in range(3)])


def test_every_worker_hears_the_messages_of_all(three):
    exchanges = three.on_all(three.exchange)

    for messages in ([b"same"] * 3, [b"a", b"bb", b"x" * 2_000_000], [b"a", b"a", b"b"]):
        heard = three.on_all(lambda i, messages=messages: exchanges[i](messages[i]))
        assert heard == [messages] * 3
    assert exchanges[1].names == ("worker 0", "worker 1", "worker 2")


def test_strangers_are_turned_away(three):
    strangers = []

    def connect(port):
        for greeting in (b"GET / HTTP/1.1\r\n\r\n" + 100 * b"x", b""):
            strangers.append(socket.create_connection(("127.0.0.1", port)))
            strangers[-1].sendall(greeting)
        strangers[-1].shutdown(socket.SHUT_WR)

    three.at_broadcast = connect
    exchanges = three.on_all(three.exchange)

    assert three.on_all(lambda i: exchanges[i](b"%d" % i)) == [[b"0", b"1", b"2"]] * 3
    for stranger in strangers:
        stranger.close()


def test_all_hear_of_a_worker_that_is_gone(three):
    exchanges = three.on_all(three.exchange)
    exchanges[2] = None

    first, second, _ = three.on_all(lambda i: i < 2 and exchanges[i](b"x"))

    assert "worker 2 at 127.0.0.1:2002 has closed its connection" in str(first)
    assert "worker 0 at 127.0.0.1:2000 has closed" in str(second)
    with pytest.raises(ClusterError, match="has closed its connection"):
        exchanges[0](b"x")


def test_an_address_of_another_machine_is_refused_on_all_workers():
    workers = _Workers(["192.0.2.1:2000", "127.0.0.1:2001"])

    for error in workers.on_all(workers.exchange):
        assert isinstance(error, ClusterError)
        assert "worker 0 at 192.0.2.1:2000 cannot listen" in str(error)
