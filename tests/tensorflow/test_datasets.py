"""Datasets of `tf.data`, with the elements that TensorFlow 2.21 yields."""

import itertools
import pickle

import numpy as np
import pytest

import distributary.compat.tensorflow as tf
from distributary import data
from distributary.errors import InvalidTypeError, InvalidValueError

Dataset = tf.data.Dataset
_LISTS = [[0], [1, 2, 3, 4], [5, 6, 7], [7, 8, 9, 10, 11], [13, 14, 15, 16, 19, 20], [21, 22]]


def _lists(dataset):
    return [np.asarray(element).tolist() for element in dataset]


def _of_lengths():
    return Dataset.from_generator(
        lambda: map(np.array, _LISTS), output_signature=tf.TensorSpec([None], np.int64)
    )


def test_batches_of_parsed_records(tmp_path):
    for number in range(3):
        with tf.io.TFRecordWriter(str(tmp_path / f"{number}.tfrecord"), "GZIP") as writer:
            for row in range(2):
                values = tf.train.Int64List(value=[10 * number + row])
                feature = {"x": tf.train.Feature(int64_list=values)}
                example = tf.train.Example(features=tf.train.Features(feature=feature))
                writer.write(example.SerializeToString())
    features = {
        "x": tf.io.FixedLenFeature([], tf.int64),
        "y": tf.io.FixedLenFeature([2], tf.float32, [1.0, 2.0]),
    }

    def make(**options):
        return tf.data.experimental.make_batched_features_dataset(
            str(tmp_path / "*"),
            4,
            features,
            tf.data.TFRecordDataset,
            reader_args=["GZIP"],
            **options,
        )

    (first, labels), (last, _) = make(label_key="x", num_epochs=1, shuffle=False)
    assert labels.tolist() == [0, 1, 10, 11]
    assert [*first] == ["y"]
    assert last["y"].tolist() == [[1, 2], [1, 2]]
    shuffled = np.concatenate([batch["x"] for batch in make(shuffle_seed=1).take(3)])
    assert sorted(shuffled) == sorted([0, 1, 10, 11, 20, 21] * 2)
    with pytest.raises(InvalidValueError, match="label_key is 'z'"):
        make(label_key="z")


def test_the_rest_of_experimental(tmp_path):
    experimental = tf.data.experimental
    dataset = tf.data.Dataset.from_tensor_slices({"a": np.float32([1, 2, 3])})

    padded = dataset.apply(experimental.pad_to_cardinality(5)).batch(5)
    (batch,) = padded
    assert batch["a"].numpy().tolist() == [1, 2, 3, 0, 0]
    assert batch["valid"].numpy().tolist() == [True, True, True, False, False]
    for cardinality, key in ((2, "valid"), (5, "a")):
        with pytest.raises(InvalidValueError, match="has 3 elements"):
            dataset.apply(experimental.pad_to_cardinality(cardinality, key))
    experimental.save(dataset, str(tmp_path / "saved"))
    (batch,) = experimental.load(str(tmp_path / "saved")).batch(3)
    assert batch["a"].numpy().tolist() == [1, 2, 3]
    written = dataset.apply(experimental.snapshot(str(tmp_path / "snapshot")))
    assert [float(element["a"].numpy()) for element in written] == [1, 2, 3]
    resampled = dataset.apply(experimental.rejection_resample(lambda e: int(e["a"] > 2), [0, 1.0]))
    assert [int(number.numpy()) for number, _ in resampled] == [1]


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
    assert mixed.cardinality() == tf.data.INFINITE_CARDINALITY

    both = Dataset.sample_from_datasets([Dataset.range(3), Dataset.range(10, 12)])
    assert sorted(_lists(both)) == [0, 1, 2, 10, 11]
    assert both.cardinality() == 5
    first_end = Dataset.sample_from_datasets(
        [Dataset.range(1), Dataset.range(10, 100)], [1, 0], stop_on_empty_dataset=True
    )
    assert _lists(first_end) == [0]
    assert first_end.cardinality() == tf.data.UNKNOWN_CARDINALITY
    with pytest.raises(InvalidValueError, match=r"weights is .*, expected 2 numbers"):
        Dataset.sample_from_datasets(endless, [1])
    with pytest.raises(InvalidTypeError, match=r"dataset 0 is .*expected a Dataset"):
        Dataset.sample_from_datasets([[1, 2]])


