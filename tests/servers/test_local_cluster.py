"""Closures on the workers of a cluster in this process."""

import collections
import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist
from distributary.coordinator import (
    ClusterCoordinator,
    ParameterServerStrategy,
    PerWorkerValues,
    experimental_get_current_worker_index,
    local_cluster,
)
from distributary.data import Dataset
from distributary.errors import (
    CancelledError,
    ContextError,
    DistributaryWarning,
    InvalidTypeError,
    InvalidValueError,
    OutOfRangeError,
    UnsupportedError,
)

RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, 3)).astype(np.float32)


def _coordinated(workers, ps):
    strategy = ParameterServerStrategy(local_cluster(workers, ps))
    return strategy, ClusterCoordinator(strategy)


def test_results_belong_to_the_shapes_of_their_own_batch():
    """A worker's result comes when another worker has needed the program for other shapes."""
    local = local_cluster(2, 1)
    coordinator = ClusterCoordinator(ParameterServerStrategy(local))
    batches = iter(Dataset.from_tensor_slices(np.arange(3.0)).batch(2))
    num_plans = collections.Counter()
    has_run, is_traced_again = threading.Event(), threading.Event()

    def fault(source, target, message, deliver):
        reply = deliver(message)
        num_plans[target] += message.kind == "plan"
        if num_plans[target] == 2:
            is_traced_again.set()
        elif message.kind == "run" and not has_run.is_set():
            has_run.set()
            is_traced_again.wait(60)
        return reply

    def count(iterator):
        batch = next(iterator)
        return batch.sum(), batch.size

    local.fault = fault
    one = coordinator.schedule(count, args=(batches,))
    has_run.wait(60)
    other = coordinator.schedule(count, args=(batches,))
    coordinator.join()

    assert [tuple(map(float, value.fetch())) for value in (one, other)] == [(1, 2), (2, 1)]


def test_an_iterator_of_the_coordinator_gives_each_closure_its_next_batch():
    strategy, coordinator = _coordinated(2, 1)
    with strategy.scope():
        total = dist.Variable(0.0)
    rows = np.arange(1.0, 12.0, dtype=np.float32)
    captured = iter(Dataset.from_tensor_slices(rows).batch(2))

    def add(iterator):
        batch = next(iterator)
        total.assign_add(jnp.sum(batch))
        return jnp.sum(batch), batch.size

    for closure, iterator in [
        (add, iter(Dataset.from_tensor_slices(rows).batch(2))),
        (dist.function(add), iter(Dataset.from_tensor_slices(rows).batch(2))),
        (lambda: add(captured), None),
    ]:
        total.assign(0.0)
        args = () if iterator is None else (iterator,)
        values = [coordinator.schedule(closure, args=args) for _ in range(6)]
        coordinator.join()
        sums = sorted(tuple(map(float, value)) for value in coordinator.fetch(values))
        assert sums == [(3, 2), (7, 2), (11, 1), (11, 2), (15, 2), (19, 2)]
        assert total.numpy() == 66
        with pytest.raises(OutOfRangeError, match="has ended"):
            for _ in range(2):
                coordinator.schedule(closure, args=args)
            coordinator.join()


def test_a_compiled_function_distributes_the_dataset_of_the_workers():
    strategy, coordinator = _coordinated(2, 1)

    def batches(context):
        return Dataset.from_tensor_slices(X).repeat().batch(context.get_per_replica_batch_size(4))

    @dist.function
    def from_function():
        return strategy.distribute_datasets_from_function(batches)

    @dist.function
    def distributed():
        return strategy.experimental_distribute_dataset(batches(dist.InputContext()))

    @dist.function
    def plain():
        return batches(dist.InputContext())

    for dataset_fn in (from_function, distributed, plain):
        iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
        value = coordinator.schedule(lambda it: strategy.run(lambda x: x, (next(it),)), (iterator,))
        np.testing.assert_array_equal(value.fetch(), X[:4])


