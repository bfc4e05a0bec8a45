"""Files as sources; what they hold is compared with what was written."""

import base64
import gzip
import zlib

import numpy as np
import pytest

from distributary.data import Dataset, FixedLengthRecordDataset, TextLineDataset, TFRecordDataset
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


def test_rows_of_a_mapped_file_in_order_shuffled_and_after_a_jump(tmp_path):
    rows = np.random.default_rng(0).normal(size=(100, 3, 2)).astype(np.float32)
    np.save(tmp_path / "rows.npy", rows)

    dataset = Dataset.from_tensor_slices(np.load(tmp_path / "rows.npy", mmap_mode="r"))

    np.testing.assert_array_equal(np.concatenate(list(dataset.batch(7))), rows)
    np.testing.assert_array_equal(np.stack(list(dataset.skip(30).take(50))), rows[30:80])
    order = np.concatenate(list(Dataset.range(100).shuffle(100, seed=4).batch(16)))
    shuffled = np.concatenate(list(dataset.shuffle(100, seed=4).batch(16)))
    np.testing.assert_array_equal(shuffled, rows[order])


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
        (lambda data: b"hello", "record 0 of .* is cut off"),
        (lambda data: data.replace(b"first", b"worst"), "record 0 of .* checksum of its 5 bytes"),
        # A length that is absurd, but has the right checksum.
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


_COMPRESSIONS = {"": lambda data: data, "GZIP": gzip.compress, "ZLIB": zlib.compress}


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
    num_changes = 500
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


def test_unknown_compressions_and_arguments_are_refused(tmp_path):
    (tmp_path / "a").write_bytes(_RECORDS)

    with pytest.raises(ValueError, match=r"compression_type is 'LZ4', expected one of .*GZIP"):
        TFRecordDataset(tmp_path / "a", "LZ4")
    with pytest.raises(TypeError, match="num_reads"):
        TFRecordDataset(tmp_path / "a", num_reads=3)


def test_records_of_a_fixed_size(tmp_path):
    (tmp_path / "a").write_bytes(b"HHabcdefF")
    (tmp_path / "b").write_bytes(gzip.compress(b"abcdef"))

    plain = FixedLengthRecordDataset(str(tmp_path / "a"), 3, 2, 1)
    packed = FixedLengthRecordDataset([str(tmp_path / "b")] * 2, 2, compression_type="GZIP")

    assert [*plain] == [b"abc", b"def"]
    assert [*packed] == [b"ab", b"cd", b"ef"] * 2
    for header, footer in ((3, 1), (2, 2), (2, 0), (9, 1)):
        with pytest.raises(InvalidValueError, match="more than whole records of 3 bytes"):
            [*FixedLengthRecordDataset(str(tmp_path / "a"), 3, header, footer)]
