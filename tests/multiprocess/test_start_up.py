"""What goes wrong at the start of a job ends with a sentence on every worker that is there."""

import contextlib
import os
import re
import socket

import pytest

import distributary as dist
from distributary.cluster_resolver import ClusterSpec, SimpleClusterResolver
from distributary.errors import InvalidValueError


def _messages(ended):
    for one in ended:
        assert one.code == 3, one.output
    return [(one.result["error"], one.result["message"]) for one in ended]


def test_workers_that_fit_together_start(job):
    ended = job(2).start_all("start", devices=2).wait()

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


def test_the_first_worker_of_a_machine_compiles_for_all(job, tmp_path):
    workers = job(2)
    folders = [tmp_path / "0", tmp_path / "1"]
    for number, folder in enumerate(folders):
        folder.mkdir()
        flags = f"{os.environ['XLA_FLAGS']} --xla_dump_to=."
        cache = str(tmp_path / "programs")
        workers.start("compile", number, folder, XLA_FLAGS=flags, JAX_COMPILATION_CACHE_DIR=cache)

    ended = workers.wait()

    assert [one.code for one in ended] == [0, 0], ended
    assert [one.result for one in ended] == [
        {"alone": 1.0 + number, "total": [6.0, 12.0, 18.0]} for number in range(2)
    ]
    compiled = [
        {file.name for file in folder.glob("*accumulate*before_optimizations*")}
        for folder in folders
    ]
    assert compiled[0], list(folders[0].iterdir())
    assert not compiled[1]


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


@pytest.mark.parametrize(
    ("num_workers", "present", "seconds", "taken", "text"),
    [
        (2, [1], 2, None, "worker 0 at {0}.* 2 s"),
        (3, [0, 1], 8, None, "worker 2 at {2} did not connect to"),
        (2, [0], 5, 0, "worker 0 at {0}: the port is in use"),
        (2, [1], 5, 1, "worker 1 at {1}: the port is in use"),
    ],
)
def test_who_is_missing_and_a_port_in_use_are_named(
    num_workers, present, seconds, taken, text, job
):
    workers = job(num_workers)
    with contextlib.ExitStack() as stack:
        if taken is not None:
            host, port = workers.addresses[taken].split(":")
            stack.enter_context(socket.create_server((host, int(port))))
        for worker in present:
            workers.start("start", worker, "", seconds)
        messages = _messages(workers.wait())

    for kind, message in messages:
        assert kind == "ClusterError"
        assert re.search(text.format(*workers.addresses), message, re.DOTALL), message


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