def test_what_closures_have_not_taken_of_an_iterator_is_there_for_others():
    _, coordinator = _coordinated(1, 1)
    iterator = iter(Dataset.range(1, 4))

    assert coordinator.schedule(next, args=(iterator,)).fetch() == 1
    assert next(iterator) == 2
    assert coordinator.schedule(next, args=(iterator,)).fetch() == 3
    reference = weakref.ref(iterator)
    del iterator
    coordinator.join()
    gc.collect()
    assert reference() is None


def test_arrays_may_be_written_to_when_they_have_been_given_away():
    _, coordinator = _coordinated(1, 1)
    memory = np.zeros(1 << 16, np.uint8)
    start = -memory.ctypes.data % 64  # XLA uses what is aligned without a copy
    buffer = memory[start : start + 4096].view(np.float32)

    def batches():
        for i in range(20):
            buffer[:] = i
            yield buffer

    iterator = iter(coordinator.create_per_worker_dataset(batches))
    values = [coordinator.schedule(next, args=(iterator,)) for _ in range(20)]
    assert [set(value) for value in coordinator.fetch(values)] == [{i} for i in range(20)]

    def given(x):
        return x

    values = []
    for i in range(20):
        buffer[:] = i
        values.append(coordinator.schedule(given, args=(buffer,)))
    assert [set(value) for value in coordinator.fetch(values)] == [{i} for i in range(20)]


def test_captured_arrays_are_those_of_the_first_trace_on_all_workers():
    _, coordinator = _coordinated(2, 1)
    captured = np.ones(64, np.float32)
    closure = lambda: jnp.sum(captured)

    assert coordinator.schedule(closure).fetch() == 64
    captured[:] = 2
    values = coordinator.fetch([coordinator.schedule(closure) for _ in range(20)])
    assert {float(value) for value in values} == {64}


def test_what_cannot_travel_to_a_worker_is_named():
    _, coordinator = _coordinated(1, 1)
    dataset = Dataset.range(1, 4)
    iterator = iter(coordinator.create_per_worker_dataset(lambda: [1.0, 2.0]))
    words = iter(coordinator.create_per_worker_dataset(lambda: [np.array(["a"])]))

    def prints():
        jax.debug.print("{}", jnp.zeros(1))

    for fn, args, kind, message in [
        (lambda x: x, np.ones(2), InvalidTypeError, r"args is a ndarray.*args=\(x,\)"),
        (lambda key: key, (jax.random.key(0),), InvalidTypeError, "key_data"),
        (next, (words,), InvalidTypeError, "array of dtype <U1"),
        (lambda batches: list(batches), (iterator,), ContextError, "loops over the iterator"),
        (sum, (iter(dataset),), ContextError, "loops over the iterator"),
        (lambda: sum(dataset), (), ContextError, r"iterates over .*range.*Pass iter\(dataset\)"),
        (lambda: PerWorkerValues([1]), (), InvalidTypeError, r"got \[1\]\. Use .* create_per_wor"),
        (prints, (), UnsupportedError, "calls back into Python.*fetch them"),
    ]:
        with pytest.raises(kind, match=message):
            coordinator.schedule(fn, args=args)
    assert coordinator.schedule(lambda batches: next(batches), args=(iterator,)).fetch() == 1


def test_the_first_error_is_raised_once():
    strategy, coordinator = _coordinated(2, 1)
    with strategy.scope():
        count = dist.Variable(0)
    iterator = iter(coordinator.create_per_worker_dataset(lambda: [1.0, 2.0]))

    def closure(iterator):
        count.assign_add(1)
        return next(iterator)

    values = [coordinator.schedule(closure, args=(iterator,)) for _ in range(4)]
    with pytest.raises(OutOfRangeError, match="has ended"):
        for _ in range(1000):
            values.append(coordinator.schedule(closure, args=(iterator,)))
        coordinator.join()
    coordinator.join()
    errors = []
    for value in values:
        try:
            value.get()
        except (OutOfRangeError, CancelledError) as error:
            errors.append(type(error))
    assert 2 <= count.numpy() == len(values) - len(errors) <= 4
    assert OutOfRangeError in errors


