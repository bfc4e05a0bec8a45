"""Files of arrays of which several processes read some rows each, with checksums of every byte.

The format is safetensors (https://huggingface.co/docs/safetensors): a header with the place of each
array, followed by their bytes. The header also has a checksum of every piece of the arrays, and the
checkpoint has the checksum of the header. This proves that the bytes read are those that were
written, and that the file belongs to the checkpoint.
"""

import contextlib
import functools
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, final

import google_crc32c
import numpy as np

from distributary.errors import CheckpointError

_Result = TypeVar("_Result")

_PIECE_BYTES = 4 << 20
_MAX_THREADS = 4
_FILE = re.compile(r"(arrays|ps-\d+)\.safetensors")
_LENGTH_BYTES = 8  # bytes of the length of the header, which follows
_METADATA = "__metadata__"
_CHECKSUM_DIGITS = 8
_DTYPES = {
    "bool": "BOOL",
    "bfloat16": "BF16",
    "complex64": "C64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
}


@final
@dataclass(frozen=True, slots=True)
class SavedRows:
    """Some rows of an array in a checkpoint.

    Attributes:
        file: Name of the file in the folder of the checkpoint.
        checksum: Checksum of the header of the file.
        name: Name of the array in the file.
        start: The first row. A scalar has one row.
        stop: The row after the last.
    """

    file: str
    checksum: int
    name: str
    start: int
    stop: int


