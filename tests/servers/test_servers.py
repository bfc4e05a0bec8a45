"""Training with workers and servers in processes of their own."""

import concurrent.futures
import contextlib
import logging
import os
import re
import socket
import sys
import threading
import time
from dataclasses import astuple, replace
from pathlib import Path

import jax
import numpy as np
import psutil
import pytest

import distributary as dist
from distributary.cluster_resolver import ClusterSpec, SimpleClusterResolver
from distributary.errors import (
    ClusterError,
    DistributaryWarning,
    InvalidTypeError,
    InvalidValueError,
)
from distributary.launch import LaunchOptions, free_addresses, run
from tests.servers.conftest import Reply
from tests.servers.fuzz import strange_messages
from tests.servers.wire import Message, Update, UpdatedRows, export_function

_JOB = Path(__file__).parent / "programs" / "job.py"
_SECONDS = 60.0  # more than anything takes
_NUM_FUZZ_INPUTS = int(os.environ.get("DISTRIBUTARY_FUZZ_INPUTS", "1000"))

RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, 3)).astype(np.float32)
Y = (X @ np.array([1.0, -2.0, 3.0], np.float32)).astype(np.float32)


def _new_session():
    return [time.time_ns(), "a test"]


@pytest.fixture
def strategy(cluster, certificates, monkeypatch):
    """A strategy on worker 0 and the servers, once they are there."""
    monkeypatch.setenv("DISTRIBUTARY_CERTS", str(certificates))
    spec = ClusterSpec({**cluster.spec, "worker": cluster.spec["worker"][:1]})
    strategy = dist.ParameterServerStrategy(SimpleClusterResolver(spec, task_type="chief"))
    yield strategy
    strategy._cluster.close()


@pytest.fixture
def new_link(cluster, strategy, connect):
    """A function that connects to a task as another one."""

    def new(role, task_type="ps"):
        return connect(cluster.spec[task_type][0], role, task_type)

    return new


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


@pytest.mark.parametrize("task_type", ["worker", "ps"])
@pytest.mark.parametrize("role", ["chief", "worker", "ps"])
def test_every_message_is_for_its_roles(role, task_type, new_link):
    session = _new_session()
    fields = {"session": session, "seconds": 0}
    kinds = {"program", "shutdown", ""}.union(*_OF_CHIEF.values(), *_OF_WORKER.values())
    new_link("chief", task_type).call(Message("hello", {"session": session}), _SECONDS)

    link = new_link(role, task_type)
    errors = {k: link.start(Message(k, fields)).exception(_SECONDS) for k in sorted(kinds)}

    refused = {kind for kind, error in errors.items() if isinstance(error, PermissionError)}
    assert refused == kinds - _may_send(role, task_type)
    for kind in refused:
        text = rf"{task_type} 0 got '{kind}' from {role} at ipv4:\S+, which (only the|nobody)"
        assert re.match(text, str(errors[kind]))


class _Session:
    """A session on ps 0, and its chief and worker."""

    def __init__(self, new_link):
        self._id = _new_session()
        self._links = {role: new_link(role) for role in ("chief", "worker")}
        self._links["chief"].call(Message("hello", {"session": self._id}), _SECONDS)

    def call(self, role, kind, arrays=(), blobs=(), **fields):
        message = Message(kind, {"session": self._id, **fields}, list(arrays), list(blobs))
        return self._links[role].call(message, _SECONDS).arrays

    def add_update(self, program, states, outputs, rows=()):
        update = Update(program.name, states, outputs, list(rows))
        self.call("chief", "update", blobs=[program.content], update=astuple(update))
        return {"update": update.name, "ids": [], "num_row_reads": 0}


def test_a_worker_pushes_what_the_chief_has_allowed_and_nothing_else(new_link):
    session = _Session(new_link)
    aval = jax.ShapeDtypeStruct((), np.float32)
    program = export_function(lambda w, g: [w + g], [aval, aval], [None, None])
    for number, value in ((1, 3), (2, 5)):
        session.call("chief", "create", [np.float32(value)], id=number)
    push = session.add_update(program, [1], [1])

    # Other variables and closures of others are none of its business.
    more = {"outputs": [2], "states": [2], "finished": 1 << 60, "program": program.name}
    session.call("worker", "push", [np.float32(1)], closure=0, **push, **more)
    session.call("worker", "push", [np.float32(1)], closure=1, **push)

    np.testing.assert_array_equal(session.call("worker", "read", ids=[1, 2]), [5, 5])
    with pytest.raises(InvalidValueError, match="ps 0 has no update 1"):
        session.call("worker", "push", closure=2, **{**push, "update": 1})
    # It would be taken for the chief's next request, which would then not be handled.
    with pytest.raises(PermissionError, match="with the field 'request' from worker"):
        session.call("worker", "read", ids=[1], request=1)


