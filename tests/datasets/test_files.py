"""Files as sources; what they hold is compared with what was written."""

import base64
import gzip

import numpy as np
import pytest

from distributary.data import Dataset, ParquetDataset, TensorSpec, TextLineDataset, TFRecordDataset

# Written by tf.io.TFRecordWriter of TensorFlow 2.21: b"first", b"", b"\0\1\0", 20 times b"x".
_RECORDS = base64.b64decode(
    "BQAAAAAAAADqsgQ+Zmlyc3RV/yPlAAAAAAAAAAApA5gH2OqCogMAAAAAAAAAsJlJDgABAGTSnRgUAAAAAAAAAF49KRV4"
    "eHh4eHh4eHh4eHh4eHh4eHh4eA0t0yA="
)
# With compression_type GZIP: b"first", b"second".
_COMPRESSED = base64.b64decode(
    "H4sIAAAAAAAAA2NlgIBXm1js0jKLiktC/ys/ZYMKFmdeNS9OTc7PS7n84PIpADImk1QrAAAA"
)


@pytest.fixture
def shards(tmp_path):
    """Four files with 25 rows each, and their rows."""
    rows = np.random.default_rng(0).normal(size=(100, 3, 2)).astype(np.float32)
    files = [str(tmp_path / f"{i}.npy") for i in range(4)]
    for name, part in zip(files, np.split(rows, 4), strict=True):
        np.save(name, part)
    return files, rows


def test_rows_of_npy_files_in_order_shuffled_and_after_a_jump(shards):
    files, rows = shards
    dataset = Dataset.from_npy(files)

    assert len(dataset) == 100
    assert dataset.element_spec == TensorSpec((3, 2), np.float32)
    np.testing.assert_array_equal(np.concatenate(list(dataset.batch(7))), rows)
    np.testing.assert_array_equal(np.stack(list(dataset.skip(30).take(50))), rows[30:80])
    order = np.concatenate(list(Dataset.range(100).shuffle(100, seed=4).batch(16)))
    shuffled = np.concatenate(list(dataset.shuffle(100, seed=4).batch(16)))
    np.testing.assert_array_equal(shuffled, rows[order])


def test_memory_is_used_again_only_when_nobody_refers_to_it(tmp_path, strategy_of):
    rows = np.arange(200 * 1000, dtype=np.float32).reshape(200, 1000)
    np.save(tmp_path / "a.npy", rows)
    dataset = Dataset.from_npy(str(tmp_path / "a.npy")).batch(100)

    addresses = {batch.ctypes.data for _ in range(5) for batch in dataset}
    assert len(addresses) <= 4
    kept = [part[3:] for _ in range(5) for part in dataset]
    for i, part in enumerate(kept):
        np.testing.assert_array_equal(part, rows[100 * (i % 2) :][3:100])
    for num_replicas in (1, 2):  # JAX can take such memory as it is
        distributed = strategy_of(num_replicas).experimental_distribute_dataset(dataset)
        on_devices = [batch for _ in range(5) for batch in distributed]
        for i, batch in enumerate(on_devices):
            parts = [batch] if num_replicas == 1 else batch.values
            seen = np.concatenate([np.asarray(part) for part in parts])
            np.testing.assert_array_equal(seen, rows[100 * (i % 2) :][:100])


def test_rows_in_order_are_read_and_not_mapped_also_after_a_shuffle(shards, monkeypatch):
    files, rows = shards
    dataset = Dataset.from_npy(files)
    list(dataset.shuffle(100).batch(10))

    monkeypatch.setattr(np, "load", None)
    np.testing.assert_array_equal(np.concatenate(list(dataset.batch(7))), rows)


def test_other_layouts_of_npy_files(tmp_path):
    fortran = np.asfortranarray(np.arange(12.0).reshape(4, 3))
    empty_rows = np.zeros((4, 0), np.int8)
    for array in (fortran, empty_rows, np.arange(5), np.zeros((0, 2))):
        np.save(tmp_path / "a.npy", array)
        batches = list(Dataset.from_npy(str(tmp_path / "a.npy")).batch(3))
        if len(array):
            np.testing.assert_array_equal(np.concatenate(batches), array)
        else:
            assert batches == []


def test_rows_of_npz_files_are_dicts(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(6).reshape(3, 2), y=np.arange(3))
    np.savez(tmp_path / "b.npz", x=np.arange(6, 10).reshape(2, 2), y=np.arange(3, 5))

    (batch,) = Dataset.from_npy([tmp_path / "a.npz", tmp_path / "b.npz"]).batch(9)

    np.testing.assert_array_equal(batch["x"], np.arange(10).reshape(5, 2))
    np.testing.assert_array_equal(batch["y"], np.arange(5))


def test_damaged_and_unsafe_npy_files_are_refused(tmp_path, shards):
    files, _ = shards
    np.save(tmp_path / "objects.npy", np.array([{}]), allow_pickle=True)
    np.save(tmp_path / "scalar.npy", np.array(3))
    np.save(tmp_path / "other.npy", np.arange(3))
    np.savez(tmp_path / "uneven.npz", x=np.arange(3), y=np.arange(4))
    (tmp_path / "text.npy").write_text("not an array")
    whole = (tmp_path / "0.npy").read_bytes()
    (tmp_path / "short.npy").write_bytes(whole[:-4])

    for names, message in [
        (["objects.npy"], "Python objects, which only unpickling"),
        (["scalar.npy"], "a scalar"),
        (["text.npy"], r"not a \.npy file"),
        (["short.npy"], "The file is cut off"),
        (["uneven.npz"], "same number of rows"),
        (["0.npy", "other.npy"], r"rows of '.*other\.npy' are .*int64"),
        (["nowhere.npy"], "does not exist"),
        ([], "list of files is empty"),
    ]:
        with pytest.raises(ValueError, match=message):
            Dataset.from_npy([tmp_path / name for name in names])
    with pytest.raises(TypeError, match="filenames is 3"):
        Dataset.from_npy(3)
    dataset = Dataset.from_npy(files)
    (tmp_path / "2.npy").write_bytes(whole[:300])
    with pytest.raises(ValueError, match=r"2\.npy' became shorter"):
        list(dataset.batch(10))


