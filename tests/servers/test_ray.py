"""Workers and servers that a Ray on this machine starts, and starts again."""

import concurrent.futures
import contextlib
import os
import sys
import threading
import types

import numpy as np
import pytest

import distributary as dist
from distributary.errors import ClusterError, DistributaryWarning, PSUnavailableError
from distributary.experimental import ray_cluster
from tests.servers.jobs import CountingJob

ray = pytest.importorskip("ray")

# Starting a machine forks this process, of which JAX warns.
pytestmark = pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning")

_HALF = {"worker_options": {"num_cpus": 0.5}}


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    """Ray with one machine, to which others can be added."""
    from ray.cluster_utils import Cluster

    args = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 100 << 20}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # otherwise it writes a token to ~/.ray
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        cluster = Cluster(initialize_head=True, head_node_args=args)
        ray.init(cluster.address, log_to_driver=False)
        yield cluster
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="module")
def tasks(machines):
    with ray_cluster(workers=1, ps=2) as cluster:
        yield cluster


@pytest.fixture
def new_job():
    """A function that makes a job with new variables on some tasks."""
    with contextlib.ExitStack() as stack:
        yield lambda tasks: stack.enter_context(contextlib.closing(CountingJob(tasks)))


def _kill(tasks, *name):
    ray.kill(tasks._actors[name], no_restart=False)


def test_workers_make_data_by_a_function_inside_a_function(tasks, new_job):
    job = new_job(tasks)
    this = os.getpid()

    def numbers():
        return [np.int32([i, os.getpid() == this]) for i in range(20)]

    def step(iterator):
        number, is_here = next(iterator)
        job.counters[0].assign_add(number)
        return is_here

    iterator = iter(job.coordinator.create_per_worker_dataset(numbers))
    results = [job.coordinator.schedule(step, args=(iterator,)) for _ in range(20)]

    assert not any(job.coordinator.fetch(results))
    assert job.counts() == [190, 0]


def test_data_that_workers_cannot_make_is_sent_to_them(tasks, new_job, monkeypatch):
    module = types.ModuleType("only_here")
    exec("def numbers():\n    return range(5)", vars(module))
    monkeypatch.setitem(sys.modules, "only_here", module)
    coordinator = new_job(tasks).coordinator

    with pytest.warns(DistributaryWarning, match="No module named 'only_here'"):
        iterator = iter(coordinator.create_per_worker_dataset(module.numbers))
    results = [coordinator.schedule(next, args=(iterator,)) for _ in range(5)]

    assert coordinator.fetch(results) == [0, 1, 2, 3, 4]


def test_ray_starts_killed_tasks_again(tasks, new_job):
    job = new_job(tasks)
    pid = job.coordinator.create_per_worker_value(os.getpid)
    results = [job.coordinator.schedule(job.step, args=(pid,)) for _ in range(2000)]
    results[50].fetch()
    _kill(tasks, "worker", 0)
    job.coordinator.join()

    workers = [int(worker) for worker in job.coordinator.fetch(results)]
    assert workers[-1] != workers[50] == workers[0]
    assert job.counts() == [2000, 2000]
    job.schedule(1000)[10].fetch()
    _kill(tasks, "ps", 0)
    with pytest.raises(PSUnavailableError, match="ps 0"):
        job.coordinator.join()
    other = new_job(tasks)
    other.run(50)
    assert other.counts() == [50, 50]


def test_tasks_for_which_there_is_no_place_are_named(machines, monkeypatch):
    large = {"num_cpus": 1000}

    with pytest.raises(ClusterError, match=r"worker \d could not be started: .* not schedulable"):
        ray_cluster(workers=2, ps=1, worker_options=large)
    monkeypatch.setenv("DISTRIBUTARY_CONNECT_SECONDS", "1")
    with pytest.raises(ClusterError, match=r"has not started .*worker 0, worker 1\. Free are {"):
        ray_cluster(workers=2, ps=1, worker_options=large, insecure=True)


