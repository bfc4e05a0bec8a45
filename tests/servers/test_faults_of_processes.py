"""Workers, servers and chiefs that are killed, frozen and cut off, as processes."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist
from distributary.checkpoint import Checkpoint, CheckpointManager, latest_checkpoint
from distributary.cluster_resolver import ClusterSpec, SimpleClusterResolver
from distributary.coordinator import ClusterCoordinator, ParameterServerStrategy
from distributary.errors import CoordinatorReplacedError, PSUnavailableError
from distributary.launch import free_addresses

_PROGRAMS = Path(__file__).parent / "programs"
_SECONDS = 60.0  # more than anything takes
_NUM_ELEMENTS = 1 << 20


class _Proxy:
    """Passes connections on to an address, and breaks one when told to.

    Attributes:
        num_bytes: The next connection breaks after so many bytes.
        broken: Set when it has.
    """

    def __init__(self, target):
        self.num_bytes = 1 << 60
        self.broken = threading.Event()
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for one in self._sockets:
            one.close()

    def _accept(self):
        while True:
            try:
                near = self._listener.accept()[0]
            except OSError:
                return
            try:
                far = socket.create_connection(self._target.split(":"))
            except OSError:
                near.close()
                continue
            self._sockets += [near, far]
            num_bytes, self.num_bytes = self.num_bytes, 1 << 60
            for args in ((near, far, num_bytes), (far, near, 1 << 60)):
                thread = threading.Thread(target=self._forward, args=args, daemon=True)
                self._threads.append(thread)
                thread.start()

    def _forward(self, source, target, num_bytes):
        """In one direction; both share the sockets, and who ends first shuts these down."""
        with contextlib.suppress(OSError):
            while num_bytes > 0 and (data := source.recv(min(num_bytes, 1 << 16))):
                target.sendall(data)
                num_bytes -= len(data)
            if num_bytes <= 0:
                self.broken.set()
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


class _Cluster:
    """Processes of two workers and two servers; worker 0 reaches ps 0 through a proxy.

    They have certificates: without these, a server refuses what a program in between passes on.
    """

    def __init__(self, stack, certificates):
        self._stack = stack
        self._certificates = str(certificates)
        chief, metrics, *addresses = free_addresses("127.0.0.1", 6)
        self.spec = {"chief": [chief], "worker": addresses[:2], "ps": addresses[2:]}
        self.proxy = _Proxy(addresses[2])
        stack.callback(self.proxy.close)
        self._metrics_port = metrics.rpartition(":")[2]
        self.processes = {}
        for name in ("worker 0", "worker 1", "ps 0", "ps 1"):
            self.start(name)

    def start(self, name):
        """Starts a task, in place of one that has ended."""
        task_type, index = name.split()
        spec = dict(self.spec)
        if name == "worker 0":
            spec["ps"] = [self.proxy.address, spec["ps"][1]]
        self.processes[name] = self.start_program("task.py", spec, task_type, int(index))

    def start_program(self, program, spec, task_type, index, *args):
        config = {"cluster": spec, "task": {"type": task_type, "index": index}}
        environ = {
            **os.environ,
            "DISTRIBUTARY_CERTS": self._certificates,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "TF_CONFIG": json.dumps(config),
            "DISTRIBUTARY_METRICS_PORT": self._metrics_port,
        }
        process = self._stack.enter_context(
            subprocess.Popen(
                [sys.executable, _PROGRAMS / program, *args], env=environ, stdout=subprocess.PIPE
            )
        )
        self._stack.callback(process.kill)
        return process

    def metrics(self):
        """The lines that all processes tell."""
        lines = []
        first = int(self._metrics_port)
        for port in range(first, first + 10):
            with (
                contextlib.suppress(urllib.error.URLError),
                urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=_SECONDS) as reply,
            ):
                lines += reply.read().decode().splitlines()
        return lines

    @contextlib.contextmanager
    def frozen(self, name):
        """A context in which a task stands still."""
        process = self.processes[name]
        process.send_signal(signal.SIGSTOP)
        try:
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            yield
        finally:
            process.send_signal(signal.SIGCONT)

    def kill(self, name):
        self.processes[name].kill()
        self.processes[name].wait(_SECONDS)


class _Job:
    """A counter on each server, a large variable on the first, and a step that changes them."""

    def __init__(self, cluster):
        self.strategy = ParameterServerStrategy(
            SimpleClusterResolver(ClusterSpec(cluster.spec), task_type="chief")
        )
        with self.strategy.scope():
            self.counters = [dist.Variable(0), dist.Variable(0)]
            self.large = dist.Variable(np.zeros(_NUM_ELEMENTS, np.float32))
        self.coordinator = ClusterCoordinator(self.strategy)
        self.checkpoint = Checkpoint(counters=self.counters, large=self.large)

    def step(self):
        for counter in self.counters:
            counter.assign_add(1)

    def large_step(self, x):
        self.step()
        self.large.assign_add(x * jnp.ones(_NUM_ELEMENTS))

    def schedule(self, num_steps):
        return [self.coordinator.schedule(self.step) for _ in range(num_steps)]

    def counts(self):
        return [int(counter.numpy()) for counter in self.counters]

    def wait_for_workers(self, num_workers=2):
        workers = self.coordinator._workers
        with workers._changed:
            assert workers._changed.wait_for(lambda: workers.num_live() == num_workers, _SECONDS)


@pytest.fixture(scope="module")
def cluster(certificates):
    with contextlib.ExitStack() as stack:
        yield _Cluster(stack, certificates)


@pytest.fixture
def new_job(cluster, certificates, monkeypatch):
    """A function that makes a job with new variables, when all tasks are there."""
    monkeypatch.setenv("DISTRIBUTARY_CERTS", str(certificates))
    with contextlib.ExitStack() as stack:

        def new():
            job = _Job(cluster)
            stack.callback(job.strategy._cluster.close)
            return job

        yield new


def test_a_worker_is_killed_and_restarted(cluster, new_job):
    job = new_job()
    job.wait_for_workers()
    values = job.schedule(500)
    values[50].fetch()
    cluster.kill("worker 0")
    job.coordinator.join()
    cluster.start("worker 0")
    job.wait_for_workers()
    job.schedule(500)
    job.coordinator.join()

    assert job.counts() == [1000, 1000]


def test_all_processes_have_metrics(cluster, new_job):
    job = new_job()
    job.wait_for_workers()
    job.schedule(10)
    job.coordinator.join()

    lines = cluster.metrics()

    assert lines.count("distributary_ps_num_pushes 10") == 2
    assert sum(line.startswith("distributary_worker_pull_seconds ") for line in lines) == 2


def test_a_worker_is_frozen_and_goes_on(cluster, new_job):
    job = new_job()
    job.wait_for_workers()
    job.schedule(200)[20].fetch()
    with cluster.frozen("worker 1"):
        job.coordinator.join()
    job.wait_for_workers()
    job.schedule(200)
    job.coordinator.join()

    assert job.counts() == [400, 400]


def test_a_chief_that_was_frozen_itself_blames_nobody(cluster, new_job):
    job = new_job()
    job.wait_for_workers()
    job.schedule(200)[20].fetch()
    this = os.getpid()
    # Longer than a heartbeat may take, and than pings of the transport may.
    subprocess.run(["sh", "-c", f"kill -STOP {this}; sleep 7; kill -CONT {this}"], check=True)
    job.coordinator.join()
    job.wait_for_workers()
    job.schedule(200)
    job.coordinator.join()

    assert job.counts() == [400, 400]
    assert [worker.num_losses for worker in job.coordinator.statistics().workers] == [0, 0]


def test_a_connection_breaks_in_the_middle_of_a_push(cluster, new_job):
    cluster.proxy.num_bytes = 2_500_000  # of the next session's
    job = new_job()
    job.wait_for_workers()
    num_steps = 0
    while not cluster.proxy.broken.is_set():
        for _ in range(10):
            job.coordinator.schedule(job.large_step, args=(np.float32(1),))
        job.coordinator.join()
        num_steps += 10

    assert job.counts() == [num_steps] * 2
    expected = np.full(_NUM_ELEMENTS, num_steps, np.float32)
    np.testing.assert_array_equal(job.large.numpy(), expected)


def test_a_chief_is_killed_and_another_one_goes_on(cluster, new_job, tmp_path):
    chief = cluster.start_program("chief.py", cluster.spec, "chief", 0, tmp_path)
    assert chief.stdout.readline() == b"works\n"
    chief.kill()
    chief.wait(_SECONDS)
    job = new_job()
    assert job.counts() == [0, 0]
    job.checkpoint.restore(latest_checkpoint(tmp_path), partial=True)
    assert job.counts() == [20, 20]
    job.schedule(100)
    job.coordinator.join()

    assert job.counts() == [120, 120]


def test_of_two_chiefs_the_second_works(cluster, new_job):
    first = new_job()
    first.schedule(1000)[0].fetch()
    second = new_job()
    second.schedule(100)
    second.coordinator.join()

    with pytest.raises(CoordinatorReplacedError, match=f"{cluster.spec['ps'][0]}.* another coord"):
        first.counts()
    with pytest.raises(CoordinatorReplacedError):
        first.coordinator.join()
    assert second.counts() == [100, 100]


def test_a_server_is_killed_and_restored(cluster, new_job, tmp_path):
    job = new_job()
    job.coordinator.schedule(job.large_step, args=(np.float32(3),))
    manager = CheckpointManager(job.checkpoint, tmp_path, max_to_keep=1)
    saved = manager.save()
    job.schedule(1000)[10].fetch()
    address = cluster.spec["ps"][1]
    cluster.kill("ps 1")
    with pytest.raises(PSUnavailableError, match=f"ps 1 at {address} cannot be reached"):
        job.coordinator.join()
    with pytest.raises(PSUnavailableError, match=f"ps 1 at {address}"):
        manager.save()
    cluster.start("ps 1")
    with pytest.raises(PSUnavailableError, match=f"ps 1 at {address}"):
        job.schedule(1)

    other = new_job()
    manager = CheckpointManager(other.checkpoint, tmp_path, max_to_keep=1)
    assert manager.restore_or_initialize() == saved
    assert other.counts() == [1, 1]
    np.testing.assert_array_equal(other.large.numpy(), np.full(_NUM_ELEMENTS, 3, np.float32))
    other.schedule(100)
    other.coordinator.join()

    assert other.counts() == [101, 101]
    with pytest.raises(CoordinatorReplacedError):
        job.counts()
