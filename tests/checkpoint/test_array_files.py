"""Files of arrays: as the format says, read by boxes, and every byte checked."""

import itertools
import json

import jax.numpy as jnp
import numpy as np
import pytest

from distributary.checkpoint import ArrayReader, SavedPart, _files, box_of, write_arrays
from distributary.errors import CheckpointError

RNG = np.random.default_rng(0)
DTYPES = ["bool", "int8", "uint64", "float16", "bfloat16", "float64", "complex64", "complex128"]
DTYPES += ["float8_e4m3fn", "float8_e4m3b11fnuz", "int4", ">i2"]


@pytest.fixture
def small_pieces(monkeypatch):
    """Pieces of an odd size, so that rows lie across them."""
    monkeypatch.setattr(_files, "_PIECE_BYTES", 37)


def _arrays():
    arrays = {f"of {d}": RNG.integers(0, 2, (23, 3)).astype(jnp.dtype(d)) for d in DTYPES}
    return arrays | {
        "a scalar": np.float32(0.25).reshape(()),
        "none": np.zeros((0, 7)),
        "no columns": np.zeros((4, 0), np.int32),
        "transposed": RNG.normal(size=(6, 5)).T,
        'é/\n"': np.arange(3),
    }


def _read(path, parts, box, dtype):
    target = np.empty([own.stop - own.start for own in box], dtype)
    with ArrayReader(path) as reader:
        reader.check([(box, parts)])
        reader.fill(target, box, parts)
    return target


def test_the_file_is_one_of_safetensors_and_arrays_are_read(small_pieces, tmp_path):
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
    for name, array in arrays.items():
        begin = [0] * array.ndim
        parts = [SavedPart("arrays.safetensors", written.checksum, name, begin, array.shape)]
        read = _read(tmp_path, parts, box_of(array.shape), array.dtype)
        np.testing.assert_array_equal(read, array)


@pytest.mark.parametrize(
    "cuts", [((0, 23), (0, 3, 7)), ((0, 9, 23), (0, 7)), ((0, 9, 23), (0, 3, 7))]
)
@pytest.mark.parametrize(
    "box", [(slice(0, 23), slice(0, 7)), (slice(4, 17), slice(0, 7)), (slice(4, 17), slice(2, 5))]
)
def test_boxes_are_put_together_of_parts(small_pieces, tmp_path, cuts, box):
    array = RNG.normal(size=(23, 7))
    places = [
        (slice(a, b), slice(c, d))
        for a, b in itertools.pairwise(cuts[0])
        for c, d in itertools.pairwise(cuts[1])
    ]
    parts = []
    for worker, place in enumerate(reversed(places)):
        file = f"worker-{worker}.safetensors"
        checksum = write_arrays(tmp_path / file, {"a": array[place]}).checksum
        begin = [own.start for own in place]
        parts.append(SavedPart(file, checksum, "a", begin, array[place].shape))

    np.testing.assert_array_equal(_read(tmp_path, parts, box, float), array[box])


def test_only_the_pieces_that_are_read_have_to_be_whole(small_pieces, tmp_path):
    array = np.arange(100, dtype=np.int64)
    path = tmp_path / "arrays.safetensors"
    checksum = write_arrays(path, {"a": array}).checksum
    data = bytearray(path.read_bytes())
    data[-800 + 400] ^= 8
    path.write_bytes(data)
    parts = [SavedPart(path.name, checksum, "a", [0], [100])]

    box = (slice(60, 100),)
    np.testing.assert_array_equal(_read(tmp_path, parts, box, np.int64), array[60:])
    for start, stop in ((0, 100), (50, 51), (46, 50)):
        with (
            ArrayReader(tmp_path) as reader,
            pytest.raises(CheckpointError, match=r"bytes \d+ to \d+, of 'a', do not have the che"),
        ):
            reader.check([((slice(start, stop),), parts)])
        with pytest.raises(CheckpointError, match=r"bytes \d+ to \d+, of 'a', do not have the che"):
            _read(tmp_path, parts, (slice(start, stop),), np.int64)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (("arrays.safetensors", 0, "b", [0], [10]), "arrays.safetensors has no array 'b'"),
        (("arrays.safetensors", 0, "a", [0], [12]), "'a' in its file .* has 80 bytes, which are"),
        (("arrays.safetensors", 0, "a", [2], [10]), "have 8 of the 10 elements"),
        (("arrays.safetensors", 1, "a", [0], [10]), "its file arrays.safetensors is damaged, or"),
        (("../a.safetensors", 0, "a", [0], [10]), "'../a.safetensors' is not the name of a file"),
    ],
)
def test_parts_that_are_not_there_are_refused(part, message, tmp_path):
    checksum = write_arrays(tmp_path / "arrays.safetensors", {"a": np.arange(10.0)}).checksum
    file, added, *rest = part

    with pytest.raises(CheckpointError, match=message):
        _read(tmp_path, [SavedPart(file, checksum + added, *rest)], (slice(0, 10),), float)
