"""Training with workers and servers in processes of their own."""

import concurrent.futures
import contextlib
import json
import logging
import os
import re
import socket
import subprocess
import sys
import threading
from dataclasses import astuple
from pathlib import Path

import jax
import numpy as np
import psutil
import pytest

import distributary as dist
from distributary.cluster_resolver import (
    ClusterSpec,
    SimpleClusterResolver,
)
from distributary.coordinator import _processes
from distributary.errors import (
    ClusterError,
    DistributaryWarning,
    InvalidTypeError,
    InvalidValueError,
)
from distributary.launch import LaunchOptions, run
from distributary.launch._worker import free_addresses
from distributary.servers._certificates import ROLES, Credentials
from distributary.servers._copies import Copies
from distributary.servers._grpc import GrpcLink, GrpcServer
from distributary.servers._messages import Message
from distributary.servers._permissions import SENDERS, RoleCheck
from distributary.servers._plans import Update
from distributary.servers._processes import cluster_of, connect, tasks_of
from distributary.servers._programs import export_function
from distributary.servers._sessions import hello, new_session
from distributary.servers._store import ParameterServer
from distributary.servers._worker import Worker
from tests.servers.fuzz import strange_messages, strange_streams

_TASK = Path(__file__).parent / "programs" / "task.py"
_JOB = Path(__file__).parent / "programs" / "job.py"
_JOB = Path(__file__).parent / "programs" / "job.py"
_SECONDS = 60.0  # more than anything takes
_NUM_FUZZ_INPUTS = int(os.environ.get("DISTRIBUTARY_FUZZ_INPUTS", "1000"))

RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, 3)).astype(np.float32)
Y = (X @ np.array([1.0, -2.0, 3.0], np.float32)).astype(np.float32)


@pytest.fixture(scope="module")
def tasks(certificates):
    """The cluster of a worker and two servers with certificates, and their processes by name."""
    chief, worker, *servers = free_addresses("127.0.0.1", 4)
    cluster = {"chief": [chief], "worker": [worker], "ps": servers}
    with contextlib.ExitStack() as stack:
        processes = {}
        for task_type, index in (("worker", 0), ("ps", 0), ("ps", 1)):
            config = {"cluster": cluster, "task": {"type": task_type, "index": index}}
            environ = {
                **os.environ,
                "DISTRIBUTARY_CERTS": str(certificates),
                "PYTHONPATH": os.pathsep.join(sys.path),
                "TF_CONFIG": json.dumps(config),
            }
            process = subprocess.Popen([sys.executable, _TASK], env=environ)
            stack.enter_context(process)
            stack.callback(process.kill)
            processes[f"{task_type} {index}"] = process
        spec = ClusterSpec(cluster)
        connect(tasks_of(spec), {"DISTRIBUTARY_CERTS": str(certificates)}).close()
        yield spec, processes


@pytest.fixture
def strategy(tasks, certificates, monkeypatch):
    monkeypatch.setenv("DISTRIBUTARY_CERTS", str(certificates))
    strategy = dist.ParameterServerStrategy(SimpleClusterResolver(tasks[0], task_type="chief"))
    yield strategy
    strategy._cluster.close()


def _link(tasks, certificates, role, task_type="ps"):
    address = tasks[0].task_address(task_type, 0)
    return GrpcLink(address, task_type, Credentials.load(certificates, role))