def test_a_server_refuses_rows_that_it_does_not_have(new_link):
    session = _Session(new_link)
    table = RNG.normal(size=(60, 3)).astype(np.float32)
    session.call("chief", "create", [table], id=0)
    aval = jax.ShapeDtypeStruct(table.shape, np.float32)
    program = export_function(lambda w, g: [w - g], [aval, aval], [16, 16])
    rows = UpdatedRows(0, 0, 60, 16, [0], [0], [0], is_whole=False)
    push = session.add_update(program, [0], [0], [rows])

    for numbers in ([-1], [60], [3, 2], [2, 2], [[1]], np.array([1.5])):
        with pytest.raises(InvalidValueError, match="Rows"):
            session.call("worker", "read", [np.asarray(numbers)], ids=[0])
    with pytest.raises(InvalidValueError, match="Rows 60 to 60"):
        arrays = [np.ones((1, 3), np.float32), np.array([60])]
        session.call("worker", "push", arrays, closure=0, **push)
    with pytest.raises(InvalidValueError, match="rows of a variable of 1000000000000 rows"):
        session.add_update(program, [], [], [replace(rows, is_whole=True, size=10**12)])
    np.testing.assert_array_equal(session.call("worker", "read", ids=[0])[0], table)
    arrays = [np.ones((2, 3), np.float32), np.array([1, 59])]
    session.call("worker", "push", arrays, closure=1, **push)

    table[[1, 59]] -= 1
    np.testing.assert_array_equal(session.call("worker", "read", ids=[0])[0], table)


@pytest.mark.parametrize("task_type", ["ps", "worker"])
def test_nothing_that_is_sent_does_harm(task_type, cluster, new_link):
    process = psutil.Process(cluster.processes[f"{task_type} 0"].pid)
    link = new_link("chief", task_type)
    with contextlib.closing(link):
        session = _new_session()
        link.call(Message("hello", {"session": session}), _SECONDS)
        for message in strange_messages(task_type, 200, session):  # whatever is allocated once
            link.start(message).exception(_SECONDS)
        bytes_before = process.memory_info().rss
        messages = list(strange_messages(task_type, _NUM_FUZZ_INPUTS, session))
        errors = []
        for start in range(0, len(messages), 500):
            calls = [link.start(message) for message in messages[start : start + 500]]
            errors += [type(call.exception(_SECONDS)) for call in calls]

        assert errors.count(type(None)) < len(errors) / 2
        name = link.call(Message("identify"), _SECONDS).fields["task"]
        assert name == f"{task_type} 0"
        assert process.memory_info().rss - bytes_before < 1 << 26


def test_a_task_ends_well_when_it_is_told_to(cluster, new_link, tmp_path):
    session, path = _new_session(), tmp_path / "waits"
    maker = {"module": "__main__", "name": "wait", "args": [str(path)], "kwargs": {}}
    fields = {"session": session, "kind": "value", "number": 0, "maker": maker}
    link = new_link("chief", "worker")
    link.call(Message("hello", {"session": session}), _SECONDS)
    call = link.start(Message("source", fields))
    while not path.exists():
        assert not call.done(), call.exception()
    link.close()

    for name, number in {"worker 0": 2, "ps 0": 15, "ps 1": 15}.items():
        cluster.processes[name].send_signal(number)
        assert cluster.processes[name].wait(_SECONDS) == 0
        cluster.start(name)


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


def _strategy(workers, servers):
    spec = ClusterSpec({"worker": workers, "ps": servers})
    return dist.ParameterServerStrategy(SimpleClusterResolver(spec))


def test_missing_tasks_are_named(monkeypatch, serve):
    monkeypatch.setenv("DISTRIBUTARY_CONNECT_SECONDS", "0.2")
    workers = free_addresses("127.0.0.1", 1)
    server = serve(service=Reply(task="ps 0", versions={}))

    with pytest.raises(ClusterError) as caught:
        _strategy(workers, [server])

    assert f"worker 0 at {workers[0]}: No connection" in str(caught.value)
    assert "ps 0" not in str(caught.value)


