"""Operations whose elements depend on those before them; TensorFlow 2.21 gives the same values."""

import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from distributary.data import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Dataset,
    Options,
    TensorSpec,
)
from distributary.errors import InvalidTypeError, InvalidValueError

_LISTS = [[0], [1, 2, 3, 4], [5, 6, 7], [7, 8, 9, 10, 11], [13, 14, 15, 16, 19, 20], [21, 22]]


def _lists(dataset):
    return [np.asarray(element).tolist() for element in dataset]


def _of_lengths():
    return Dataset.from_generator(
        lambda: map(np.array, _LISTS), output_signature=TensorSpec([None], np.int64)
    )


@settings(max_examples=50, deadline=None)
@given(
    total=st.integers(0, 12),
    size=st.integers(1, 4),
    shift=st.integers(1, 5),
    stride=st.integers(1, 3),
    drop=st.booleans(),
)
def test_windows(total, size, shift, stride, drop):
    dataset = Dataset.range(total).window(size, shift, stride, drop)

    starts = range(0, total, shift)
    expected = [[*range(total)][start : start + size * stride : stride] for start in starts]
    expected = [window for window in expected if len(window) == size or not drop]
    assert [_lists(window) for window in dataset] == expected
    assert dataset.cardinality() == len(expected)


def test_windows_of_nests_are_nests_of_datasets():
    pairs = Dataset.from_tensor_slices((np.arange(6), np.arange(6) * 10.0))

    windows = pairs.window(4, shift=2, drop_remainder=True)
    batches = windows.flat_map(lambda x, y: Dataset.zip((x.batch(4), y.batch(4))))

    found = [(x.tolist(), y.tolist()) for x, y in batches]
    assert found == [([0, 1, 2, 3], [0, 10, 20, 30]), ([2, 3, 4, 5], [20, 30, 40, 50])]
    (named,) = Dataset.from_tensors({"a": 1}).window(2)
    assert {key: _lists(part) for key, part in named.items()} == {"a": [1]}


def test_elements_until_a_condition_fails_and_each_only_once():
    pairs = Dataset.from_tensor_slices((np.arange(9), [1, 2, 1, 3, 9, 2, 1, 1, 1]))

    assert [int(x) for x, _ in pairs.take_while(lambda x, y: y < 5)] == [0, 1, 2, 3]
    assert _lists(Dataset.range(9).map(lambda x: x % 3).unique()) == [0, 1, 2]
    strings = Dataset.from_tensor_slices(["a", "b", "a"]).unique()
    assert [str(text) for text in strings] == ["a", "b"]
    rows = Dataset.from_tensor_slices(np.array([[1, 2], [2, 1], [1, 2]])).unique()
    assert _lists(rows) == [[1, 2], [2, 1]]


def test_a_scan_hands_on_its_state():
    states = []

    def scan(state, element):
        states.append(int(state))
        return state * 2, {"sum": state + element}

    dataset = Dataset.range(5).scan(np.int64(1), scan)

    for _ in range(2):  # every pass begins anew
        assert [int(element["sum"]) for element in dataset] == [1, 3, 6, 11, 20]
    assert states == [1, 2, 4, 8, 16] * 2
    assert dataset.cardinality() == 5
    with pytest.raises(InvalidTypeError, match=r"scan_func returned .*expected \(new_state"):
        next(iter(Dataset.range(1).scan(0, lambda state, element: element)))


