"""Datasets of `tf.data.experimental`, with the elements that TensorFlow 2.21 yields."""

from collections import OrderedDict

import numpy as np
import pytest

import distributary.compat.tensorflow as tf
from distributary.errors import InvalidValueError

_FILES = {
    "a.csv": 'x,y,name,big\n1,2.5,"a, b",3000000000\n2,,c,4\n3,1,"d ""q""\nnew",5\n',
    "b.csv": "x,y,name,big\n4,-1e3,e,NA\n5,0.5,,7\n",
    "bad.txt": "x,y\n1,2\nfoo,3\n4\n5,6\n",
}


@pytest.fixture
def files(tmp_path):
    for name, text in _FILES.items():
        (tmp_path / name).write_text(text)
    return {name: str(tmp_path / name) for name in _FILES}


def _shown(elements):
    """Elements as lists and Python numbers, with their dtypes."""

    def show(value):
        if isinstance(value, dict):
            assert type(value) is OrderedDict
            return {key: show(part) for key, part in value.items()}
        if isinstance(value, tuple):
            return [*map(show, value)]
        return np.asarray(value).tolist(), str(getattr(value, "dtype", "bytes"))

    return [*map(show, elements.as_numpy_iterator())]


def test_rows_of_csv_files(files):
    csv = tf.data.experimental.CsvDataset
    both = [files["a.csv"], files["b.csv"]]
    rows = csv(both, [tf.int32, 0.5, "none", tf.constant([9])], "", header=True, na_value="NA")

    one = [(1, "int32"), (2.5, "float32"), (b"a, b", "bytes")]
    assert _shown(csv(files["a.csv"], [0, 0.5, ""], header=True, exclude_cols=[3]).take(1)) == [one]
    last = [(5, "int32"), (0.5, "float32"), (b"none", "bytes"), (7, "int32")]
    assert _shown(rows.skip(4)) == [last]
    assert _shown(rows.skip(1).take(1))[0][1:] == [(0.5, "float32"), (b"c", "bytes"), (4, "int32")]
    assert _shown(csv(files["a.csv"], [tf.string, tf.int64], header=True, select_cols=[2, 3])) == [
        [(b"a, b", "bytes"), (3000000000, "int64")],
        [(b"c", "bytes"), (4, "int64")],
        [(b'd "q"\nnew', "bytes"), (5, "int64")],
    ]
    for defaults, wrong in (
        ([0.0, "", ""], "row has 4 fields, .* 3 record defaults"),
        ([0, "", "", tf.int64], "field 3 is 'NA', expected a number of dtype int64"),
        ([0, tf.float32, "", ""], "field 1 is required but missing"),
        ([0, 0, "", ""], "field 1 is '2.5', expected a number of dtype int32"),
    ):
        with pytest.raises(InvalidValueError, match=wrong):
            _shown(csv(both, defaults, header=True))


def test_batches_of_csv_files(files, tmp_path):
    make = tf.data.experimental.make_csv_dataset
    in_order = {"batch_size": 2, "shuffle": False, "num_epochs": 1}
    pattern = str(tmp_path / "*.csv")

    first, second, third = _shown(make(pattern, na_value="NA", **in_order))
    assert first == {
        "x": ([1, 2], "int32"),
        "y": ([2.5, 0], "float32"),
        "name": ([b"a, b", b"c"], "object"),
        "big": ([3000000000, 4], "int64"),
    }
    assert [*first] == ["x", "y", "name", "big"]
    assert second["big"] == ([5, 0], "int64")
    assert third["name"] == ([b""], "object")
    labeled = make(pattern, label_name="x", select_columns=["y", 0], **in_order)
    assert _shown(labeled)[2] == [{"y": ([0.5], "float32")}, ([5], "int32")]
    defaults = [tf.int64, tf.float32, "none", tf.string]
    (batch,) = _shown(make(files["b.csv"], column_defaults=defaults, label_name="big", **in_order))
    assert batch == [
        {
            "x": ([4, 5], "int64"),
            "y": ([-1000, 0.5], "float32"),
            "name": ([b"e", b"none"], "object"),
        },
        ([b"NA", b"7"], "object"),
    ]
    endless = make(files["b.csv"], 3, select_columns=["x"], na_value="NA")
    assert sorted(np.concatenate([b["x"] for b in endless.take(4)])) == [4] * 6 + [5] * 6
    assert endless.cardinality() in (tf.data.INFINITE_CARDINALITY, tf.data.UNKNOWN_CARDINALITY)
    turns = make(pattern, select_columns=["x"], num_parallel_reads=2, **in_order)
    assert [batch["x"].tolist() for batch in turns] == [[1, 4], [2, 5], [3]]
    good = make(files["bad.txt"], column_defaults=[0, 0], ignore_errors=True, **in_order)
    assert _shown(good) == [{"x": ([1, 5], "int32"), "y": ([2, 6], "int32")}]


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        ({"column_names": ["x", "x"]}, "two columns share a name"),
        ({"header": False}, "column_names is None, but header is False"),
        ({"select_columns": ["z"]}, "select_columns is .*'z'"),
        ({"select_columns": ["x", 0]}, "select_columns is .*'x', 0"),
        ({"label_name": "z"}, "label_name is 'z', expected one of"),
        ({"column_defaults": [0]}, "column_defaults has 1 items, but 4 columns"),
        ({"encoding": "latin1"}, "encoding is 'latin1'"),
        ({"file_pattern": "nowhere/*"}, "no file matches"),
    ],
    ids=str,
)
def test_wrong_arguments_of_csv_files_are_named(files, arguments, wrong):
    with pytest.raises(InvalidValueError, match=wrong):
        tf.data.experimental.make_csv_dataset(
            **{"file_pattern": files["a.csv"], "batch_size": 1} | arguments
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
