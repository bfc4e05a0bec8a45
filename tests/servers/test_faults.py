"""Training goes on when workers are lost, and says why when it cannot."""

import contextlib
import gc
import itertools
import threading
import time

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import distributary as dist
from distributary.coordinator import ClusterCoordinator, ParameterServerStrategy, local_cluster
from distributary.errors import (
    CancelledError,
    CoordinatorReplacedError,
    InvalidValueError,
    OutOfRangeError,
    PSUnavailableError,
    UnavailableError,
)
from distributary.options import RecoveryOptions
from tests.servers.jobs import CountingJob
from tests.servers.message_faults import duplicate, lose_reply, lose_request

_SECONDS = 60.0  # more than anything takes


@pytest.fixture
def new_job():
    """A function that makes jobs, which are ended after the test."""
    threads_before = set(threading.enumerate())
    with contextlib.ExitStack() as stack:

        def new(workers=2, cluster=None, **options):
            cluster = cluster or local_cluster(workers, ps=2)
            stack.callback(cluster.close)
            job = CountingJob(cluster, **options)
            stack.callback(job.close)
            return job

        yield new
    deadline = time.monotonic() + _SECONDS
    while left := set(threading.enumerate()) - threads_before:
        assert time.monotonic() < deadline, left
        for thread in left:
            if thread.is_alive():  # else it is about to be started, and cannot be joined yet
                thread.join(_SECONDS)


def _every_third(kinds, fault):
    """A fault of every third message of some kinds."""
    numbers = itertools.count()

    def act(source, target, message, deliver):
        if message.kind in kinds and next(numbers) % 3 == 0:
            return fault(message, deliver)
        return deliver(message)

    return act


@pytest.mark.parametrize("fault", [lose_request, lose_reply, duplicate])
def test_messages_are_lost_and_doubled(fault, new_job):
    job = new_job()

    for kinds in (("assign", "create"), ("update", "finish"), ("push", "read"), ("run",)):
        job.cluster.fault = _every_third(kinds, fault)
        for counter in job.counters:
            for _ in range(9):
                counter.assign_add(1)
        job.run(30)
        with job.strategy.scope():
            assert dist.Variable(3).numpy() == 3

    assert job.counts() == [4 * 39] * 2


def test_servers_forget_closures_that_have_ended(new_job):
    job = new_job()
    job.run(5000)

    for server in ("ps 0", "ps 1"):
        assert len(job.cluster._services[server]._current._applied) < 1000
    assert job.counts() == [5000, 5000]


def test_workers_come_back_with_all_that_they_need(new_job):
    job = new_job()
    started = []

    def batches():
        started.append(threading.current_thread().name)
        return ((np.full(size, 1, np.float32),) for size in itertools.cycle((2, 3)))

    dataset = job.coordinator.create_per_worker_dataset(batches)
    iter(dataset)  # is not used
    iterator = iter(dataset)
    ten = job.coordinator.create_per_worker_value(lambda: np.float32(10))

    def step(iterator, ten):
        (batch,) = next(iterator)
        job.step(0)
        return ten * batch.sum()

    def run():
        values = [job.coordinator.schedule(step, args=(iterator, ten)) for _ in range(20)]
        job.coordinator.join()
        assert {float(value.fetch()) for value in values} <= {20.0, 30.0}

    run()
    for round_number in range(3):
        for name in ("worker 0", "worker 1"):
            job.cluster.kill(name)
            job.cluster.restart(name)
        run()
        assert job.counts() == [20 * (round_number + 2)] * 2
    assert 4 <= len(started) <= 8  # once for each worker that has been there


def test_a_closure_that_ends_its_workers_is_an_error(new_job):
    job = new_job()
    job.run(1)
    killed, all_scheduled = [], threading.Event()

    def fault(source, target, message, deliver):
        if message.kind == "run" and 20 in map(int, message.arrays):
            all_scheduled.wait()  # or `schedule` raises the error
            killed.append(target)
            job.cluster.kill(target)
            job.cluster.restart(target)
            raise ConnectionError
        return deliver(message)

    job.cluster.fault = fault
    values = job.schedule(100)
    all_scheduled.set()
    with pytest.raises(UnavailableError) as caught:
        job.coordinator.join()

    assert str(caught.value).startswith(
        f"Closure 20, a call of CountingJob.step, was running on {', '.join(killed)} when"
    )
    assert len(killed) == 3
    with pytest.raises(UnavailableError, match="Closure 20"):
        values[19].fetch()
    num_ended = 0
    for value in values:
        with contextlib.suppress(CancelledError, UnavailableError):
            value.fetch()
            num_ended += 1
    assert job.counts() == [num_ended + 1] * 2
    job.run(10)
    assert job.counts() == [num_ended + 11] * 2