@final
@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file of arrays that is on disk.

    Attributes:
        num_bytes: Size of the file.
        checksum: Checksum of its header, which has the checksums of the arrays.
    """

    num_bytes: int
    checksum: int


def rows_between(rows: Sequence[SavedRows], start: int, stop: int) -> list[SavedRows]:
    """Returns rows `start` to `stop` of an array that consists of `rows`."""
    found = []
    for part in rows:
        size = part.stop - part.start
        low, high = max(start, 0), min(stop, size)
        if low < high:
            found.append(replace(part, start=part.start + low, stop=part.start + high))
        start, stop = start - size, stop - size
    return found


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> WrittenFile:
    """Writes arrays to a new file, and returns once it is on disk.

    Args:
        path: Path of the file.
        arrays: The arrays, by name. They must not change meanwhile.

    Raises:
        OSError: if the file cannot be written.
    """
    sources = {name: _bytes_of(array) for name, array in arrays.items()}
    ends = np.cumsum([source.size for source in sources.values()], dtype=np.int64).tolist()
    described: dict[str, Any] = {
        name: {**_described(array), "data_offsets": [end - array.nbytes, end]}
        for (name, array), end in zip(arrays.items(), ends, strict=True)
    }
    num_pieces = sum(len(_pieces(source.size)) for source in sources.values())
    first = len(_header(described, [0] * num_pieces))
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:

        def write(start: int, piece: np.ndarray) -> int:
            _write_all(descriptor, piece, start)
            return int(google_crc32c.value(piece))

        calls = [
            functools.partial(
                write, first + described[name]["data_offsets"][0] + low, source[low:high]
            )
            for name, source in sources.items()
            for low, high in _pieces(source.size)
        ]
        header = _header(described, _in_threads(calls))
        _write_all(descriptor, np.frombuffer(header, np.uint8), 0)
        os.fsync(descriptor)
    except BaseException:
        path.unlink()
        raise
    finally:
        os.close(descriptor)
    num_bytes = first + (ends[-1] if ends else 0)
    return WrittenFile(num_bytes, google_crc32c.value(header))


def read_rows(
    path: Path, arrays: Sequence[np.ndarray], rows: Sequence[Sequence[SavedRows]]
) -> None:
    """Fills arrays with rows of a checkpoint.

    Args:
        path: Path of the checkpoint.
        arrays: The arrays to fill, contiguous in memory.
        rows: For every array, the rows that it consists of, in order.

    Raises:
        CheckpointError: if there are no such rows, or they differ from what was written.
    """
    try:
        with contextlib.ExitStack() as stack:
            files: dict[tuple[str, int], _ArrayFile] = {}
            calls = []
            for array, own in zip(arrays, rows, strict=True):
                num_rows = array.shape[0] if array.ndim else 1
                if sum(part.stop - part.start for part in own) != num_rows:
                    raise _UnreadableError(f"{own} do not make up the {num_rows} rows of an array")
                target, row_bytes = _bytes_of(array), array.nbytes // max(1, num_rows)
                for part in own:
                    key = (part.file, part.checksum)
                    if key not in files:
                        files[key] = stack.enter_context(_opened(path, *key))
                    size = (part.stop - part.start) * row_bytes
                    calls += files[key].calls(part.name, part.start * row_bytes, target[:size])
                    target = target[size:]
            _in_threads(calls)
    except (OSError, _UnreadableError) as error:
        raise unreadable(path, str(error)) from None


def unreadable(path: Path, problem: str) -> CheckpointError:
    """Returns the error about a damaged checkpoint."""
    return CheckpointError(
        f"The checkpoint {path} cannot be read: {problem}. Restore another checkpoint, or copy"
        " this one again from where it is whole."
    )


class _UnreadableError(Exception):
    """A problem with a file; the text says which."""


@final
class _ArrayFile:
    """A file of arrays whose header has been checked.

    Args:
        file: Name of the file.
        descriptor: Descriptor to read it with.
        header: Header of the file.
        first: Offset at which the arrays begin.
    """

    def __init__(self, file: str, descriptor: int, header: Mapping[str, Any], first: int) -> None:
        self._file = file
        self._descriptor = descriptor
        self._places: dict[str, tuple[int, int, list[int]]] = {}
        digits = header[_METADATA]["crc32c"]
        starts = range(0, len(digits), _CHECKSUM_DIGITS)
        checksums = iter([int(digits[i : i + _CHECKSUM_DIGITS], 16) for i in starts])
        for name, described in header.items():
            if name != _METADATA:
                start, stop = described["data_offsets"]
                own = list(itertools.islice(checksums, len(_pieces(stop - start))))
                self._places[name] = (first + start, stop - start, own)

    def calls(self, name: str, start: int, target: np.ndarray) -> list[Callable[[], None]]:
        """Returns calls that fill a target with bytes of an array, from `start` on."""
        if name not in self._places:
            raise _UnreadableError(f"its file {self._file} has no array {name!r}")
        first, size, checksums = self._places[name]
        stop = start + target.size
        if stop > size:
            raise _UnreadableError(
                f"{name!r} in its file {self._file} has {size} bytes, of which {start} to {stop}"
                " are needed"
            )

        def read_piece(low: int, high: int, checksum: int) -> None:
            """Reads and checks bytes `low` to `high` of the array, and copies the wanted ones."""
            is_wanted = start <= low and high <= stop
            piece = (
                target[low - start : high - start] if is_wanted else np.empty(high - low, np.uint8)
            )
            num_read = _read_all(self._descriptor, piece, first + low)
            if num_read != piece.size or google_crc32c.value(piece) != checksum:
                raise _UnreadableError(
                    f"its file {self._file} is damaged: bytes {first + low} to {first + high}, of"
                    f" {name!r}, do not have the checksum that was saved"
                )
            if not is_wanted:
                from_, to = max(low, start), min(high, stop)
                target[from_ - start : to - start] = piece[from_ - low : to - low]

        return [
            functools.partial(read_piece, low, high, checksum)
            for (low, high), checksum in zip(_pieces(size), checksums, strict=True)
            if low < stop and start < high
        ]


@contextlib.contextmanager
def _opened(path: Path, file: str, checksum: int) -> Iterator[_ArrayFile]:
    """Opens the file with this name and checksum in the folder of a checkpoint."""
    if not _FILE.fullmatch(file):  # another name could lead out of the folder
        raise _UnreadableError(f"{file!r} is not the name of a file of a checkpoint")
    try:
        descriptor = os.open(path / file, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise _UnreadableError(f"its file {file} is missing") from None
    try:
        num_bytes = os.fstat(descriptor).st_size
        length = int.from_bytes(os.pread(descriptor, _LENGTH_BYTES, 0), "little")
        first = _LENGTH_BYTES + length
        header = os.pread(descriptor, first, 0) if first <= num_bytes else b""
        if google_crc32c.value(header) != checksum:
            raise _UnreadableError(
                f"its file {file} is damaged, or that of another checkpoint: the first bytes do not"
                " have the checksum that was saved"
            )
        yield _ArrayFile(file, descriptor, json.loads(header[_LENGTH_BYTES:]), first)
    finally:
        os.close(descriptor)


def _header(described: Mapping[str, Any], checksums: Iterable[int]) -> bytes:
    """Returns the header with its length, which does not depend on the checksums."""
    digits = "".join(f"{checksum:0{_CHECKSUM_DIGITS}x}" for checksum in checksums)
    metadata = {"written_by": "distributary", "crc32c": digits}
    text = json.dumps({_METADATA: metadata, **described}).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _described(array: np.ndarray) -> dict[str, Any]:
    if array.dtype.name in _DTYPES and array.dtype.isnative:
        return {"dtype": _DTYPES[array.dtype.name], "shape": list(array.shape)}
    return {"dtype": "U8", "shape": [array.nbytes]}  # safetensors does not have this dtype


def _bytes_of(array: np.ndarray) -> np.ndarray:
    return array.reshape(math.prod(array.shape)).view(np.uint8)


def _pieces(size: int) -> list[tuple[int, int]]:
    return [(low, min(low + _PIECE_BYTES, size)) for low in range(0, size, _PIECE_BYTES)]


def _in_threads(calls: Sequence[Callable[[], _Result]]) -> list[_Result]:
    if len(calls) <= 1:
        return [call() for call in calls]
    with ThreadPoolExecutor(_MAX_THREADS) as threads:
        return list(threads.map(lambda call: call(), calls))


def _write_all(descriptor: int, data: np.ndarray, start: int) -> None:
    rest = memoryview(data.data)
    while rest:
        written = os.pwrite(descriptor, rest, start)
        rest, start = rest[written:], start + written


def _read_all(descriptor: int, data: np.ndarray, start: int) -> int:
    """Fills `data` with bytes of a file; returns how many there were."""
    rest = memoryview(data.data)
    while rest and (read := os.preadv(descriptor, [rest], start)):
        rest, start = rest[read:], start + read
    return data.size - len(rest)
