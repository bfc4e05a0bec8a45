"""Generators and functions may write their next result into the array of the last one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist

_SPEC = dist.data.TensorSpec((1,), np.float32)


def _numbers():
    buffer = np.zeros(1, np.float32)
    for number in range(6):
        buffer[:] = number
        yield buffer


def _nests():
    nest = {"x": (np.zeros(1, np.float32),)}
    for number in range(6):
        nest["x"][0][:] = number
        yield nest


def _lists():
    for array in _numbers():
        yield [array, {"x": [array]}]


def _generated():
    return dist.data.Dataset.from_generator(_numbers, output_signature=_SPEC)


class _Iterable:
    def __iter__(self):
        return _numbers()


class _Lists:
    def __iter__(self):
        return _lists()


class _Sequence:
    def __init__(self):
        self._buffer = np.zeros(1, np.float32)

    def __len__(self):
        return 6

    def __getitem__(self, number):
        self._buffer[:] = number
        return self._buffer


def _mapped(wrap, **options):
    buffer = np.zeros(1, np.float32)

    def double(x):
        buffer[:] = 2 * x
        return wrap(buffer)

    halves = dist.data.Dataset.range(6).map(lambda x: x / 2)
    return halves.map(double, **options)


@pytest.mark.parametrize(
    "dataset",
    [
        _generated,
        lambda: dist.data.Dataset.from_generator(_nests).map(lambda nest: nest["x"][0]),
        lambda: dist.data.Dataset.from_source(_Iterable()),
        lambda: dist.data.Dataset.from_source(_numbers()),
        lambda: dist.data.Dataset.from_source(_Sequence()),
        lambda: dist.data.Dataset.from_source(_Sequence()).map(lambda x: x),
        lambda: _generated().prefetch(3),
        lambda: _generated().cache(),
        lambda: _generated().map(lambda x: x),
        lambda: _generated().filter(lambda x: True),
        lambda: _mapped(lambda x: x),
        lambda: _mapped(lambda x: x[:]),
        lambda: _mapped(lambda x: {"x": [x], "y": x}).map(lambda nest: nest["y"]),
        lambda: _mapped(lambda x: x, num_parallel_calls=1),
    ],
)
def test_elements_keep_their_content(dataset):
    elements = list(dataset())
    batches = list(dataset().batch(4))

    np.testing.assert_array_equal(np.ravel(elements), range(6))
    np.testing.assert_array_equal(np.concatenate([np.ravel(b) for b in batches]), range(6))


def test_arrays_that_a_function_was_given_are_not_copied():
    given = []

    def twice(x):
        given.append(x)
        return x * 2, x

    ((_, second),) = dist.data.Dataset.from_tensors(np.ones((3, 2))).map(twice)

    assert np.shares_memory(second, given[0])


def test_replicas_receive_different_elements(strategy_of):
    strategy = strategy_of(2)

    values = list(strategy.distribute_datasets_from_function(lambda context: _generated()))

    gathered = [np.asarray(strategy.gather(value, axis=0)).tolist() for value in values]
    assert gathered == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(("depth", "fetch"), [(0, True), (2, True), (2, False)])
@pytest.mark.parametrize("batches", [_lists, lambda: _Lists()])
def test_arrays_in_lists_are_copied(batches, depth, fetch, strategy_of):
    options = dist.InputOptions(fetch, experimental_per_replica_buffer_size=depth)
    dataset = strategy_of(1).experimental_distribute_dataset(batches(), options)

    values = [jax.tree.leaves(value) for value in dataset]

    assert [[float(x[0]) for x in leaves] for leaves in values] == [[i, i] for i in range(6)]


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_values_of_a_function_that_fills_one_array_are_copied(num_replicas, strategy_of):
    buffer = np.zeros(4096, np.float32)
    strategy = strategy_of(num_replicas)

    def value(context):
        buffer[:] = context.replica_id_in_sync_group + 1
        return {"x": [buffer]}

    values = strategy.experimental_distribute_values_from_function(value)["x"][0]
    buffer[:] = 9

    found = [set(np.unique(own)) for own in strategy.experimental_local_results(values)]
    assert found == [{number + 1} for number in range(num_replicas)]


@pytest.mark.parametrize("num_replicas", [1, 8])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_computes_with_the_content_at_the_call(num_replicas, compiled, strategy_of):
    strategy = strategy_of(num_replicas)
    with strategy.scope():
        weights = dist.Variable(jnp.eye(256) / 2)
        total = dist.Variable(0.0, aggregation=dist.VariableAggregation.ONLY_FIRST_REPLICA)

    def step(x):
        slow = weights.value()
        for _ in range(20):  # while it computes, the array changes
            slow = jnp.tanh(slow @ slow)
        total.assign_add(x.mean() + 0 * slow[0, 0])

    call = (dist.function if compiled else lambda f: f)(lambda x: strategy.run(step, args=(x,)))
    buffer = np.zeros((256, 512), np.float32)
    for number in range(8):
        buffer[:] = number
        call(buffer)
        buffer[:] = np.nan

    assert float(total.value()) == sum(range(8))