def test_list_files_sorts_or_shuffles(tmp_path):
    for name in ("b.txt", "a.txt", "c.bin"):
        (tmp_path / name).write_text("")
    pattern = str(tmp_path / "*.txt")

    listed = list(Dataset.list_files(pattern, shuffle=False))
    assert listed == [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    assert sorted(Dataset.list_files(pattern, seed=1)) == listed
    both = Dataset.list_files([pattern, str(tmp_path / "*.bin")], shuffle=False)
    assert len(both) == 3
    with pytest.raises(ValueError, match="no file matches"):
        Dataset.list_files(str(tmp_path / "*.csv"))


@pytest.mark.parametrize("compression_type", [None, "GZIP"])
def test_lines_of_text(tmp_path, compression_type):
    write = gzip.open if compression_type else open
    for name, text in (("a", b"one\ntwo\r\n\nlast"), ("b", b"three\n")):
        with write(tmp_path / name, "wb") as file:
            file.write(text)

    dataset = TextLineDataset([tmp_path / "a", tmp_path / "b"], compression_type)

    assert list(dataset) == [b"one", b"two", b"", b"last", b"three"]
    assert next(iter(dataset.batch(4))).tolist() == [b"one", b"two", b"", b"last"]


def test_records_that_tensorflow_wrote(tmp_path):
    (tmp_path / "a").write_bytes(_RECORDS)
    (tmp_path / "b").write_bytes(_COMPRESSED)

    assert list(TFRecordDataset(tmp_path / "a")) == [b"first", b"", b"\x00\x01\x00", b"x" * 20]
    assert list(TFRecordDataset(tmp_path / "b", "GZIP")) == [b"first", b"second"]
    iterator = iter(TFRecordDataset([tmp_path / "a"]).batch(2))
    next(iterator)
    state = iterator.get_state()
    again = iter(TFRecordDataset([tmp_path / "a"]).batch(2))
    again.set_state(state)
    assert next(again).tolist() == next(iterator).tolist() == [b"\x00\x01\x00", b"x" * 20]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"\x01" + data[1:], "record 0 of .* has a damaged length"),
        (lambda data: data[:-3], "record 3 of .* is cut off"),
        (lambda data: data[:25], "record 1 of .* is cut off"),
        (lambda data: b"hello", "record 0 of .* is cut off"),
    ],
)
def test_damaged_records_are_noticed(tmp_path, change, message):
    (tmp_path / "a").write_bytes(change(_RECORDS))

    with pytest.raises(ValueError, match=message):
        list(TFRecordDataset(tmp_path / "a"))


def test_damaged_contents_are_noticed_where_a_library_computes_checksums(tmp_path):
    pytest.importorskip("google_crc32c")
    (tmp_path / "a").write_bytes(_RECORDS.replace(b"first", b"worst"))

    with pytest.raises(ValueError, match=r"record 0 of .* is damaged: its checksum differs"):
        list(TFRecordDataset(tmp_path / "a"))


def test_unknown_compressions_and_arguments_are_refused(tmp_path):
    (tmp_path / "a").write_bytes(_RECORDS)

    with pytest.raises(ValueError, match=r"compression_type is 'LZ4', expected one of .*GZIP"):
        TFRecordDataset(tmp_path / "a", "LZ4")
    with pytest.raises(TypeError, match=r"unknown arguments.*num_reads"):
        TFRecordDataset(tmp_path / "a", num_reads=3)


def test_rows_of_parquet_and_arrow_files(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")

    values = np.arange(12, dtype=np.float32).reshape(6, 2)
    fixed = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(values.ravel()), 2)
    table = pyarrow.table(
        {"x": fixed, "y": np.arange(6), "name": list("abcdef"), "l": values.astype(int).tolist()}
    )
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=4)
    with pyarrow.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=4)

    for name in ("a.parquet", "a.arrow"):
        batches = list(ParquetDataset(tmp_path / name).batch(5))
        assert [len(batch["y"]) for batch in batches] == [5, 1]
        joined = {key: np.concatenate([b[key] for b in batches]) for key in batches[0]}
        np.testing.assert_array_equal(joined["x"], values)
        np.testing.assert_array_equal(joined["l"], values)
        np.testing.assert_array_equal(joined["y"], np.arange(6))
        assert joined["name"].tolist() == list("abcdef")
        (only,) = ParquetDataset([tmp_path / name], columns=["y"]).batch(6)
        assert list(only) == ["y"]
    ragged = pyarrow.table({"x": [[1], [2, 3]], "y": [1, None]})
    pyarrow.parquet.write_table(ragged, tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=r"'x' of .* lists of different length"):
        list(ParquetDataset(tmp_path / "b.parquet"))
    with pytest.raises(ValueError, match=r"'y' of .* missing values"):
        list(ParquetDataset(tmp_path / "b.parquet", columns=["y"]))
