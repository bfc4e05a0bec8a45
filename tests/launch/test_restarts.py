"""What hosts are told to do, without hosts."""

import socket

import pytest

from distributary.job import Channel, Message
from distributary.launch._restarts import (
    Exit,
    Failed,
    Finished,
    Interrupted,
    Job,
    Prepare,
    Ready,
    Restart,
    Start,
    decode,
    encode,
)


def _running(max_restarts: int = 0) -> Job:
    """A job of two hosts, with one and two workers."""
    job = Job(2, max_restarts)
    job.join(0)
    job.join(1)
    job.report(0, Ready(0, ["a:1"]))
    job.report(1, Ready(0, ["b:1", "b:2"]))
    return job


def _to_both(command):
    return [(0, command), (1, command)]


def _starts(generation, workers):
    """The commands that start workers, the first of them on host 0."""
    return [(host, Start(generation, workers, host)) for host in (0, 1)]


def test_hosts_start_when_all_are_there():
    job = Job(2, 0)

    assert job.join(1) == []
    assert job.missing == [0]
    assert job.join(0) == _to_both(Prepare(0))
    assert job.report(1, Ready(0, ["b:1", "b:2"])) == []
    assert job.report(0, Ready(0, ["a:1"])) == _starts(0, ["a:1", "b:1", "b:2"])


def test_the_same_address_twice_is_chosen_again():
    job = Job(2, 0)
    job.join(0)
    job.join(1)
    job.report(0, Ready(0, ["a:1"]))

    assert job.report(1, Ready(0, ["a:1"])) == _to_both(Prepare(0))


def test_the_job_is_over_when_all_have_finished():
    job = _running()

    assert job.report(1, Finished(0)) == []
    assert job.report(0, Finished(0)) == _to_both(Exit(0))
    assert job.is_over


def test_the_first_failure_counts():
    job = _running()

    commands = job.report(1, Failed(0, 3, "worker 1 ended", ["why"]))

    assert commands == _to_both(Exit(3, "worker 1 ended", 1, ["why"]))
    assert job.report(0, Failed(0, 4, "worker 0 ended", [])) == []


def test_a_task_that_others_can_do_without_restarts_alone():
    job = _running(max_restarts=2)
    failed = Failed(0, 3, "ps 0 ended", [], "ps 0")

    assert job.report(1, failed) == [(1, Restart(1, "ps 0", "ps 0 ended"))]
    assert job.report(0, Failed(0, 4, "chief 0 ended", [])) == (
        _to_both(Prepare(2, "chief 0 ended", 0))
    )
    # Without restarts left, the code of the last failure counts.
    job.report(0, Ready(2, ["a:1"])), job.report(1, Ready(2, ["b:1"]))
    assert job.report(0, Failed(2, 9, "it", [])) == _to_both(Exit(9, "it", 0, []))


def test_a_failure_restarts_all_hosts_when_all_have_stopped():
    job = _running(max_restarts=1)

    prepare = Prepare(1, "worker 1 ended", 1)
    assert job.report(1, Failed(0, 3, "worker 1 ended", [])) == _to_both(prepare)
    assert job.report(0, Failed(0, 4, "worker 0 ended", [])) == []  # of the old attempt
    assert job.report(0, Finished(0)) == []
    assert job.report(1, Ready(1, ["b:3", "b:4"])) == []
    assert job.report(0, Ready(1, ["a:3"])) == _starts(1, ["a:3", "b:3", "b:4"])


def test_a_lost_host_is_waited_for():
    job = _running(max_restarts=1)

    assert job.lose(1, "gone") == [(0, Prepare(1, "gone", 1))]
    assert job.report(0, Ready(1, ["a:3"])) == []
    assert job.missing == [1]
    assert job.join(1) == _to_both(Prepare(1))
    assert job.report(1, Ready(1, ["b:3"])) == []
    assert job.report(0, Ready(1, ["a:4"])) == _starts(1, ["a:4", "b:3"])


def test_a_host_that_is_lost_while_others_are_missing_may_come_back():
    job = Job(2, 0)
    job.join(1)

    assert job.lose(1, "gone") == []
    assert job.join(0) == []
    assert job.join(1) == _to_both(Prepare(0))


def test_a_host_that_is_lost_instead_of_the_first_start_fails():
    job = Job(2, 0)
    job.join(0)
    job.join(1)

    assert job.lose(1, "gone") == [(0, Exit(1, "gone", 1))]


def test_an_interrupted_host_ends_the_job_in_spite_of_restarts():
    job = _running(max_restarts=5)

    assert job.report(1, Interrupted(130, "SIGINT")) == _to_both(Exit(130, "SIGINT", 1))
    assert job.lose(1, "gone") == []


@pytest.mark.parametrize(
    "message", [Start(1, ["a:1"], 0), Exit(3, "ü", 1, ["x"]), Failed(0, 3, "a\nb", []), Finished(2)]
)
def test_messages_survive_the_way(message):
    near, far = socket.socketpair()
    with near, far:
        Channel(near, "far").send(*encode(message))
        assert decode(Channel(far, "near").receive(30)) == message


@pytest.mark.parametrize(
    "message", [Message("x", None), Message("Exit", []), Message("Exit", {"other": 1})]
)
def test_what_is_no_message_is_refused(message):
    with pytest.raises(ValueError, match="is not a message of the launcher"):
        decode(message)