def test_training_equals_numpy(strategy):
    with strategy.scope():
        w = dist.Variable(np.zeros(3, np.float32), name="w")
        b = dist.Variable(np.float32(0), name="b")
    batches = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 32, 8)] * 5
    coordinator = dist.coordinator.ClusterCoordinator(strategy)
    with pytest.warns(DistributaryWarning, match="sends it .* because it is not a function, but"):
        iterator = iter(coordinator.create_per_worker_dataset(batches))
    scale = coordinator.create_per_worker_value(lambda: np.float32(0.1))

    def step(batch, scale):
        x, y = batch
        with dist.GradientTape() as tape:
            loss = ((x @ w + b - y) ** 2).mean()
        gradients = dist.get_replica_context().all_reduce("SUM", tape.gradient(loss, [w, b]))
        for variable, gradient in zip((w, b), gradients, strict=True):
            variable.assign_sub(scale * gradient)
        return loss

    def closure(iterator, scale):
        return strategy.run(step, args=(next(iterator), scale))

    losses = [coordinator.schedule(closure, args=(iterator, scale)) for _ in range(20)]
    coordinator.join()

    expected = np.zeros(3), 0.0
    for (x, y), loss in zip(batches, losses, strict=True):
        error = x @ expected[0] + expected[1] - y
        np.testing.assert_allclose(loss.fetch(), (error**2).mean(), rtol=1e-4, atol=1e-6)
        expected = (
            expected[0] - 0.1 * 2 * (error[:, None] * x).mean(0),
            expected[1] - 0.1 * 2 * error.mean(),
        )
    np.testing.assert_allclose(w.numpy(), expected[0], rtol=1e-4)
    np.testing.assert_allclose(b.numpy(), expected[1], rtol=1e-3, atol=1e-5)


_OF_CHIEF = {
    "worker": {"forget", "peek", "plan", "run", "source"},
    "ps": {"adopt", "assign", "copy", "create", "drop", "finish", "load", "read", "save"}
    | {"statistics", "update"},
}
_OF_WORKER = {"worker": set(), "ps": {"push", "read"}}
_OF_SESSIONS = {"alive", "hello", "identify"}


def _may_send(role, task_type):
    of_chief = _OF_CHIEF[task_type] | _OF_SESSIONS
    return {"chief": of_chief, "worker": _OF_WORKER[task_type], "ps": set()}[role]


def test_every_kind_of_message_is_in_the_table():
    parts = {"worker": [Worker], "ps": [ParameterServer, Copies], "chief": []}
    of_tasks = {
        task_type: {
            name.removeprefix("_on_")
            for part in own
            for name in vars(part)
            if name.startswith("_on_")
        }
        for task_type, own in parts.items()
    }
    for task_type, kinds in of_tasks.items():
        assert set(SENDERS[task_type]) == kinds | (_OF_SESSIONS if kinds else set())


@pytest.mark.parametrize("task_type", ["worker", "ps"])
@pytest.mark.parametrize("role", ROLES)
def test_every_message_is_for_its_roles(role, task_type, tasks, certificates):
    session = new_session()
    fields = {"session": session, "seconds": 0}
    kinds = {*SENDERS["ps"], *SENDERS["worker"], "program", "shutdown", ""}
    with (
        contextlib.closing(_link(tasks, certificates, "chief", task_type)) as chief,
        contextlib.closing(_link(tasks, certificates, role, task_type)) as link,
    ):
        chief.call(hello(session), _SECONDS)
        errors = {k: link.start(Message(k, fields)).exception(_SECONDS) for k in sorted(kinds)}

    refused = {kind for kind, error in errors.items() if isinstance(error, PermissionError)}
    assert refused == kinds - _may_send(role, task_type)
    for kind in refused:
        text = rf"{task_type} 0 got '{kind}' from {role} at ipv4:\S+, which (only the|nobody)"
        assert re.match(text, str(errors[kind]))


