"""Records of named features and images; TensorFlow 2.21 gives the same bytes and values."""

import jax
import numpy as np
import pytest

import distributary.compat.tensorflow as tf
from distributary.errors import InvalidTypeError, InvalidValueError

# What TensorFlow serializes for `_record(2)`.
_RECORDED = bytes.fromhex(
    "0a570a0b0a02696412051a030a01020a0e0a046e616d6512060a040a026e320a210a03736571121a1a180a16feff"
    "ffffffffffffff01ffffffffffffffffff0100010a150a01781210120e0a0c0000803f000000c06f12833a"
)
_FEATURES = {
    "id": tf.io.FixedLenFeature([], tf.int64),
    "x": tf.io.FixedLenFeature([3], tf.float32),
    "name": tf.io.FixedLenFeature([], tf.string),
    "seq": tf.io.FixedLenSequenceFeature([], tf.int64, allow_missing=True),
    "gone": tf.io.FixedLenFeature([2], tf.float32, default_value=[1.0, 2.0]),
}


def _record(number):
    feature = {
        "id": tf.train.Feature(int64_list=tf.train.Int64List(value=[number])),
        "x": tf.train.Feature(float_list=tf.train.FloatList(value=[number / 2, -number, 1e-3])),
        "name": tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"n%d" % number])),
        "seq": tf.train.Feature(int64_list=tf.train.Int64List(value=range(-number, number))),
    }
    example = tf.train.Example(features=tf.train.Features(feature=feature))
    return example.SerializeToString(deterministic=True)


def test_records_are_those_of_tensorflow():
    assert _record(2) == _RECORDED


def test_what_is_parsed_outside_of_datasets_has_the_method_numpy(tmp_path):
    parsed = tf.io.parse_single_example(_record(1), _FEATURES)
    data = tf.io.serialize_tensor(tf.constant([1, 256]))
    tf.io.write_file(tmp_path / "x", tf.constant(data))

    assert (parsed["id"].numpy(), parsed["name"].numpy()) == (1, b"n1")
    assert tf.io.read_file(tmp_path / "x").numpy() == data.numpy()
    assert tf.io.parse_tensor(tf.constant(data), tf.int32)[1].numpy() == 256
    assert tf.io.decode_raw(b"\1\0", tf.uint8).numpy().tolist() == [1, 0]
    assert tf.io.decode_raw(tf.constant("Duck"), tf.uint8).tolist() == [*b"Duck"]
    assert tf.strings.length(tf.io.encode_base64("ab")).numpy() == 3
    tf.train.BytesList(value=[data])  # also without numpy()
    assert tf.io.serialize_tensor([1, 256]) == data


def test_features_of_a_file_of_records(tmp_path):
    path = str(tmp_path / "records")
    with tf.io.TFRecordWriter(path) as writer:
        for number in (1, 2):
            writer.write(_record(number))
    records = tf.data.TFRecordDataset(path)

    single = [*records.map(lambda record: tf.io.parse_single_example(record, _FEATURES))]
    (batch,) = records.batch(2).map(lambda record: tf.io.parse_example(record, _FEATURES))

    assert [element["name"].item() for element in single] == [b"n1", b"n2"]
    assert [element["seq"].tolist() for element in single] == [[-1, 0], [-2, -1, 0, 1]]
    x = np.array([[0.5, -1, 1e-3], [1, -2, 1e-3]], np.float32)
    np.testing.assert_array_equal([element["x"] for element in single], x)
    np.testing.assert_array_equal(batch["x"], x)
    np.testing.assert_array_equal(batch["id"], [1, 2])
    np.testing.assert_array_equal(batch["seq"], [[-1, 0, 0, 0], [-2, -1, 0, 1]])
    np.testing.assert_array_equal(batch["gone"], [[1, 2], [1, 2]])
    assert batch["x"].dtype == np.float32
    assert batch["id"].dtype == np.int64