def test_several_machines_need_certificates(machines, certificates, new_job, monkeypatch):
    node = machines.add_node(num_cpus=1, resources={"second": 1})
    with pytest.raises(ClusterError, match="Ray has 2 machines, and tasks without certificates"):
        ray_cluster(workers=1, ps=1)

    monkeypatch.setenv("DISTRIBUTARY_CERTS", str(certificates))
    with ray_cluster(workers=1, ps=2, worker_options={"resources": {"second": 1}}) as tasks:
        job = new_job(tasks)
        job.run(10)

        assert job.counts() == [10, 10]
    machines.remove_node(node)


def _add(x, y):
    """Returns the rank, the number of workers, and the sum of what all of them compute."""
    strategy = dist.MultiWorkerMirroredStrategy()
    total = strategy.reduce("SUM", strategy.run(lambda: x.sum() + y), axis=None)
    return strategy.extended.worker_number, strategy.extended.num_workers, float(total)


def test_workers_on_ray_compute_together_and_return_their_results(machines):
    x = np.arange(6, dtype=np.float32)

    results = dist.experimental.ray(_add, x, 100.0, workers=2, **_HALF)

    assert results == [(rank, 2, 2 * (x.sum() + 100.0)) for rank in range(2)]


def test_parameter_servers_on_ray_train_in_this_process(machines):
    def train(cluster, number):
        job = CountingJob(cluster)
        job.run(number)
        return os.getpid(), job.counts()

    assert dist.experimental.ray(train, 5, workers=1, ps=2, **_HALF) == (os.getpid(), [5, 5])


def test_workers_start_again_when_one_is_lost(machines, tmp_path):
    def train():
        (tmp_path / f"{os.environ['TF_CONFIG'][-3]} {os.environ['DISTRIBUTARY_RESTART']}").touch()
        strategy = dist.MultiWorkerMirroredStrategy()
        if os.environ["DISTRIBUTARY_RESTART"] == "0" and not strategy.is_chief:
            os.kill(os.getpid(), 9)
        return float(strategy.reduce("SUM", strategy.run(lambda: np.float32(2)), axis=None))

    with pytest.raises(ray.exceptions.ActorDiedError):
        dist.experimental.ray(train, workers=2, **_HALF)
    assert dist.experimental.ray(train, workers=2, max_restarts=1, **_HALF) == [4.0, 4.0]
    assert {path.name for path in tmp_path.iterdir()} == {"0 0", "1 0", "0 1", "1 1"}


def test_the_error_of_a_worker_is_raised_here(machines):
    def train():
        if not dist.MultiWorkerMirroredStrategy().is_chief:
            raise KeyError("no such column")

    with pytest.raises(KeyError, match="no such column"):
        dist.experimental.ray(train, workers=2, **_HALF)


def test_a_training_grows_when_there_is_a_place(machines, tmp_path):
    def train():
        num_workers = dist.MultiWorkerMirroredStrategy().extended.num_workers
        (tmp_path / str(num_workers)).touch()
        while num_workers == 1:
            threading.Event().wait(0.1)
        return num_workers

    nodes = [machines.add_node(num_cpus=1, resources={"place": 1})]
    with concurrent.futures.ThreadPoolExecutor() as executor:
        options = {"workers": (1, 2), "worker_options": {"resources": {"place": 1}}}
        training = executor.submit(dist.experimental.ray, train, **options)
        while not (tmp_path / "1").exists() and not training.done():
            threading.Event().wait(0.1)
        nodes.append(machines.add_node(num_cpus=1, resources={"place": 1}))
        results = training.result()
    for node in nodes:
        machines.remove_node(node)

    assert results == [2, 2]


@pytest.mark.parametrize("workers", [0, (2, 1), (0, 2), "2"])
def test_numbers_of_workers_are_checked(workers):
    with pytest.raises((ValueError, TypeError), match=r"^ray: workers is .*, expected"):
        dist.experimental.ray(_add, workers=workers)