def test_a_worker_pushes_what_the_chief_has_allowed_and_nothing_else(tasks, certificates):
    aval = jax.ShapeDtypeStruct((), np.float32)
    program = export_function(lambda w, g: [w + g], [aval, aval], [None, None])
    session = new_session()

    def message(kind, arrays=(), blobs=(), **fields):
        return Message(kind, {"session": session, **fields}, list(arrays), list(blobs))

    with (
        contextlib.closing(_link(tasks, certificates, "chief")) as chief,
        contextlib.closing(_link(tasks, certificates, "worker")) as worker,
    ):
        chief.call(hello(session), _SECONDS)
        chief.call(message("create", [np.float32(3), np.float32(5)], ids=[1, 2]), _SECONDS)
        update = Update(program.name, [1], [1], [])
        fields = {"blobs": [program.content], "update": astuple(update)}
        chief.call(message("update", **fields), _SECONDS)
        push = {"update": update.name, "ids": [], "num_row_reads": 0}
        # Other variables and closures of others are none of its business.
        more = {"outputs": [2], "states": [2], "finished": 1 << 60, "program": program.name}
        worker.call(message("push", [np.float32(1)], closure=0, **push, **more), _SECONDS)
        worker.call(message("push", [np.float32(1)], closure=1, **push), _SECONDS)
        values = worker.call(message("read", ids=[1, 2]), _SECONDS).arrays
        with pytest.raises(InvalidValueError, match="ps 0 has no update 1"):
            worker.call(message("push", closure=2, **{**push, "update": 1}), _SECONDS)
        # It would be taken for the chief's next request, which would then not be handled.
        with pytest.raises(PermissionError, match="with the field 'request' from worker"):
            worker.call(message("read", ids=[1], request=1), _SECONDS)

    np.testing.assert_array_equal(values, [5, 5])


def test_a_port_in_use_is_named(tasks, certificates, monkeypatch):
    monkeypatch.setenv("DISTRIBUTARY_CERTS", str(certificates))
    address = tasks[0].task_address("ps", 1)

    with pytest.raises(ClusterError, match=f"Cannot listen at {address}.*Is the port in use"):
        dist.Server(tasks[0], "ps", 1)