def test_variables_are_read_and_assigned_from_outside():
    strategy, _ = _coordinated(1, 2)
    with strategy.scope():
        v = dist.Variable([1.0, 2.0], name="v")
        u = dist.Variable(0.0)
    assert v.device == "/job:ps/replica:0/task:0/device:CPU:0"
    assert u.device == "/job:ps/replica:0/task:1/device:CPU:0"
    assert repr(strategy.cluster_resolver).startswith("local_cluster")
    v.assign_add([1.0, 1.0])
    np.testing.assert_array_equal(v, [2, 3])
    v.assign(v * 2)
    np.testing.assert_array_equal(v.numpy(), [4, 6])
    assert jnp.asarray(v).dtype == jnp.float32
    assert isinstance(v.value(), jax.Array)


def test_workers_that_do_not_know_the_same_are_named():
    tasks = local_cluster(2, 1)
    coordinator = ClusterCoordinator(ParameterServerStrategy(tasks))
    told = []

    def know_once(source, target, message, deliver):
        if message.kind == "source":
            told.append(target)
            if len(told) == 2:
                return type(message)("unknown maker", {"why": "a worker has no function f"})
        return deliver(message)

    tasks.fault = know_once
    iterator = iter(coordinator.create_per_worker_dataset(lambda: [1.0] * 10_000))

    with pytest.raises(InvalidValueError, match=r"worker \d cannot .*has no function f\. Run"):
        for _ in range(100):
            for _ in range(40):
                coordinator.schedule(next, args=(iterator,))
            coordinator.join()
    assert len(set(told)) == 2


def test_a_worker_has_values_of_its_own():
    strategy, coordinator = _coordinated(2, 1)
    with strategy.scope():
        total = dist.Variable(np.zeros(2, np.float32))
    numbers = iter([1.0, 10.0])
    values = coordinator.create_per_worker_value(lambda: np.full(2, next(numbers), np.float32))

    def closure(value):
        total.assign_add(value)
        return value[0], experimental_get_current_worker_index()

    results = [coordinator.schedule(closure, args=(values,)) for _ in range(20)]
    coordinator.join()
    found = [(float(number), int(index)) for number, index in coordinator.fetch(results)]
    assert {number for number, _ in found} <= {1.0, 10.0}
    # Whichever worker has made its value first.
    assert len({number for number, _ in found}) == len({i for _, i in found}) == len(set(found))
    np.testing.assert_array_equal(total, [sum(number for number, _ in found)] * 2)
    with pytest.raises(ContextError, match="outside of a scheduled function"):
        experimental_get_current_worker_index()


def test_a_cluster_ends_with_its_coordinators():
    with local_cluster(1, 1) as tasks:
        coordinator = ClusterCoordinator(ParameterServerStrategy(tasks))
        assert coordinator.schedule(lambda: jnp.int32(3)).fetch() == 3

    with pytest.raises(CancelledError, match="The coordinator was closed"):
        coordinator.schedule(lambda: jnp.int32(3))


def test_data_is_that_of_the_trace_that_counts():
    _, coordinator = _coordinated(1, 1)
    samples, batches = (
        iter(coordinator.create_per_worker_dataset(lambda start=start: _numbers(start)))
        for start in (100, 0)
    )
    sums = {}

    def step(samples, batches):
        size = batches.element_spec.shape[0]
        if size not in sums:  # in the first of two traces, as the second has the variable
            sample = next(samples)
            next(batches)
            sums[size] = dist.Variable(np.zeros(sample.shape, np.float32))
        batch = next(batches)
        sums[size].assign_add(jnp.mean(batch, keepdims=True) + jnp.zeros_like(sums[size]))
        return batch

    values = [coordinator.schedule(step, args=(samples, batches)) for _ in range(4)]

    assert [value.fetch()[0] for value in values] == [0, 1, 2, 3]
    assert [len(value.fetch()) for value in values] == [4, 4, 4, 2]
    np.testing.assert_array_equal(sums[4], [6, 6, 6, 6])


