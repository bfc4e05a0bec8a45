"""What goes wrong at the start of a job ends with a sentence on every worker that is there."""

import re
import socket

import pytest

import distributary as dist
from distributary.cluster_resolver import ClusterSpec, SimpleClusterResolver
from distributary.errors import InvalidValueError


def _start_all(job, num_workers=2, **options):
    workers = job(num_workers)
    for worker in range(num_workers):
        workers.start("start", worker, **options)
    return workers


def _messages(ended):
    for one in ended:
        assert one.code == 3, one.output
    return [(one.result["error"], one.result["message"]) for one in ended]


def test_workers_that_fit_together_start(job):
    ended = _start_all(job, 2, devices=2).wait()

    assert [one.code for one in ended] == [0, 0], ended
    assert [one.result["total"] for one in ended] == [6.0, 6.0]
    assert (
        "4 replicas on CPU:0, CPU:1 of each of 2 workers; XLA reduce-scatter in groups of 2,"
        " all-reduce across them and all-gather over gloo" in (ended[0].result["strategy"])
    )
    assert ended[1].result["tasks"] == ["worker", 1]
    # Connected by the start, since gloo would wait only 30 s for a worker that is late for a step.
    for one in ended:
        before, _, _ = one.output.partition("started")
        assert "is connected to 3 peer ranks" in before, one.output


@pytest.mark.parametrize(
    ("task_type", "task_id"), [("chief", 0), ("worker", 0), ("worker", 1), ("ps", 0)]
)
def test_a_cluster_with_parameter_servers_is_refused_by_every_task(task_type, task_id):
    spec = {"chief": ["c:1"], "worker": ["w:1", "w:2"], "ps": ["p:1"]}
    resolver = SimpleClusterResolver(ClusterSpec(spec), task_type=task_type, task_id=task_id)

    with pytest.raises(
        InvalidValueError,
        match=r"has 1 parameter server\(s\).*without --ps\), or use ParameterServerStrategy",
    ):
        dist.MultiWorkerMirroredStrategy(resolver)


def test_a_missing_first_worker_is_named(job):
    workers = job(2)
    workers.start("start", 1, "", 2)

    ((kind, message),) = _messages(workers.wait())
    assert kind == "ClusterError"
    assert f"worker 0 at {workers.addresses[0]}" in message
    assert "2 s" in message


def test_those_who_came_hear_who_is_missing(job):
    workers = job(3)
    for worker in (0, 1):
        workers.start("start", worker, "", 8)

    for _, message in _messages(workers.wait()):
        assert f"worker 2 at {workers.addresses[2]} did not connect to" in message


@pytest.mark.parametrize("taken", [0, 1])
def test_a_port_in_use_is_named(job, taken):
    workers = job(2)
    host, port = workers.addresses[taken].split(":")
    with socket.create_server((host, int(port))):
        workers.start("start", taken, "", 5)
        ((kind, message),) = _messages(workers.wait())

    assert kind == "ClusterError"
    assert f"worker {taken} at {workers.addresses[taken]}: the port is in use" in message


_DIFFERENT = {
    "clusters": (
        *((), {"cluster": None}),  # with another second worker
        "worker 1 has another cluster than worker 0.*127.0.0.1:1",
    ),
    "versions": (("other version",), {}, r"worker 1 has jax 9\.9, worker 0 has 0\."),
    "numbers of devices": (
        *((), {"devices": 2}),
        "different numbers of CPU devices: worker 0 1, worker 1 2",
    ),
}


@pytest.mark.parametrize(("args", "options", "message"), _DIFFERENT.values(), ids=_DIFFERENT)
def test_workers_that_differ_are_refused(args, options, message, job):
    workers = job(2)
    workers.start("start", 0)
    if "cluster" in options:
        options = {"cluster": {"worker": [workers.addresses[0], "127.0.0.1:1"]}}
    workers.start("start", 1, *args, **options)

    for kind, text in _messages(workers.wait()):
        assert kind == "ClusterError"
        assert re.search(message, text, re.DOTALL), text


def test_a_strategy_after_jax_has_started_is_refused(job):
    workers = job(2)
    workers.start("start", 0, "too late")

    ((kind, message),) = _messages(workers.wait())
    assert kind == "BackendStartedError"
    assert "before any array or device of JAX is used" in message