@pytest.mark.parametrize("task_type", ["ps", "worker"])
def test_nothing_that_is_sent_does_harm(task_type, tasks, certificates):
    process = psutil.Process(tasks[1][f"{task_type} 0"].pid)
    link = _link(tasks, certificates, "chief", task_type)
    with contextlib.closing(link):
        session = new_session()
        link.call(hello(session), _SECONDS)
        for message in strange_messages(task_type, 200, session):  # whatever is allocated once
            link.start(message)
        bytes_before = process.memory_info().rss
        with strange_streams(link) as send:
            num_refused = sum(send(i) for i in range(_NUM_FUZZ_INPUTS // 2))
        messages = list(strange_messages(task_type, _NUM_FUZZ_INPUTS // 2, session))
        errors = []
        for start in range(0, len(messages), 500):
            calls = [link.start(message) for message in messages[start : start + 500]]
            errors += [type(call.exception(_SECONDS)) for call in calls]

        assert num_refused > _NUM_FUZZ_INPUTS // 4
        assert errors.count(type(None)) < len(errors) / 2
        name = link.call(Message("identify"), _SECONDS).fields["task"]
        assert name == f"{task_type} 0"
        assert process.memory_info().rss - bytes_before < 1 << 26


def test_a_task_ends_well_when_it_is_told_to(tasks, certificates, tmp_path):
    _, processes = tasks
    session, path = new_session(), tmp_path / "waits"
    maker = {"module": "__main__", "name": "wait", "args": [str(path)], "kwargs": {}}
    fields = {"session": session, "kind": "value", "number": 0, "maker": maker}
    with contextlib.closing(_link(tasks, certificates, "chief", "worker")) as link:
        link.call(hello(session), _SECONDS)
        call = link.start(Message("source", fields))
        while not path.exists():
            assert not call.done(), call.exception()
    for process, number in zip(processes.values(), (2, 15, 15), strict=True):
        process.send_signal(number)

    assert [process.wait(_SECONDS) for process in processes.values()] == [0, 0, 0]


def test_a_script_is_launched_as_all_tasks_and_survives_a_worker(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    options = LaunchOptions(
        (sys.executable, str(_JOB)),
        num_workers=2,
        num_servers=1,
        max_restarts=1,
        devices_per_worker=2,
    )
    with (tmp_path / "out").open("w+") as out, (tmp_path / "err").open("w+") as err:
        code = run(options, stdout_fd=out.fileno(), stderr_fd=err.fileno())
        output, errors = (file.seek(0) or file.read() for file in (out, err))

    assert code == 7, errors
    # What the killed worker has pushed counts, although others have repeated it with other batches.
    first, second, third = output.splitlines()
    assert re.fullmatch(r"\[chief 0\] 50 \d+ \d+ \[1, 3, 5\]", first)
    assert re.fullmatch(r"\[chief 0\] 100 (\d+) \1 \[10, 11, 12\]", second)
    assert re.fullmatch(r"\[chief 0\] <.*: 2 workers with 2 devices .*> (\d+) \1 \{4\}", third)
    assert "worker 0 was ended by SIGKILL" in errors
    assert "starting it again, restart 1 of 1" in errors
    assert "DistributaryWarning" not in errors


def test_missing_tasks_are_named(monkeypatch):
    monkeypatch.setenv("DISTRIBUTARY_CONNECT_SECONDS", "0.2")
    worker, ps = free_addresses("127.0.0.1", 2)
    server = GrpcServer(RoleCheck("ps", 0, ParameterServer(0)), ps, insecure=True)
    try:
        with pytest.raises(ClusterError) as caught:
            cluster_of(SimpleClusterResolver(ClusterSpec({"worker": [worker], "ps": [ps]})))
    finally:
        server.close()

    assert f"worker 0 at {worker}: No connection" in str(caught.value)
    assert "ps 0" not in str(caught.value)


def test_the_chief_says_whom_it_waits_for(monkeypatch, caplog):
    monkeypatch.setattr(_processes, "_PATIENCE_SECONDS", 0.0)
    addresses = free_addresses("127.0.0.1", 2)
    peers = tasks_of(ClusterSpec({"worker": addresses[:1], "ps": addresses[1:]}))
    said, log = threading.Event(), logging.getLogger(_processes.__name__)
    log.addFilter(show := lambda record: said.set() or True)
    with contextlib.ExitStack() as stack:
        stack.callback(log.removeFilter, show)
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(1))
        meeting = pool.submit(_processes.meet, peers, None, 60.0)
        assert said.wait(60.0)
        for service, address in zip(
            (_Worker(0, 2), RoleCheck("ps", 0, ParameterServer(0))), addresses, strict=True
        ):
            server = GrpcServer(service, address, insecure=True)
            stack.callback(server.close)
        assert meeting.result(60.0) == 2

    (line,) = [r.getMessage() for r in caplog.records if "waits" in r.getMessage()]
    assert line == f"The chief waits for worker 0 at {addresses[0]}, ps 0 at {addresses[1]}."


class _Worker:
    def __init__(self, number, num_devices):
        self._fields = {"task": f"worker {number}", "versions": {}, "devices": num_devices}

    def handle(self, message, peer):
        return Message("ok", self._fields)


def test_workers_with_another_number_of_devices_are_named():
    addresses = free_addresses("127.0.0.1", 3)
    services = [_Worker(0, 2), _Worker(1, 4), RoleCheck("ps", 0, ParameterServer(0))]
    cluster = {"worker": addresses[:2], "ps": addresses[2:]}
    with contextlib.ExitStack() as stack:
        for service, address in zip(services, addresses, strict=True):
            stack.callback(GrpcServer(service, address, insecure=True).close)
        with pytest.raises(ClusterError, match=r"worker 1 at \S+ has 4 .* worker 0 at \S+ has 2:"):
            cluster_of(SimpleClusterResolver(ClusterSpec(cluster)))


def test_a_server_waits_for_the_address_of_its_host(monkeypatch):
    address, other = free_addresses("127.0.0.1", 2)
    port = address.partition(":")[2]
    server = dist.Server(
        {"worker": [other], "ps": [f"pod.invalid:{port}"]}, "ps", start=False, insecure=True
    )
    answers = [socket.gaierror("not known"), [(socket.AF_INET, 0, 0, "", ("127.0.0.1", int(port)))]]

    def getaddrinfo(*args, **kwargs):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", getaddrinfo)
        server.start()
    with pytest.raises(ClusterError, match="in use"):
        GrpcServer(_Stranger(), address, insecure=True)
    server._server.close()

    monkeypatch.setenv("DISTRIBUTARY_CONNECT_SECONDS", "0")
    with pytest.raises(ClusterError, match=r"Cannot listen at pod\.invalid"):
        dist.Server(server.server_def, insecure=True)
    monkeypatch.setenv("DISTRIBUTARY_CONNECT_SECONDS", "soon")
    with pytest.raises(InvalidValueError, match="'soon', expected a number of seconds"):
        dist.Server(server.server_def, insecure=True)


class _Stranger:
    """Says that it is somebody else."""

    def __init__(self, **fields):
        self._fields = fields

    def handle(self, message, peer):
        return Message("ok", self._fields)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"task": "ps 0", "versions": {"jax": "0.1"}}, r"ps 0 at .* has jax 0\.1 and the chief 0"),
        ({"task": "worker 1", "versions": {}}, "should be ps 0, and is worker 1"),
    ],
)
def test_tasks_that_do_not_fit_are_refused(fields, text):
    workers = free_addresses("127.0.0.1", 1)
    server = GrpcServer(_Stranger(**fields), "127.0.0.1:0", insecure=True)
    spec = ClusterSpec({"worker": workers, "ps": [server.address]})
    try:
        with pytest.raises(ClusterError, match=text):
            cluster_of(SimpleClusterResolver(spec))
    finally:
        server.close()