def test_groups_by_key():
    pairs = Dataset.from_tensor_slices((np.arange(9), np.arange(9) * 2))

    grouped = Dataset.range(9).group_by_window(
        lambda x: x % 2, lambda key, group: group.batch(2), 2
    )
    of_pairs = pairs.group_by_window(
        lambda x, y: x // 4,
        lambda key, group: group.map(lambda x, y: (key, x, y)),
        window_size_func=lambda key: key + 1,
    )

    assert _lists(grouped) == [[0, 2], [1, 3], [4, 6], [5, 7], [8]]
    assert [tuple(map(int, e)) for e in of_pairs] == [(x // 4, x, 2 * x) for x in range(9)]
    with pytest.raises(InvalidValueError, match="window_size is None and window_size_func is None"):
        pairs.group_by_window(lambda x, y: x, lambda key, group: group)


def test_buckets_hold_elements_of_similar_length():
    padded = _of_lengths().bucket_by_sequence_length(len, [3, 5], [2, 2, 2])
    to_boundary = (
        _of_lengths()
        .filter(lambda row: len(row) < 5)
        .bucket_by_sequence_length(
            len, [3, 5], [2, 2, 2], padding_values=-1, pad_to_bucket_boundary=True
        )
    )

    long = [[7, 8, 9, 10, 11, 0], [13, 14, 15, 16, 19, 20]]
    assert _lists(padded) == [[[1, 2, 3, 4], [5, 6, 7, 0]], long, [[0, 0], [21, 22]]]
    assert _lists(to_boundary) == [[[1, 2, 3, 4], [5, 6, 7, -1]], [[0, -1], [21, 22]]]
    too_long = _of_lengths().bucket_by_sequence_length(
        len, [3, 5], [1, 1, 1], pad_to_bucket_boundary=True
    )
    with pytest.raises(InvalidValueError, match="as long as the last boundary, 5"):
        list(too_long)
    with pytest.raises(InvalidValueError, match="one more batch size than boundaries"):
        _of_lengths().bucket_by_sequence_length(len, [3, 5], [2, 2])


def test_elements_of_several_datasets_in_a_given_order():
    parts = [Dataset.range(2), Dataset.range(10, 15)]
    choices = Dataset.from_tensor_slices(np.array([0, 1, 0, 0, 1, 1, 1, 0]))

    stopped = Dataset.choose_from_datasets(parts, choices)
    skipped = Dataset.choose_from_datasets(parts, choices, stop_on_empty_dataset=False)

    assert _lists(stopped) == [0, 10, 1]
    assert _lists(skipped) == [0, 10, 1, 11, 12, 13]
    with pytest.raises(InvalidValueError, match="choice_dataset has 2, but there are 2 datasets"):
        list(Dataset.choose_from_datasets(parts, Dataset.range(3)))


def test_elements_of_several_datasets_drawn():
    endless = [Dataset.range(100).repeat(), Dataset.range(1000, 1100).repeat()]
    mixed = Dataset.sample_from_datasets(endless, weights=[9, 1], seed=1)

    drawn = _lists(mixed.take(2000))
    assert 1700 < sum(value < 1000 for value in drawn) < 1900
    # Each part keeps its own order.
    assert [v for v in drawn if v < 1000] == [
        *itertools.islice(itertools.cycle(range(100)), sum(v < 1000 for v in drawn))
    ]
    assert mixed.cardinality() == INFINITE_CARDINALITY

    both = Dataset.sample_from_datasets([Dataset.range(3), Dataset.range(10, 12)])
    assert sorted(_lists(both)) == [0, 1, 2, 10, 11]
    assert both.cardinality() == 5
    first_end = Dataset.sample_from_datasets(
        [Dataset.range(1), Dataset.range(10, 100)], [1, 0], stop_on_empty_dataset=True
    )
    assert _lists(first_end) == [0]
    assert first_end.cardinality() == UNKNOWN_CARDINALITY
    with pytest.raises(InvalidValueError, match=r"weights is .*, expected 2 numbers"):
        Dataset.sample_from_datasets(endless, [1])
    with pytest.raises(InvalidTypeError, match=r"dataset 0 is .*expected a Dataset"):
        Dataset.sample_from_datasets([[1, 2]])


@pytest.mark.parametrize(
    "make",
    [
        lambda source: source.window(3, 1).flat_map(lambda window: window.batch(3)),
        lambda source: Dataset.sample_from_datasets([source, Dataset.range(100, 130)]),
        lambda source: source.scan(0, lambda state, x: (state + 1, x + state)),
        lambda source: source.group_by_window(lambda x: x % 3, lambda k, g: g.batch(2), 2),
    ],
    ids=["windows", "sampled", "scanned", "grouped"],
)
def test_a_pass_goes_on_where_it_was_saved(make):
    dataset = make(Dataset.range(30).shuffle(10))
    list(dataset)
    iterator = iter(dataset)
    for _ in range(5):
        next(iterator)
    state = pickle.loads(pickle.dumps(iterator.get_state()))
    expected = _lists(iterator)

    restored = iter(make(Dataset.range(30).shuffle(10)))
    restored.set_state(state)

    assert _lists(restored) == expected


def test_the_only_element():
    assert int(Dataset.range(7, 8).get_single_element()) == 7
    for count, expected in ((0, "has no elements"), (2, "has more than one element")):
        with pytest.raises(InvalidValueError, match=f"range.*{expected}"):
            Dataset.range(count).get_single_element()
    assert _lists(Dataset.counter(5, -2).take(3)) == [5, 3, 1]


def test_options_without_effect_are_taken_and_others_refused():
    options = Options()
    options.experimental_deterministic = False
    options.threading.private_threadpool_size = 4
    options.experimental_optimization.apply_default_optimizations = True
    options.autotune.enabled = False

    assert _lists(Dataset.range(3).with_options(options)) == [0, 1, 2]
    with pytest.raises(AttributeError, match=r"no option 'determinism'; it has .*deterministic"):
        options.determinism = True
