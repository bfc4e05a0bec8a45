"""The connections over which workers agree."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from distributary.errors import ClusterError
from distributary.job import Channel, Consensus

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