@pytest.mark.parametrize(
    ("cluster", "task", "text"),
    [
        ({"worker": ["a:1"]}, {}, 'The cluster has no "ps"'),
        ({"ps": ["a:1"]}, {}, 'The cluster has no "worker"'),
        ({}, {}, 'The cluster has no "worker"'),
        ({"worker": ["a:1"], "ps": {0: "a:2", 2: "a:3"}}, {}, "gaps"),
        ({"worker": ["a:1"], "ps": ["a:2"], "gpu": ["a:3"]}, {}, '"gpu"'),
        ({"worker": ["a:1"], "ps": ["a:2"], "chief": ["a:3", "a:4"]}, {}, "2 tasks"),
        (
            {"worker": ["a:1"], "ps": ["a:2"]},
            {"task_type": "worker", "task_id": 0},
            r"this process is worker 0 .* Server\(",
        ),
    ],
)
def test_clusters_that_cannot_be(cluster, task, text):
    with pytest.raises(InvalidValueError, match=text):
        dist.ParameterServerStrategy(SimpleClusterResolver(ClusterSpec(cluster), **task))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (("worker", 1), InvalidValueError, "1"),
        (("chief", 0), InvalidValueError, 'only "worker" and "ps" serve'),
        ((None, None), InvalidValueError, "task_type is None"),
        (("ps", 0, "grpc+verbs"), InvalidValueError, r"grpc\+verbs"),
    ],
)
def test_servers_that_cannot_be(arguments, error, text):
    spec = {"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"], "ps": ["127.0.0.1:3"]}
    with pytest.raises(error, match=text):
        dist.Server(spec, *arguments)
    with pytest.raises(InvalidTypeError, match="the cluster is 3"):
        dist.Server(3)


def test_a_server_knows_who_it_is():
    spec = ClusterSpec({"worker": ["10.1.2.3:5"], "ps": ["127.0.0.1:3"]})

    server = dist.Server(spec, "worker", start=False)

    assert (server.target, server.server_def.task_index) == ("grpc://10.1.2.3:5", 0)
    assert dist.Server(server.server_def, start=False).server_def == server.server_def
    with pytest.raises(ClusterError, match=r"10\.1\.2\.3"):
        server.start()