def test_no_worker_is_an_error_and_one_that_comes_back_works(new_job):
    job = new_job(no_worker_timeout_seconds=0.2)
    job.run(1)
    for name in ("worker 0", "worker 1"):
        job.cluster.kill(name)
    (value,) = job.schedule(1)
    with pytest.raises(UnavailableError, match=r"No worker .* worker 0: .* worker 1: Nothing lis"):
        job.coordinator.join()
    with pytest.raises(CancelledError, match="No worker has been reached"):
        value.fetch()

    job.cluster.restart("worker 1")
    job.wait_for_workers(1)
    job.run(5)

    assert job.counts() == [6, 6]


def test_workers_that_stay_away_are_given_up(new_job):
    job = new_job(no_worker_timeout_seconds=0.1, worker_timeout_seconds=0.1)
    job.run(1)
    for name in ("worker 0", "worker 1"):
        job.cluster.kill(name)
    assert job.coordinator._queue.closed.wait(_SECONDS)

    for _ in range(2):
        with pytest.raises(UnavailableError, match="No worker has been reached"):
            job.schedule(1)


def test_a_server_that_was_restarted_is_named_and_another_strategy_goes_on(new_job):
    job = new_job()
    job.run(5)
    saved = job.counts()
    values = job.schedule(1000)
    job.cluster.kill("ps 1")
    job.cluster.restart("ps 1")
    with pytest.raises(PSUnavailableError, match=r"ps 1 (cannot be reached|was star).* restore"):
        job.coordinator.join()
    for call in (job.coordinator.join, job.coordinator.done, lambda: job.schedule(1)):
        with pytest.raises(PSUnavailableError, match="ps 1"):
            call()
    with pytest.raises((CancelledError, PSUnavailableError)):
        values[-1].fetch()
    with pytest.raises(PSUnavailableError, match="ps 1"):
        job.counters[1].numpy()

    other = new_job(cluster=job.cluster)
    for counter, value in zip(other.counters, saved, strict=True):
        counter.assign(value)
    other.run(5)

    assert other.counts() == [10, 10]


def test_large_arguments_and_results_travel_one_by_one(new_job):
    job = new_job(workers=1)
    sizes = []

    def look(source, target, message, deliver):
        reply = deliver(message)
        if message.kind == "run":
            sizes.append((len(message.arrays), len(reply.arrays)))
        return reply

    def fill(x):
        return jnp.full(1 << 22, x)  # 16 MiB

    job.cluster.fault = look
    values = [job.coordinator.schedule(fill, args=(np.float32(i),)) for i in range(4)]
    assert [value.fetch()[0] for value in values] == [0, 1, 2, 3]
    assert {num_results for _, num_results in sizes} == {1}
    sizes.clear()
    for value in values:
        job.coordinator.schedule(jnp.sum, args=(value.fetch(),))
    job.coordinator.join()
    assert max(num_arguments for num_arguments, _ in sizes) <= 2


def test_a_worker_that_alone_cannot_reach_a_server_leaves_the_work_to_others(new_job):
    job = new_job()
    job.run(4)
    tried = threading.Event()

    def cut_off(source, target, message, deliver):
        if (source, target) == ("worker 0", "ps 1"):
            tried.set()
            raise ConnectionError
        return deliver(message)

    job.cluster.fault = cut_off
    while not tried.is_set():
        job.run(2)
    job.run(20)
    counts = job.counts()
    job.cluster.fault = None
    job.run(2)

    assert counts == [job.num_scheduled - 2] * 2


def test_a_server_without_signs_of_life_is_lost(new_job):
    job = new_job(heartbeat_seconds=0.5)
    job.run(1)
    go_on = threading.Event()

    def hold(source, target, message, deliver):
        if message.kind == "alive" and target == "ps 0":
            go_on.wait(_SECONDS)
        return deliver(message)

    job.cluster.fault = hold
    assert job.coordinator._queue.closed.wait(_SECONDS)
    go_on.set()
    with pytest.raises(PSUnavailableError, match=r"ps 0 has given no sign of life for 1\.5 s"):
        job.schedule(1)


def test_a_second_coordinator_takes_over(new_job):
    first = new_job()
    first.run(5)
    values = first.schedule(1000)
    second = new_job(cluster=first.cluster)

    second.run(50)

    with pytest.raises(CoordinatorReplacedError, match=r"(ps|worker) \d works for another coord"):
        first.coordinator.join()
    with pytest.raises(CoordinatorReplacedError, match="ps 0 works for another coordinator"):
        first.counters[0].assign_add(1)
    with pytest.raises(CoordinatorReplacedError):
        first.schedule(1)
    with pytest.raises(CancelledError, match="works for another coordinator"):
        values[-1].fetch()
    assert second.counts() == [50, 50]


