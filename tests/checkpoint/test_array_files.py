"""Files of arrays: as the format says, read by rows, and every byte checked."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from distributary.checkpoint import SavedRows, _array_files, read_rows, write_arrays
from distributary.errors import CheckpointError

RNG = np.random.default_rng(0)
DTYPES = ["bool", "int8", "uint64", "float16", "bfloat16", "float64", "complex64", "complex128"]
DTYPES += ["float8_e4m3fn", "float8_e4m3b11fnuz", "int4", ">i2"]


@pytest.fixture
def small_pieces(monkeypatch):
    """Pieces of an odd size, so that rows lie across them."""
    monkeypatch.setattr(_array_files, "_PIECE_BYTES", 37)


def _arrays():
    arrays = {f"of {d}": RNG.integers(0, 2, (23, 3)).astype(jnp.dtype(d)) for d in DTYPES}
    return arrays | {
        "a scalar": np.float32(0.25).reshape(()),
        "none": np.zeros((0, 7)),
        "no columns": np.zeros((4, 0), np.int32),
        "transposed": RNG.normal(size=(6, 5)).T,
        'é/\n"': np.arange(3),
    }


def test_the_file_is_one_of_safetensors(small_pieces, tmp_path):
    arrays = _arrays()

    written = write_arrays(tmp_path / "arrays.safetensors", arrays)

    data = (tmp_path / "arrays.safetensors").read_bytes()
    assert written.num_bytes == len(data)
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert all(isinstance(v, str) for v in header.pop("__metadata__").values())
    assert list(header) == list(arrays)
    end = 0
    for name, array in arrays.items():
        start, stop = header[name]["data_offsets"]
        assert (start, stop - start) == (end, array.nbytes)
        assert data[8 + length + start :][: stop - start] == array.tobytes()
        end = stop
    assert len(data) == 8 + length + end
    kinds = {"bfloat16": "BF16", "float16": "F16", "complex64": "C64", "bool": "BOOL", ">i2": "U8"}
    for dtype, kind in kinds.items():
        assert header[f"of {dtype}"]["dtype"] == kind
    assert header["of bfloat16"]["shape"] == [23, 3]
    assert header["of int4"] == {**header["of int4"], "dtype": "U8", "shape": [69]}


def test_rows_of_several_arrays_are_put_together(small_pieces, tmp_path):
    arrays = _arrays()
    checksum = write_arrays(tmp_path / "ps-3.safetensors", arrays).checksum

    def rows(name, start, stop):
        return SavedRows("ps-3.safetensors", checksum, name, start, stop)

    targets, wanted, expected = [], [], []
    for name, array in arrays.items():
        num_rows = array.shape[0] if array.ndim else 1
        cuts = [(0, num_rows)]
        if num_rows > 4:
            cuts = [(2, 2), (3, num_rows), (0, 1), (1, 4)]
        wanted.append([rows(name, *cut) for cut in cuts])
        expected.append(np.concatenate([array[a:b] for a, b in cuts]) if array.ndim else array)
        targets.append(np.empty(expected[-1].shape, array.dtype))
    read_rows(tmp_path, targets, wanted)

    for target, array in zip(targets, expected, strict=True):
        np.testing.assert_array_equal(target, array)


def test_only_the_pieces_that_are_read_have_to_be_whole(small_pieces, tmp_path):
    array = np.arange(100, dtype=np.int64)
    path = tmp_path / "arrays.safetensors"
    checksum = write_arrays(path, {"a": array}).checksum
    data = bytearray(path.read_bytes())
    data[-800 + 400] ^= 8
    path.write_bytes(data)

    def read(start, stop):
        target = np.zeros(stop - start, np.int64)
        read_rows(tmp_path, [target], [[SavedRows(path.name, checksum, "a", start, stop)]])
        return target

    np.testing.assert_array_equal(read(60, 100), array[60:])
    for start, stop in ((0, 100), (50, 51), (46, 50)):
        with pytest.raises(CheckpointError, match=r"bytes \d+ to \d+, of 'a', do not have the che"):
            read(start, stop)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (("arrays.safetensors", 0, "b", 0, 4), "arrays.safetensors has no array 'b'"),
        (("arrays.safetensors", 0, "a", 8, 12), "'a' in its file .* has 80 bytes, of which 64 to"),
        (("arrays.safetensors", 0, "a", 0, 3), "do not make up the 4 rows"),
        (("arrays.safetensors", 1, "a", 0, 4), "its file arrays.safetensors is damaged, or that"),
        (("ps-1.safetensors", 0, "a", 0, 4), "its file ps-1.safetensors is missing"),
        (
            ("../arrays.safetensors", 0, "a", 0, 4),
            "'../arrays.safetensors' is not the name of a file",
        ),
    ],
)
def test_rows_that_are_not_there_are_refused(rows, message, tmp_path):
    checksum = write_arrays(tmp_path / "arrays.safetensors", {"a": np.arange(10.0)}).checksum
    file, added, *rest = rows

    with pytest.raises(CheckpointError, match=message):
        read_rows(tmp_path, [np.zeros(4)], [[SavedRows(file, checksum + added, *rest)]])