def test_the_only_element():
    assert int(Dataset.range(7, 8).get_single_element()) == 7
    for count, expected in ((0, "has no elements"), (2, "has more than one element")):
        with pytest.raises(InvalidValueError, match=f"range.*{expected}"):
            Dataset.range(count).get_single_element()
    assert _lists(Dataset.counter(5, -2).take(3)) == [5, 3, 1]


@pytest.mark.parametrize(
    "make",
    [
        lambda source: Dataset.sample_from_datasets([source, Dataset.range(100, 130)]),
        lambda source: source.scan(0, lambda state, x: (state + 1, x + state)),
        lambda source: source.group_by_window(lambda x: x % 3, lambda k, g: g.batch(2), 2),
    ],
    ids=["sampled", "scanned", "grouped"],
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


def test_classes_come_as_often_as_asked_for():
    dataset = Dataset.range(3000).map(lambda x: (x, x % 4 // 3))
    for initial in ([0.75, 0.25], None):
        found = dataset.rejection_resample(lambda x, y: y, [0.2, 0.8], initial, seed=3)
        classes = [number for number, _ in found]
        assert [*found.map(lambda number, element: element[1])] == classes
        np.testing.assert_allclose(np.bincount(classes) / len(classes), [0.2, 0.8], atol=0.04)
        assert 800 < len(classes) < 1000
        again = dataset.rejection_resample(lambda x, y: y, [0.2, 0.8], initial, seed=3)
        assert classes == [number for number, _ in again]
    with pytest.raises(InvalidValueError, match="an initial share to every class"):
        dataset.rejection_resample(lambda x, y: y, [0.5, 0.5], [1.0, 0.0])
    with pytest.raises(InvalidValueError, match=r"target_dist is \[0.5\]"):
        dataset.rejection_resample(lambda x, y: y, [0.5])
    with pytest.raises(InvalidValueError, match="returned 1, but target_dist has 1 classes"):
        [*dataset.rejection_resample(lambda x, y: y, [1.0])]


def test_a_shuffle_goes_on_after_an_error_of_what_it_reads():
    inverses = tf.data.Dataset.range(20).map(lambda x: 60 // (int(x) % 5))

    for buffer_size in (3, 100):  # an error while it is filled, and after
        got = sorted(int(x) for x in inverses.shuffle(buffer_size).ignore_errors())
        assert got == sorted(60 // (x % 5) for x in range(20) if x % 5), buffer_size


def test_a_dataset_says_and_keeps_its_number_of_elements():
    three = tf.data.Dataset.range(5).filter(lambda x: x > 1)
    assert_number = tf.data.experimental.assert_cardinality

    assert len(three.apply(assert_number(3))) == 3
    assert [int(x) for x in three.apply(assert_number(3))] == [2, 3, 4]
    for number, message in ((2, "more"), (4, "only 3")):
        with pytest.raises(InvalidValueError, match=f"expected {number} .*{message}"):
            [*three.apply(assert_number(number))]
    bad = tf.data.Dataset.range(4).map(lambda x: 6 // int(x - 1)).ignore_errors()
    assert [int(x) for x in bad] == [-6, 6, 3]
    assert [int(x) for x in tf.data.Dataset.random(3).take(2)] == [
        int(x) for x in tf.data.Dataset.random(3).take(2)
    ]


def test_datasets_of_distributary_become_those_of_tensorflow(tmp_path):
    plain = data.Dataset.from_tensor_slices([1, 1, 2])
    (tmp_path / "lines").write_text("a\na\nb\n")

    assert [x.numpy() for x in Dataset.from_source(plain).unique()] == [1, 2]
    assert [int(x) for x in plain.apply(tf.data.experimental.unique())] == [1, 2]
    lines = tf.data.TextLineDataset(tmp_path / "lines")
    assert isinstance(lines, Dataset)
    assert isinstance(lines.take(2), Dataset)
    assert [x.item() for x in lines.unique()] == [b"a", b"b"]


def test_columns_of_csv_files(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.csv").write_text(f'x,y,z\n1,2.5,{name}\n\n4,,"d,e"\n')
    files = [str(tmp_path / "a.csv"), str(tmp_path / "b.csv")]

    rows = [*tf.data.experimental.CsvDataset(files, [tf.int32, [0.5], ""], header=True)]
    column = tf.data.experimental.CsvDataset(files[0], [["-"]], header=True, select_cols=[2])

    assert [[one.item() for one in row] for row in rows] == [
        [1, 2.5, "a"],
        [4, 0.5, "d,e"],
        [1, 2.5, "b"],
        [4, 0.5, "d,e"],
    ]
    assert [one.item() for (one,) in column] == ["a", "d,e"]
