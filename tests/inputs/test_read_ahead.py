"""Batches made ahead of the step: bounds, errors, threads, positions, waiting."""

import gc
import itertools
import pickle
import threading
import traceback
import warnings

import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist
from distributary.data import Dataset, TensorSpec
from distributary.errors import DistributaryWarning, OutOfRangeError
from distributary.strategies import PerReplicaSpec

_WAIT_SECONDS = 30.0


def _threads():
    return [t for t in threading.enumerate() if t.name == "distributary-prefetch"]


def _wait_until_gone():
    gc.collect()
    for thread in _threads():
        thread.join(_WAIT_SECONDS)
    assert _threads() == []


def _depth(depth, **kwargs):
    return dist.InputOptions(experimental_per_replica_buffer_size=depth, **kwargs)


class _Source:
    """Batches that are counted as they are made."""

    def __init__(self, num_batches=1000):
        self.made = 0
        self.changed = threading.Condition()
        self._num_batches = num_batches

    def __iter__(self):
        for i in range(self._num_batches):
            with self.changed:
                self.made += 1
                self.changed.notify_all()
            yield np.full(4, i)

    def wait_for(self, made):
        with self.changed:
            return self.changed.wait_for(lambda: self.made >= made, _WAIT_SECONDS)


@pytest.mark.parametrize("depth", [1, 5])
def test_as_many_batches_are_made_ahead_as_the_options_say(depth, strategy_of):
    source = _Source()
    iterator = iter(strategy_of(2).experimental_distribute_dataset(source, _depth(depth)))

    assert source.made == 0  # nothing before somebody wants a batch
    next(iterator)
    # One is handed out, `depth` wait, and one is made, which then finds no place.
    assert source.wait_for(2 + depth)
    _threads()[0].join(0.05)
    assert source.made == 2 + depth
    del iterator
    _wait_until_gone()


def test_depth_0_makes_a_batch_when_it_is_asked_for(strategy_of):
    source = _Source()
    iterator = iter(strategy_of(2).experimental_distribute_dataset(source, _depth(0)))

    for count in (1, 2, 3):
        next(iterator)
        assert source.made == count
    assert _threads() == []


def test_prefetch_of_the_dataset_is_the_depth(strategy_of):
    source = _Source()
    dataset = Dataset.from_source(source).prefetch(4)
    iterator = iter(strategy_of(2).experimental_distribute_dataset(dataset))

    next(iterator)
    assert source.wait_for(6)
    assert len(_threads()) == 1
    iterator.close()
    assert source.made <= 7
    assert list(iterator) == []


def test_threads_end_with_the_loop_that_needed_them(strategy_of):
    strategy = strategy_of(2)
    dataset = strategy.experimental_distribute_dataset(_Source())

    for _ in itertools.islice(dataset, 3):
        pass
    _wait_until_gone()
    with pytest.raises(KeyboardInterrupt):
        for _ in dataset:
            raise KeyboardInterrupt
    _wait_until_gone()
    assert len(list(strategy.experimental_distribute_dataset(_Source(5)))) == 5
    _wait_until_gone()


def _broken_source():
    yield np.zeros(2)
    raise ZeroDivisionError("in the source")


@pytest.mark.parametrize("depth", [0, 3])
def test_an_error_comes_with_the_traceback_of_its_source(depth, strategy_of):
    dataset = Dataset.from_generator(_broken_source)
    iterator = iter(strategy_of(2).experimental_distribute_dataset(dataset, _depth(depth)))
    next(iterator)

    with pytest.raises(ZeroDivisionError, match="in the source") as error:
        next(iterator)
    assert "_broken_source" in [f.name for f in traceback.extract_tb(error.value.__traceback__)]
    if depth:
        with pytest.raises(ZeroDivisionError):  # not an early end that nobody notices
            next(iterator)


def test_a_generator_loses_nothing_when_a_loop_over_it_stops(strategy_of):
    batches = (np.full(2, i) for i in range(6))
    dataset = strategy_of(2).experimental_distribute_dataset(batches, _depth(3))

    first = [int(x.values[0][0]) for x in itertools.islice(dataset, 2)]
    with pytest.warns(DistributaryWarning, match="continues where it stopped"):
        rest = [int(x.values[0][0]) for x in dataset]
    assert (first, rest) == ([0, 1], [2, 3, 4, 5])


@pytest.mark.parametrize("num_replicas", [1, 4])
def test_a_position_gives_the_same_rest_with_any_depth(num_replicas, strategy_of):
    def dataset_with(depth):
        dataset = Dataset.range(50).shuffle(50, seed=1).repeat(2).batch(7)
        return strategy_of(num_replicas).experimental_distribute_dataset(dataset, _depth(depth))

    values = lambda it: [np.concatenate([np.asarray(p) for p in _parts(x)]).tolist() for x in it]
    before = dataset_with(3)
    iterator = iter(before)
    for _ in range(4):
        next(iterator)
    state = pickle.loads(pickle.dumps(iterator.get_state()))
    rest, following = values(iterator), values(before)
    for depth in (0, 1, 5):
        after = dataset_with(depth)
        restored = iter(after)
        restored.set_state(state)
        assert values(restored) == rest
        assert values(after) == following


def _parts(value):
    return value.values if isinstance(value, dist.PerReplica) else (value,)