@pytest.mark.parametrize(
    ("record", "feature", "error", "message"),
    [
        (b"no record", {"id": _FEATURES["id"]}, InvalidValueError, "9 bytes is not a tf.train.E"),
        (_RECORDED, {"y": _FEATURES["id"]}, InvalidValueError, "no feature 'y'.*default_value"),
        (
            _RECORDED,
            {"x": _FEATURES["id"]},
            InvalidTypeError,
            "'x' has the kind float_list, but int64",
        ),
        (_RECORDED, {"x": tf.io.FixedLenFeature([2], tf.float32)}, ValueError, "has 3 values.*2"),
        (_RECORDED, {"x": tf.float32}, InvalidTypeError, "FixedLenSequenceFeature.*allow_missing"),
        ("text", {"id": _FEATURES["id"]}, InvalidTypeError, "expected the bytes of a record"),
    ],
    ids=["other", "missing", "type", "size", "description", "text"],
)
def test_what_does_not_fit_is_an_error(record, feature, error, message):
    with pytest.raises(error, match=message):
        tf.io.parse_single_example(record, feature)


# What TensorFlow serializes for `_sequence(2)`.
_SEQUENCE = bytes.fromhex(
    "0a1d0a0b0a02696412051a030a01020a0e0a046e616d6512060a040a026e32123c0a230a03656d62121c0a0c120a0a"
    "08000000000000003f0a0c120a0a080000803f0000c03f0a150a03746f6b120e0a051a030a01000a051a030a0101"
)


def _sequence(number):
    def feature(values):
        kind = type(values[0])
        if kind is bytes:
            return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
        if kind is int:
            return tf.train.Feature(int64_list=tf.train.Int64List(value=values))
        return tf.train.Feature(float_list=tf.train.FloatList(value=values))

    def steps(make):
        return tf.train.FeatureList(feature=[feature(make(i)) for i in range(number)])

    context = {"id": feature([number]), "name": feature([b"n%d" % number])}
    lists = {"tok": steps(lambda i: [i]), "emb": steps(lambda i: [float(i), i + 0.5])}
    return tf.train.SequenceExample(
        context=tf.train.Features(feature=context),
        feature_lists=tf.train.FeatureLists(feature_list=lists),
    ).SerializeToString(deterministic=True)


def test_records_of_sequences():
    context = {"id": _FEATURES["id"], "name": _FEATURES["name"], "gone": _FEATURES["gone"]}
    sequences = {
        "tok": tf.io.FixedLenSequenceFeature([], tf.int64),
        "emb": tf.io.FixedLenSequenceFeature([2], tf.float32),
        "no": tf.io.FixedLenSequenceFeature([], tf.int64, allow_missing=True),
    }
    shown = lambda arrays: {key: array.tolist() for key, array in arrays.items()}

    single = tf.io.parse_single_sequence_example(_sequence(2), context, sequences)
    batch = tf.io.parse_sequence_example([_sequence(1), _sequence(2)], context, sequences)

    assert _sequence(2) == _SEQUENCE
    assert shown(single[0]) == {"id": 2, "name": b"n2", "gone": [1, 2]}
    assert shown(single[1]) == {"tok": [0, 1], "emb": [[0, 0.5], [1, 1.5]], "no": []}
    assert batch[0]["id"].tolist() == [1, 2]
    assert shown(batch[1]) == {
        "tok": [[0, 0], [0, 1]],
        "emb": [[[0, 0.5], [0, 0]], [[0, 0.5], [1, 1.5]]],
        "no": [[], []],
    }
    assert shown(batch[2]) == {"tok": [1, 2], "emb": [1, 2], "no": [0, 0]}
    parse = tf.io.parse_single_sequence_example
    assert parse(_sequence(0), None, {"emb": sequences["emb"]})[1]["emb"].shape == (0, 2)
    wrong = tf.io.FixedLenSequenceFeature
    for features, error, message in (
        ({"x": wrong([], tf.int64)}, InvalidValueError, "no sequence 'x'.*allow_missing=True"),
        ({"tok": wrong([2], tf.int64)}, InvalidValueError, "'tok' has 1 values, but its shape"),
        (
            {"tok": tf.io.FixedLenFeature([], tf.int64)},
            InvalidTypeError,
            "sequence 'tok' is descri",
        ),
        ({}, InvalidValueError, "are empty"),
    ):
        with pytest.raises(error, match=message):
            parse(_sequence(1), None, features)
    with pytest.raises(InvalidValueError, match=r"not a tf\.train\.SequenceExample"):
        parse(b"no record", None, sequences)


