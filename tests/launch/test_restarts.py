"""What hosts are told to do, without hosts."""

import pytest

from distributary.job import Message
from distributary.launch._restarts import Exit, Failed, Finished, Job, Prepare, Ready, Start, decode


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


def test_the_same_address_twice_is_chosen_again():
    job = Job(2, 0)
    job.join(0)
    job.join(1)
    job.report(0, Ready(0, ["a:1"]))

    assert job.report(1, Ready(0, ["a:1"])) == _to_both(Prepare(0))


def test_a_failure_restarts_all_hosts_when_all_have_stopped():
    job = _running(max_restarts=1)

    prepare = Prepare(1, "worker 1 ended", 1)
    assert job.report(1, Failed(0, 3, "worker 1 ended", [])) == _to_both(prepare)
    assert job.report(0, Failed(0, 4, "worker 0 ended", [])) == []  # of the old attempt
    assert job.report(0, Finished(0)) == []
    assert job.report(1, Ready(1, ["b:3", "b:4"])) == []
    assert job.report(0, Ready(1, ["a:3"])) == _starts(1, ["a:3", "b:3", "b:4"])


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


@pytest.mark.parametrize(
    "message", [Message("x", None), Message("Exit", []), Message("Exit", {"other": 1})]
)
def test_what_is_no_message_is_refused(message):
    with pytest.raises(ValueError, match="is not a message of the launcher"):
        decode(message)


def _elastic(*hosts: int) -> Job:
    """A job that runs on some of three hosts, of which two are enough."""
    job = Job(3, 2, 2)
    for host in hosts:
        job.join(host)
    job.stop_waiting()
    for host in hosts:
        job.report(host, Ready(0, [f"{host}:1"]))
    return job


def test_a_host_that_comes_while_others_get_ready_is_taken_in():
    job = Job(3, 2, 2)
    job.join(0)
    job.join(2)
    assert job.stop_waiting() == [(0, Prepare(0)), (2, Prepare(0))]
    assert job.report(0, Ready(0, ["0:1"])) == []

    assert job.join(1) == [(host, Prepare(0)) for host in range(3)]
    assert [job.report(host, Ready(0, [f"{host}:2"])) for host in (0, 1)] == [[], []]
    addresses = ["0:2", "1:2", "2:2"]
    starts = [(host, Start(0, addresses, host)) for host in range(3)]
    assert job.report(2, Ready(0, ["2:2"])) == starts


def test_a_host_that_is_lost_while_others_get_ready_is_left_out():
    job = _elastic(0, 1, 2)
    prepare = Prepare(1, "worker 0 ended", 0)
    assert job.report(0, Failed(0, 3, "worker 0 ended", [])) == [(h, prepare) for h in range(3)]
    assert [job.report(host, Ready(1, [f"{host}:2"])) for host in (0, 1)] == [[], []]

    starts = [(host, Start(1, ["0:2", "1:2"], host)) for host in (0, 1)]
    assert job.lose(2, "lost host 2") == starts


def test_a_job_with_too_few_hosts_waits_for_one():
    job = _elastic(0, 1)

    assert job.lose(1, "lost host 1") == [(0, Prepare(1, "lost host 1", 1))]
    assert job.report(0, Ready(1, ["0:2"])) == []
    assert job.is_short
    assert job.join(2) == [(0, Prepare(1)), (2, Prepare(1))]


def test_a_host_that_comes_when_another_has_finished_changes_nothing():
    job = _elastic(0, 1)
    assert job.report(1, Finished(0)) == []

    assert job.join(2) == []
    assert job.report(0, Finished(0)) == [(host, Exit(0)) for host in range(3)]
