"""Datasets in folders: what is loaded is compared with what was saved."""

import collections
import json
import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import distributary.compat.tensorflow as tf
from distributary.errors import InvalidTypeError, InvalidValueError

Dataset = tf.data.Dataset
_Pair = collections.namedtuple("_Pair", "x y")


def _elements():
    for n in range(4):
        yield {
            "text": ["é", "", "a" * n],
            "bytes": b"\0" * n,
            "pair": (np.full((n, 2), n, np.int64), jnp.full(2, n, jnp.bfloat16)),
            "flag": n > 1,
            "big_endian": np.array([n], ">f4"),
        }


@pytest.mark.parametrize("compression", [None, "GZIP"])
def test_what_is_loaded_is_what_was_saved(tmp_path, compression):
    dataset = Dataset.from_generator(_elements)

    dataset.save(tmp_path / "d", compression)
    loaded = Dataset.load(tmp_path / "d")

    assert len(loaded) == 4
    assert loaded.element_spec == {
        "text": tf.TensorSpec((3,), object),
        "bytes": tf.TensorSpec((), object),
        "pair": (tf.TensorSpec((None, 2), np.int64), tf.TensorSpec((2,), jnp.bfloat16)),
        "flag": tf.TensorSpec((), bool),
        "big_endian": tf.TensorSpec((1,), np.float32),
    }
    for _ in range(2):
        for found, saved in zip(loaded.as_numpy_iterator(), _elements(), strict=True):
            assert found["text"].tolist() == saved["text"]
            assert found["bytes"] == saved["bytes"]
            assert found["flag"] == saved["flag"]
            for one, other in zip(found["pair"], saved["pair"], strict=True):
                assert (one.dtype, one.shape) == (other.dtype, other.shape)
                np.testing.assert_array_equal(one, other)
            np.testing.assert_array_equal(found["big_endian"], saved["big_endian"])
    first = next(loaded.as_numpy_iterator())
    first["pair"][1][:] = 7  # arrays are the reader's own


def test_batches_are_batches_again_and_files_go_to_replicas(tmp_path, strategy_of):
    Dataset.range(10).batch(4).save(tmp_path / "d", shard_func=lambda batch: batch[0] // 4 % 2)

    loaded = Dataset.load(tmp_path / "d")

    assert [batch.tolist() for batch in loaded] == [[0, 1, 2, 3], [8, 9], [4, 5, 6, 7]]
    distributed = strategy_of(2).experimental_distribute_dataset(loaded)
    assert [len(part) for batch in distributed for part in batch.values] == [2, 2, 1, 1, 2, 2]
    backwards = Dataset.load(
        tmp_path / "d", reader_func=lambda files: files.skip(1).flat_map(lambda file: file)
    )
    assert [batch.tolist() for batch in backwards] == [[4, 5, 6, 7]]
    Dataset.range(0).save(tmp_path / "e")
    assert list(Dataset.load(tmp_path / "e")) == []


def test_a_save_replaces_what_was_there_or_leaves_it(tmp_path):
    Dataset.range(3).save(tmp_path)
    reading = iter(Dataset.load(tmp_path))

    Dataset.load(tmp_path).map(lambda x: x * 10).save(tmp_path)
    with pytest.raises(ZeroDivisionError):
        Dataset.range(5).map(lambda x: 1 // (2 - int(x))).save(tmp_path)
    with pytest.raises(InvalidTypeError, match=r"array of objects has .*, expected text"):
        Dataset.from_generator(lambda: [np.array([{}], object)]).save(tmp_path)
    with pytest.raises(InvalidValueError, match=r"Dataset\.save: .* same dtype and number of dims"):
        Dataset.from_generator(lambda: [np.zeros(2), np.zeros((2, 2))]).save(tmp_path)
    with pytest.raises(InvalidValueError, match="compression is 'LZ', expected None or 'GZIP'"):
        Dataset.range(3).save(tmp_path, "LZ")

    assert list(Dataset.load(tmp_path)) == [0, 10, 20]
    assert len(os.listdir(tmp_path)) == 2
    del reading


def test_named_tuples_need_their_spec(tmp_path):
    dataset = Dataset.from_tensor_slices(_Pair(np.arange(3), ["a", "b", "c"]))
    dataset.save(tmp_path)

    loaded = Dataset.load(tmp_path, dataset.element_spec)

    assert [*loaded] == [_Pair(0, "a"), _Pair(1, "b"), _Pair(2, "c")]
    with pytest.raises(
        InvalidValueError, match=r"named tuples or objects\. Pass their element_spec"
    ):
        Dataset.load(tmp_path)
    with pytest.raises(InvalidValueError, match="but the arrays in"):
        Dataset.load(tmp_path, _Pair(tf.TensorSpec((), np.int64), tf.TensorSpec((), np.float32)))


def test_damaged_folders_are_errors(tmp_path):
    Dataset.range(3).save(tmp_path)
    (file,) = tmp_path.glob("*.records")
    content = file.read_bytes()

    with pytest.raises(InvalidValueError, match=r"has no dataset \(in .* last file is dataset.jso"):
        Dataset.load(tmp_path / "x")
    file.write_bytes(content[: len(content) * 2 // 3])
    with pytest.raises(InvalidValueError, match="has 2 elements, but 3 were saved"):
        list(Dataset.load(tmp_path))
    file.write_bytes(content[:-5] + bytes([content[-5] ^ 1]) + content[-4:])
    with pytest.raises(InvalidValueError, match=r"record 2 of .* checksum of its 9 bytes differs"):
        list(Dataset.load(tmp_path))
    described = json.loads((tmp_path / "dataset.json").read_text())
    for broken in ("{", json.dumps(described | {"version": 9}), '{"version": 1}'):
        (tmp_path / "dataset.json").write_text(broken)
        with pytest.raises(InvalidValueError, match="is damaged, or of a newer version"):
            Dataset.load(tmp_path)


def _noted(factor, notes):
    def double(x):
        notes.append(int(x))
        return x * factor

    return double


@pytest.mark.parametrize("cache", ["cache", "snapshot"])
def test_a_snapshot_computes_once_for_all_programs(tmp_path, cache):
    notes = []

    def pipeline(factor=2, size=4):
        return getattr(Dataset.range(size).map(_noted(factor, notes)), cache)(str(tmp_path))

    dataset = pipeline()
    assert list(dataset.take(2)) == [0, 2]  # not a complete pass
    assert not list(tmp_path.glob("*/*"))
    assert [list(dataset) for _ in range(3)] == [[0, 2, 4, 6]] * 3
    notes.clear()
    again = pipeline()
    assert list(again.batch(3).skip(1)) == [[6]]
    assert notes == []
    assert list(pipeline(factor=3)) == [0, 3, 6, 9]
    assert list(pipeline(size=2)) == [0, 2]
    assert notes == [0, 1, 2, 3, 0, 1]


def test_snapshots_of_other_data_are_others(tmp_path):
    def snapshot(values, change=lambda x: x):
        return Dataset.from_tensor_slices(values).map(change).snapshot(str(tmp_path))

    assert [*snapshot([1, 2])] == [1, 2]
    assert [*snapshot([1, 3])] == [1, 3]
    assert [*snapshot([1, 2], lambda x: x + 1)] == [2, 3]
    lines = tmp_path / "lines"
    for text in ("1\n2\n", "3\n"):
        lines.write_text(text)
        os.utime(lines, ns=(len(text), len(text)))
        names = Dataset.list_files(str(lines)).snapshot(str(tmp_path))
        assert [*names] == [str(lines)]
    assert len([*Path(tmp_path).glob("*/dataset.json")]) == 5