def test_the_chief_says_whom_it_waits_for(monkeypatch, caplog, serve):
    monkeypatch.setattr("distributary.servers._processes._PATIENCE_SECONDS", 0.0)
    addresses = free_addresses("127.0.0.1", 2)
    warned, log = threading.Event(), logging.getLogger("distributary.servers._processes")
    log.addFilter(note := lambda record: warned.set() or True)
    with contextlib.ExitStack() as stack:
        stack.callback(log.removeFilter, note)
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(1))
        strategy = pool.submit(_strategy, addresses[:1], addresses[1:])
        assert warned.wait(_SECONDS)
        for task, address in zip(("worker 0", "ps 0"), addresses, strict=True):
            serve(address, service=Reply(task=task, versions={}, devices=2))
        strategy = strategy.result(_SECONDS)
        stack.callback(strategy._cluster.close)

    assert strategy.num_replicas_in_sync == 2
    (line,) = [r.getMessage() for r in caplog.records if "waits" in r.getMessage()]
    assert line == f"The chief waits for worker 0 at {addresses[0]}, ps 0 at {addresses[1]}."


@pytest.mark.parametrize(
    ("workers", "server", "text"),
    [
        ([2, 4], {"task": "ps 0", "versions": {}}, r"worker 1 at \S+ has 4 .* 0 at \S+ has 2:"),
        ([], {"task": "ps 0", "versions": {"jax": "0.1"}}, r"ps 0 at .* has jax 0\.1 and the chie"),
        ([], {"task": "worker 1", "versions": {}}, "should be ps 0, and is worker 1"),
    ],
)
def test_tasks_that_do_not_fit_are_refused(workers, server, text, serve):
    services = [
        Reply(task=f"worker {i}", versions={}, devices=number) for i, number in enumerate(workers)
    ]
    addresses = [serve(service=service) for service in services]

    with pytest.raises(ClusterError, match=text):
        _strategy(addresses or free_addresses("127.0.0.1", 1), [serve(service=Reply(**server))])


def test_a_server_waits_for_the_address_of_its_host(monkeypatch, serve):
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
    with pytest.raises(ClusterError, match=f"Cannot listen at {address}.*Is the port in use"):
        serve(address)
    server._close()

    monkeypatch.setenv("DISTRIBUTARY_CONNECT_SECONDS", "0")
    with pytest.raises(ClusterError, match=r"Cannot listen at pod\.invalid"):
        dist.Server(server.server_def, insecure=True)
    for text in ("soon", "nan", "inf", "-1"):
        monkeypatch.setenv("DISTRIBUTARY_CONNECT_SECONDS", text)
        with pytest.raises(InvalidValueError, match=f"'{text}', expected a number of seconds"):
            dist.Server(server.server_def, insecure=True)


_TASKS = {"worker": ["127.0.0.1:2"], "ps": ["127.0.0.1:3"]}


@pytest.mark.parametrize(
    ("cluster", "text"),
    [
        ({"worker": ["a:1"]}, 'The cluster has no "ps"'),
        ({"ps": ["a:1"]}, 'The cluster has no "worker"'),
        ({"worker": ["a:1"], "ps": {0: "a:2", 2: "a:3"}}, "gaps"),
        ({**_TASKS, "gpu": ["a:3"]}, '"gpu"'),
        ({**_TASKS, "chief": ["a:3", "a:4"]}, "2 tasks"),
    ],
)
def test_clusters_that_cannot_be(cluster, text):
    with pytest.raises(InvalidValueError, match=text):
        dist.ParameterServerStrategy(SimpleClusterResolver(ClusterSpec(cluster)))


def test_tasks_that_cannot_be():
    worker = SimpleClusterResolver(ClusterSpec(_TASKS), task_type="worker", task_id=0)
    with pytest.raises(InvalidValueError, match=r"this process is worker 0 .* Server\("):
        dist.ParameterServerStrategy(worker)
    for arguments, text in (
        (("worker", 1), "1"),
        (("chief", 0), 'only "worker" and "ps" serve'),
        ((None, None), "task_type is None"),
        (("ps", 0, "grpc+verbs"), r"grpc\+verbs"),
    ):
        with pytest.raises(InvalidValueError, match=text):
            dist.Server({"chief": ["127.0.0.1:1"], **_TASKS}, *arguments)
    with pytest.raises(InvalidTypeError, match="the cluster is 3"):
        dist.Server(3)


def test_a_server_knows_who_it_is():
    spec = ClusterSpec({"worker": ["10.1.2.3:5"], "ps": ["127.0.0.1:3"]})

    server = dist.Server(spec, "worker", start=False)

    assert (server.target, server.server_def.task_index) == ("grpc://10.1.2.3:5", 0)
    assert dist.Server(server.server_def, start=False).server_def == server.server_def
    with pytest.raises(ClusterError, match=r"10\.1\.2\.3"):
        server.start()
