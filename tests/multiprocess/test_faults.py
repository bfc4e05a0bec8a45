"""A worker that is lost takes the others with it, at once and with its name."""

import os
import signal
import time

import pytest

from distributary.errors import WorkerLostError

_LOST = WorkerLostError.exit_code
_SECONDS = 300.0


class _Faults:
    """A job of workers that wait for faults."""

    def __init__(self, job, folder, num_workers, num_steps):
        self._folder = folder
        self.job = job(num_workers)
        self.addresses = self.job.addresses
        for worker in range(num_workers):
            self.job.start("faults", worker, folder, num_steps)
        self._pids = [int(self.wait_for("started", worker)) for worker in range(num_workers)]

    def tell(self, what, worker):
        (self._folder / f"{what}.{worker}").touch()

    def wait_for(self, what, worker):
        path = self._folder / f"{what}.{worker}"
        end = time.monotonic() + _SECONDS
        while not path.exists():
            assert not self.job.has_ended(worker)
            assert time.monotonic() < end, f"worker {worker} has not {what}"
            time.sleep(0.01)
        return path.read_text()

    def send(self, number, worker):
        os.kill(self._pids[worker], number)


@pytest.fixture
def faults(job, tmp_path):
    """A function that starts workers and returns when all of them compute."""
    return lambda num_workers, num_steps=10**9: _Faults(job, tmp_path, num_workers, num_steps)


def _sentence(ended):
    """What a worker has said about the loss; it says it once."""
    prefix = WorkerLostError.line_prefix
    found = [line.partition(prefix)[2] for line in ended.output.splitlines() if prefix in line]
    assert len(found) == 1, ended.output
    return found[0]  # other threads may have begun the line


@pytest.mark.parametrize(
    ("num_workers", "killed", "busy", "reason"),
    [
        # Not all survivors get an error from gloo: worker 0 is no neighbour of worker 2 in the
        # ring, worker 1 runs ahead, and worker 3 is busy with something else.
        (
            *(4, 2, {1: ("run ahead", "running ahead"), 3: ("idle", "idling")}),
            ": its process has ended",
        ),
        (3, 0, {1: ("idle", "idling")}, ""),
    ],
)
def test_a_killed_worker_ends_the_others(num_workers, killed, busy, reason, faults):
    workers = faults(num_workers)
    for worker, (told, doing) in busy.items():
        workers.tell(told, worker)
        workers.wait_for(doing, worker)

    workers.send(signal.SIGKILL, killed)

    text = f"worker {killed} at {workers.addresses[killed]} was lost{reason}"
    for worker, ended in enumerate(workers.job.wait()):
        assert ended.code == (-signal.SIGKILL if worker == killed else _LOST)
        assert worker == killed or text in _sentence(ended)


def test_a_frozen_chief_ends_the_others(faults):
    workers = faults(2)

    workers.send(signal.SIGSTOP, 0)
    (survivor,) = workers.job.wait([1])

    assert survivor.code == _LOST
    reason = f"worker 0 at {workers.addresses[0]} was lost: it has said nothing for 3 s"
    assert reason in _sentence(survivor)
    # Awake again, it learns what the others think of it.
    workers.send(signal.SIGCONT, 0)
    (woken,) = workers.job.wait([0])
    assert woken.code == _LOST
    assert reason in _sentence(woken)


@pytest.mark.parametrize("raising", [0, 1])
def test_a_worker_that_raises_is_named_with_its_error(raising, faults):
    workers = faults(2)
    other = 1 - raising
    workers.tell("run ahead", other)
    workers.wait_for("running ahead", other)

    workers.tell("raise", raising)

    ended = workers.job.wait()
    assert ended[raising].code == 1
    assert "OverflowError: the answer is 42\nor more" in ended[raising].output
    assert "distributary: " not in ended[raising].output
    assert ended[other].code == _LOST
    text = (
        f"worker {raising} at {workers.addresses[raising]} has ended with OverflowError: the"
        " answer is 42"
    )
    assert _sentence(ended[other]) == text
    assert f"{text}. worker {other} cannot go on alone." in ended[other].result["error"]


def test_a_worker_that_has_finished_waits_for_the_others(faults):
    workers = faults(2, num_steps=10)

    workers.tell("end", 0)
    time.sleep(4)  # longer than the heartbeat timeout: what is shown is that nothing happens
    assert not workers.job.has_ended(0)
    workers.tell("end", 1)

    assert [one.code for one in workers.job.wait()] == [0, 0]