class _Freeze:
    """Holds back all messages of a worker from its next push on, until `thaw`."""

    def __init__(self, cluster, servers):
        self.frozen, self.thawed = threading.Event(), threading.Event()
        self.pushed = threading.Semaphore(0)
        self._servers = servers
        self._lock = threading.Lock()
        self._worker = None
        cluster.fault = self

    def __call__(self, source, target, message, deliver):
        is_push = message.kind == "push" and target in self._servers
        with self._lock:
            if is_push and self._worker is None:
                self._worker = source
                self.frozen.set()
        if self._worker not in (source, target) or not (is_push or target == self._worker):
            return deliver(message)
        self.thawed.wait(_SECONDS)
        try:
            return deliver(message)
        finally:
            if is_push:
                self.pushed.release()


def test_what_a_frozen_worker_pushes_when_it_goes_on_is_refused(new_job):
    job = new_job(heartbeat_seconds=0.5)
    job.run(4)
    freeze = _Freeze(job.cluster, ["ps 1"])  # ps 0 has its push
    job.run(100)
    assert freeze.frozen.is_set()
    assert job.counts() == [104, 104]

    freeze.thawed.set()
    assert freeze.pushed.acquire(timeout=_SECONDS)
    job.run(50)

    assert job.counts() == [154, 154]


def test_what_was_cancelled_is_not_applied_when_its_worker_goes_on(new_job):
    job = new_job(heartbeat_seconds=0.5)
    job.run(1)
    freeze = _Freeze(job.cluster, ["ps 0", "ps 1"])
    one = iter(job.coordinator.create_per_worker_dataset(lambda: [np.float32(1)]))
    (value,) = job.schedule(1)
    assert freeze.frozen.wait(_SECONDS)
    for _ in range(2):
        job.coordinator.schedule(lambda it: next(it), args=(one,))
    with pytest.raises(OutOfRangeError):
        job.coordinator.join()
    with pytest.raises(CancelledError):
        value.fetch()

    freeze.thawed.set()
    for _ in range(2):
        assert freeze.pushed.acquire(timeout=_SECONDS)
    assert job.counts() == [1, 1]
    job.run(10)
    assert job.counts() == [11, 11]


def test_fit_applies_each_gradient_once_although_workers_are_lost():
    cluster = local_cluster(2, 2)
    strategy = ParameterServerStrategy(cluster)
    x = np.ones((320, 1), np.float32)
    with strategy.scope():
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((1,)), layer])
        model.compile(keras.optimizers.SGD(1.0), lambda y, p: -p)  # of which the gradient is -1

    class Kill(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch % 10 in (3, 6):
                (cluster.kill if batch % 10 == 3 else cluster.restart)("worker 0")

    model.fit(x, x, batch_size=8, epochs=2, verbose=0, callbacks=[Kill()])

    found = ClusterCoordinator(strategy).statistics()
    assert float(layer.kernel.numpy()[0, 0]) == 80
    assert found.workers[0].num_losses > 0
    strategy._cluster.close()
    cluster.close()


@pytest.mark.parametrize("name", ["heartbeat_seconds", "max_closure_losses"])
def test_options_that_cannot_be(name):
    with pytest.raises(InvalidValueError, match=f"{name} is 0, expected more than 0"):
        RecoveryOptions(**{name: 0})


def test_threads_end_with_the_coordinator_and_the_cluster():
    threads_before = set(threading.enumerate())
    job = CountingJob(local_cluster(2, 2))
    job.run(5)
    threads = set(threading.enumerate()) - threads_before
    of_coordinator = {
        thread
        for thread in threads
        if thread.name in ("distributary-driver", "distributary heartbeat")
    }
    cluster = job.cluster
    del job
    gc.collect()

    assert len(of_coordinator) == 2 + 4
    _wait_for_end(of_coordinator)
    _wait_for_end(thread for thread in threads if "link to worker" in thread.name)
    _wait_for_end(t for t in threading.enumerate() if t.name == "distributary-close")
    assert any(thread.is_alive() for thread in threads)
    del cluster
    gc.collect()
    _wait_for_end(threads)


def _wait_for_end(threads):
    end = time.monotonic() + _SECONDS
    for thread in threads:
        while thread.is_alive() and time.monotonic() < end:
            gc.collect()  # what other threads have held until they ended is garbage only now
            thread.join(0.1)
        assert not thread.is_alive(), thread.name