def test_data_of_every_shape_comes_from_the_same_iterators():
    _, coordinator = _coordinated(1, 1)
    batches, others = (
        iter(coordinator.create_per_worker_dataset(lambda: _numbers(0))) for _ in range(2)
    )

    def step(batches, others):
        batch = next(batches)
        return batch if len(batch) < 4 else batch + next(others)

    for number in range(3):
        assert coordinator.schedule(step, args=(batches, others)).fetch()[0] == 2 * number
    with pytest.raises(UnsupportedError, match=r"step takes 2 elements .* and 1 or others"):
        coordinator.schedule(step, args=(batches, others)).fetch()


def _numbers(start):
    for number in range(start, start + 4):
        yield np.full(2 if number == 3 else 4, number, np.float32)


def test_new_iterators_need_no_new_trace_and_go_when_they_are_not_used():
    _, coordinator = _coordinated(1, 1)
    is_open, num_traces = [], 0

    def batches():
        is_open.append(True)
        number = len(is_open)
        try:
            while True:
                yield np.full(3, number, np.float32)
        finally:
            is_open[number - 1] = False

    def step(iterator):
        nonlocal num_traces
        num_traces += 1
        return next(iterator)

    dataset = coordinator.create_per_worker_dataset(batches)
    iterator = iter(dataset)
    assert set(coordinator.schedule(step, args=(iterator,)).fetch()) == {1}
    num_told, traces_of_one = len(coordinator._workers.setup), num_traces

    for number in range(2, 6):
        other = iter(dataset)
        values = [coordinator.schedule(step, args=(i,)) for i in (iterator, other, iterator)]
        assert [set(value) for value in coordinator.fetch(values)] == [{1}, {number}, {1}]
    coordinator.join()
    del other
    last = iter(dataset)
    assert set(coordinator.schedule(step, args=(last,)).fetch()) == {6}

    assert num_traces == traces_of_one
    assert is_open == [True, False, False, False, False, True]
    assert len(coordinator._workers.setup) == num_told + 1


def test_functions_that_nobody_has_any_more_are_forgotten():
    _, coordinator = _coordinated(1, 1)

    class Model:
        def double(self, x):
            return 2 * x

    def scheduled(i):
        def add(x, number=i):
            return x + number

        model = Model()
        values = [coordinator.schedule(f, args=(np.float32(1),)) for f in (add, model.double)]
        assert coordinator.fetch(values) == [1 + i, 2]
        coordinator.join()
        return weakref.ref(add), weakref.ref(model), len(coordinator._workers.setup)

    add, model, num_told = scheduled(0)
    gc.collect()
    assert (add(), model()) == (None, None)
    assert [scheduled(i)[2] for i in (1, 2)] == [num_told, num_told]


def test_a_run_that_is_not_scheduled_is_told_once():
    strategy = ParameterServerStrategy(local_cluster(1, 1))

    def step():
        return jnp.float32(2)

    with pytest.warns(DistributaryWarning, match=r"\.run .* the coordinator computes it"):
        assert strategy.run(step) == 2
    assert strategy.run(step) == 2


def test_a_variable_that_takes_the_place_of_another_is_used():
    strategy, coordinator = _coordinated(1, 1)

    def step():
        return variable.assign_add(1.0)

    for start in (0.0, 10.0):
        with strategy.scope():
            variable = dist.Variable(start)
        coordinator.schedule(step)
        coordinator.join()
        assert variable.numpy() == start + 1