def test_features_of_any_length_are_sparse():
    features = {"seq": tf.io.VarLenFeature(tf.int64), "no": tf.io.VarLenFeature(tf.string)}
    shown = lambda sparse: [part.tolist() for part in jax.tree.leaves(sparse)]

    single = tf.io.parse_single_example(_record(1), features)
    batch = tf.io.parse_example([_record(1), _record(2)], features)
    context, _ = tf.io.parse_single_sequence_example(
        _sequence(2), {"id": tf.io.VarLenFeature(tf.int64)}
    )
    contexts, _, _ = tf.io.parse_sequence_example(
        [_sequence(0), _sequence(2)], {"id": tf.io.VarLenFeature(tf.int64)}
    )

    assert shown(single["seq"]) == [[[0], [1]], [-1, 0], [2]]
    assert shown(single["no"]) == [[], [], [0]]
    places = [[0, 0], [0, 1], [1, 0], [1, 1], [1, 2], [1, 3]]
    assert shown(batch["seq"]) == [places, [-1, 0, -2, -1, 0, 1], [2, 4]]
    assert shown(batch["no"]) == [[], [], [2, 0]]
    assert tf.sparse.to_dense(batch["seq"], 9).tolist() == [[-1, 0, 9, 9], [-2, -1, 0, 1]]
    assert tf.sparse.to_dense(batch["no"]).shape == (2, 0)
    assert shown(context["id"]) == [[[0]], [2], [1]]
    assert tf.sparse.to_dense(contexts["id"]).numpy().tolist() == [[0], [2]]
    dense = lambda records: tf.sparse.to_dense(tf.io.parse_example(records, features)["seq"])
    (mapped,) = tf.data.Dataset.from_tensors([_record(1), _record(2)]).map(dense)
    assert mapped.numpy().tolist() == [[-1, 0, 0, 0], [-2, -1, 0, 1]]
    records = tf.data.Dataset.from_tensor_slices([_record(1)] * 2)
    (stacked,) = records.map(lambda r: tf.io.parse_single_example(r, features)["seq"]).batch(2)
    with pytest.raises(InvalidValueError, match=r"indices of shape \(2, 2, 1\).*Batch records"):
        tf.sparse.to_dense(stacked)
    for indices in ([[0, 2]], [[-1, 0]], [[0]]):
        with pytest.raises(InvalidValueError, match=r"do not fit dense_shape \[2, 2\]"):
            tf.sparse.to_dense(tf.SparseTensor(indices, [1.0], [2, 2]))


def test_images_of_files():
    image = np.arange(60, dtype=np.uint8).reshape(4, 5, 3) * 3

    png = tf.io.encode_png(image)

    np.testing.assert_array_equal(tf.io.decode_png(png), image)
    np.testing.assert_array_equal(
        tf.image.decode_image(png, dtype=tf.float32)[0, 0] * 255, [0, 3, 6]
    )
    assert tf.io.decode_png(png, channels=1)[:2, :2, 0].tolist() == [[2, 11], [47, 56]]
    smooth = np.broadcast_to(np.arange(0, 160, 10, dtype=np.uint8)[:, None, None], (16, 16, 3))
    decoded = tf.io.decode_jpeg(tf.io.encode_jpeg(smooth), channels=3)
    np.testing.assert_allclose(decoded.astype(int), smooth, atol=4)
    with pytest.raises(InvalidTypeError, match="dtype float32 cannot be encoded"):
        tf.io.encode_png(np.zeros((2, 2, 3), np.float32))


def test_bytes_as_numbers():
    assert tf.io.decode_raw(b"\x01\x02\x03\x04", tf.int16).tolist() == [513, 1027]
    big = tf.io.decode_raw(b"\x01\x02\x03\x04", tf.int16, little_endian=False)
    assert big.tolist() == [258, 772]
    assert tf.io.decode_raw(b"\x01", tf.uint8, fixed_length=2).tolist() == [1, 0]
