"""Generators and functions may write their next result into the array of the last one."""

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


def _generated():
    return dist.data.Dataset.from_generator(_numbers, output_signature=_SPEC)


class _Iterable:
    def __iter__(self):
        return _numbers()


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
        lambda: dist.data.Dataset.from_generator(_numbers),
        lambda: dist.data.Dataset.from_generator(_nests).map(lambda nest: nest["x"][0]),
        lambda: dist.data.Dataset.from_source(_Iterable()),
        lambda: dist.data.Dataset.from_source(_numbers()),
        lambda: dist.data.Dataset.from_source(_Sequence()),
        lambda: dist.data.Dataset.from_source(_Sequence()).map(lambda x: x),
        lambda: _generated().prefetch(3),
        lambda: _generated().shuffle(1),
        lambda: _generated().cache(),
        lambda: _generated().map(lambda x: x),
        lambda: _generated().map(lambda x: x[:]),
        lambda: _generated().filter(lambda x: True),
        lambda: _mapped(lambda x: x),
        lambda: _mapped(lambda x: x[:]),
        lambda: _mapped(lambda x: (x, x)).map(lambda x, y: y),
        lambda: _mapped(lambda x: {"x": [x], "y": x}).map(lambda nest: nest["y"]),
        lambda: _mapped(lambda x: x, num_parallel_calls=1),
    ],
)
def test_elements_keep_their_content(dataset):
    elements = list(dataset())
    batches = list(dataset().batch(4))

    np.testing.assert_array_equal(np.ravel(elements), range(6))
    np.testing.assert_array_equal(np.concatenate([np.ravel(b) for b in batches]), range(6))


def test_new_arrays_and_those_that_a_function_was_given_are_not_copied():
    made = []

    def double(x):
        made.append(id(new := x * 2))
        return new, x

    given = np.ones((3, 2))
    (first, second), *_ = dist.data.Dataset.from_tensors(given).map(double)

    assert id(first) == made[0]
    assert np.shares_memory(second, given)


def test_replicas_receive_different_elements(strategy_of):
    strategy = strategy_of(2)

    values = list(strategy.distribute_datasets_from_function(lambda context: _generated()))

    gathered = [np.asarray(strategy.gather(value, axis=0)).tolist() for value in values]
    assert gathered == [[0, 1], [2, 3], [4, 5]]


def test_an_iterator_that_is_read_ahead_keeps_its_elements(strategy_of):
    strategy = strategy_of(1)

    values = list(strategy.experimental_distribute_dataset(_numbers()))

    assert [float(np.asarray(value)[0]) for value in values] == list(range(6))