def test_a_position_inside_a_loop_is_that_of_the_loop_and_not_of_the_thread(strategy_of):
    source = _Source()
    dataset = strategy_of(2).experimental_distribute_dataset(source, _depth(5))
    iterator = iter(dataset)

    next(iterator)
    assert source.wait_for(6)
    assert iterator.get_state()["position"] == 1
    iterator.set_state(iterator.get_state())
    assert int(next(iterator).values[0][0]) == 1


def test_elements_of_a_function_have_positions_too(strategy_of):
    make = lambda: strategy_of(2).distribute_datasets_from_function(
        lambda context: Dataset.range(20).batch(context.get_per_replica_batch_size(4))
    )
    iterator = iter(make())
    next(iterator)
    again = iter(make())
    again.set_state(iterator.get_state())

    assert next(again).values[1].tolist() == next(iterator).values[1].tolist() == [6, 7]


def test_batches_can_stay_on_the_host(strategy_of):
    options = dist.InputOptions(experimental_fetch_to_device=False)
    for num_replicas in (1, 2):
        strategy = strategy_of(num_replicas)
        dataset = strategy.experimental_distribute_dataset([np.arange(5)], options)

        (batch,) = dataset
        parts = _parts(batch)
        assert all(type(part) is np.ndarray for part in parts)
        assert np.concatenate(parts).tolist() == [0, 1, 2, 3, 4]
        total = strategy.run(lambda x: jnp.sum(x), (batch,))
        assert float(strategy.reduce("SUM", total, None)) == 10


def test_the_end_and_optionals(strategy_of):
    iterator = iter(strategy_of(2).experimental_distribute_dataset([np.arange(2)]))

    assert iterator.get_next_as_optional().get_value().values[1].tolist() == [1]
    assert not iterator.get_next_as_optional().has_value()
    with pytest.raises(OutOfRangeError):
        iterator.get_next()
    with pytest.raises(StopIteration):
        iterator.next()


def test_element_spec_of_parts(strategy_of):
    strategy = strategy_of(2)
    rows = Dataset.from_tensor_slices(np.zeros((10, 3), np.float32))

    uneven = strategy.experimental_distribute_dataset(rows.batch(4))
    assert uneven.element_spec == PerReplicaSpec((TensorSpec((None, 3)),) * 2)
    even = strategy.experimental_distribute_dataset(rows.batch(4, drop_remainder=True))
    assert even.element_spec == PerReplicaSpec((TensorSpec((2, 3)),) * 2)
    assert iter(even).element_spec == even.element_spec
    one = strategy_of(1).experimental_distribute_dataset(rows.batch(4))
    assert one.element_spec == TensorSpec((None, 3))
    function = strategy.distribute_datasets_from_function(lambda _: rows.batch(2, True))
    assert function.element_spec == PerReplicaSpec((TensorSpec((2, 3)),) * 2)
    assert (uneven.cardinality, even.cardinality, function.cardinality) == (3, 2, 3)
    assert int(uneven.reduce(0, lambda n, x: n + len(_parts(x)))) == 6


def test_datasets_of_single_examples_are_refused(strategy_of):
    strategy = strategy_of(2)
    rows = Dataset.from_tensor_slices(np.zeros((10, 4)))

    for dataset in (rows, rows.shuffle(3).repeat(), rows.map(lambda x: x), rows.batch(2).unbatch()):
        with pytest.raises(ValueError, match=r"single examples.*\.batch\(global_batch_size\)"):
            strategy.experimental_distribute_dataset(dataset)
    assert len(list(strategy.experimental_distribute_dataset(rows.batch(5)))) == 2


def test_a_loader_that_calls_into_jax_on_many_devices_does_not_deadlock(strategy_of):
    strategy = strategy_of(8)
    scale = jnp.float32(2)

    def load(x):
        return np.asarray(jnp.sin(x) * scale)

    dataset = Dataset.range(800).map(np.float32).batch(8).map(load)
    step = lambda x: dist.get_replica_context().all_reduce("SUM", jnp.sum(x))

    for batch in strategy.experimental_distribute_dataset(dataset, _depth(3)):
        total = strategy.run(step, (batch,))
    assert np.isfinite(float(strategy.experimental_local_results(total)[0]))


class _Slow:
    """Batches that come only after the step before them has finished, and a while later."""

    def __init__(self, seconds):
        self._seconds = seconds
        self._never = threading.Event()

    def __iter__(self):
        while True:
            self._never.wait(self._seconds)
            yield np.zeros((2, 4), np.float32)


def test_waiting_for_data_is_counted_and_warned_about_once(strategy_of):
    strategy = strategy_of(2)
    slow = strategy.experimental_distribute_dataset(_Slow(0.04))
    step = lambda x: jnp.sum(x)

    def train(num_steps):
        for batch in itertools.islice(slow, num_steps):
            strategy.run(step, (batch,))

    with pytest.warns(DistributaryWarning, match=r"wait for data \d+% of the time") as caught:
        train(30)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    statistics = strategy.step_statistics
    assert 20 < statistics.num_steps < 30
    assert 0.5 < statistics.input_wait_share <= 1
    assert statistics.input_wait_seconds <= statistics.seconds
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(20)


def test_looking_through_data_without_training_counts_nothing(strategy_of):
    strategy = strategy_of(2)

    for _ in itertools.islice(strategy.experimental_distribute_dataset(_Slow(0.03)), 25):
        pass

    assert strategy.step_statistics.num_steps == 0
