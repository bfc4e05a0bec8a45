"""Files as sources; what they hold is compared with what was written."""

import base64
import bz2
import gzip
import lzma
import zlib

import numpy as np
import pytest

from distributary.data import Dataset, ParquetDataset, TensorSpec, TextLineDataset, TFRecordDataset
from distributary.errors import InvalidValueError

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
        (["objects.npy"], "Python objects.* mean unpickling them"),
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
        (lambda data: b"\x01" + data[1:], "record 0 of .*, at byte 0, has a damaged length, 1:"),
        (lambda data: data[:-3], "record 3 of .*, at byte 56, is cut off: it has 21 of 24 bytes"),
        (lambda data: data[:25], "record 1 of .*, at byte 21, is cut off: .* 4 of 12 bytes"),
        (lambda data: b"hello", "record 0 of .* is cut off"),
        (lambda data: data.replace(b"first", b"worst"), "record 0 of .* checksum of its 5 bytes"),
        (lambda data: data[:63] + b"\x80" + data[64:], "record 3 of .* damaged length, 92233"),
        # Lengths that are absurd, but have the right checksum.
        (lambda data: data + _header(1 << 62), "record 4 .* has 0 of 4611686018427387908"),
        (lambda data: data + _header(1 << 63) + b"abc", "record 4 .* has 3 of "),
    ],
)
def test_damaged_records_are_noticed(tmp_path, change, message):
    (tmp_path / "a").write_bytes(change(_RECORDS))

    with pytest.raises(InvalidValueError, match=message):
        list(TFRecordDataset(tmp_path / "a"))


def _header(size):
    length = size.to_bytes(8, "little")
    return length + _checksum(length)


def _checksum(data):
    """The masked CRC-32C of RFC 3720, one bit at a time."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    crc = ((crc >> 15) | (crc << 17)) + 0xA282EAD8
    return (crc & 0xFFFFFFFF).to_bytes(4, "little")


_COMPRESSIONS = {
    "": lambda data: data,
    "GZIP": gzip.compress,
    "ZLIB": zlib.compress,
    "BZIP2": bz2.compress,
    "XZ": lzma.compress,
}


@pytest.mark.parametrize("compression_type", _COMPRESSIONS)
def test_no_damage_to_a_file_of_records_is_silent(tmp_path, compression_type):
    random = np.random.default_rng(7)
    records = [random.bytes(int(size)) for size in random.integers(0, 80, 20)]
    parts = [_header(len(data)) + data + _checksum(data) for data in records]
    whole = _COMPRESSIONS[compression_type](b"".join(parts))
    # Between two records nothing tells that the file was longer.
    ends = {0, *np.cumsum([len(part) for part in parts])} if not compression_type else {0}
    name = tmp_path / "records"
    name.write_bytes(whole)
    assert list(TFRecordDataset(name, compression_type)) == records

    num_noticed = 0
    num_changes = 2000 if compression_type in ("", "GZIP") else 200
    for number in range(num_changes):
        if number % 4:
            position = int(random.integers(len(whole)))
            damaged = bytearray(whole)
            damaged[position] ^= 1 << int(random.integers(8))
            is_cut = False
        else:
            damaged = whole[: int(random.integers(len(whole)))]
            is_cut = len(damaged) in ends
        name.write_bytes(damaged)
        try:
            found = list(TFRecordDataset(name, compression_type))
        except InvalidValueError as error:
            assert str(name) in str(error)  # noqa: PT017
            num_noticed += 1
        else:
            assert found == (records[: len(found)] if is_cut else records)

    # The others hit what means nothing, such as the time in the header of GZIP.
    assert num_noticed > 0.97 * num_changes


def test_lines_of_a_damaged_file_are_refused(tmp_path):
    whole = gzip.compress(b"one\ntwo\n" * 100)
    for damaged in (whole[:-9], whole[:-6] + b"\0\1" + whole[-4:], b"one\ntwo"):
        (tmp_path / "a").write_bytes(damaged)
        with pytest.raises(InvalidValueError, match=r"TextLineDataset: .*a' cannot be decompr"):
            list(TextLineDataset(tmp_path / "a", "GZIP"))
    (tmp_path / "a").unlink()
    (tmp_path / "a").write_bytes(whole)
    dataset = TextLineDataset(tmp_path / "a", "GZIP")
    (tmp_path / "a").unlink()
    with pytest.raises(FileNotFoundError):
        list(dataset)


@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_damaged_arrays_are_refused_in_our_words(tmp_path, suffix):
    random = np.random.default_rng(3)
    rows = random.normal(size=(25, 3)).astype(np.float32)
    file = tmp_path / f"rows{suffix}"
    name = str(file)
    if suffix == ".npz":
        np.savez_compressed(name, x=rows, y=np.arange(25))
    else:
        np.save(name, rows)
    whole = file.read_bytes()
    # Rows in a .npy file have no checksum.
    fragile = len(whole) if suffix == ".npz" else len(whole) - rows.nbytes
    num_refused = 0
    for number in range(600):
        if number % 4:
            position = int(random.integers(fragile))
            damaged = bytearray(whole)
            damaged[position] ^= 1 << int(random.integers(8))
        else:
            damaged = whole[: int(random.integers(len(whole)))]
        file.write_bytes(damaged)
        try:
            found = Dataset.from_npy(name)
        except InvalidValueError as error:
            assert name in str(error)  # noqa: PT017
            num_refused += 1
        else:
            (batch,) = found.batch(25)
            if suffix == ".npz":
                np.testing.assert_array_equal(batch["x"], rows)
                np.testing.assert_array_equal(batch["y"], np.arange(25))
            else:
                assert batch.nbytes == rows.nbytes
    assert num_refused > 300


def test_unknown_compressions_and_arguments_are_refused(tmp_path):
    (tmp_path / "a").write_bytes(_RECORDS)

    with pytest.raises(ValueError, match=r"compression_type is 'LZ4', expected one of .*GZIP"):
        TFRecordDataset(tmp_path / "a", "LZ4")
    with pytest.raises(TypeError, match="num_reads"):
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


def test_damaged_tables_are_refused_in_our_words(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    random = np.random.default_rng(5)
    x = random.normal(size=500)
    table = pyarrow.table({"x": x})
    for suffix in (".parquet", ".arrow"):
        file = tmp_path / f"rows{suffix}"
        if suffix == ".arrow":
            with pyarrow.ipc.new_file(str(file), table.schema) as writer:
                writer.write_table(table)
        else:
            parquet.write_table(table, file, write_page_checksum=True)
        whole = file.read_bytes()
        for number in range(300):
            damaged = bytearray(whole)
            if number % 2:
                damaged = damaged[: int(random.integers(len(whole)))]
            else:
                damaged[int(random.integers(len(whole)))] ^= 1 << int(random.integers(8))
            file.write_bytes(damaged)
            try:
                list(ParquetDataset(file).batch(500))
            except InvalidValueError as error:
                assert str(file) in str(error)  # noqa: PT017
                continue
            assert number % 2 == 0
