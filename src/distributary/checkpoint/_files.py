"""Files on disk: of arrays, and single files of other formats.

Several processes read a box each of the arrays, with checksums of every byte. The format is
safetensors (https://huggingface.co/docs/safetensors): a header with the place of each array,
followed by their bytes. The header also has a checksum of every piece of the arrays, and the
checkpoint has the checksum of the header. This proves that the bytes read are those that were
written, and that the file belongs to the checkpoint.
"""

import contextlib
import errno
import fcntl
import functools
import itertools
import json
import math
import os
import re
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, final

import google_crc32c
import numpy as np

from distributary.devices import job_programs
from distributary.errors import CheckpointError, ClusterError
from distributary.job import consensus

_Result = TypeVar("_Result")

_PIECE_BYTES = 4 << 20
_MAX_THREADS = 4
_FILE = re.compile(r"(arrays|worker-\d+|ps-\d+)\.safetensors")
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


#: A slice for each dim of an array, with a beginning and an end.
Box: TypeAlias = tuple[slice, ...]


@final
@dataclass(frozen=True, slots=True)
class SavedPart:
    """A part of an array in a checkpoint, which is an array of a file.

    Attributes:
        file: Name of the file in the folder of the checkpoint.
        checksum: Checksum of the header of the file.
        name: Name of the part in the file.
        begin: Place of its first element in the whole array, by dim.
        shape: Shape of the part.
    """

    file: str
    checksum: int
    name: str
    begin: Sequence[int]
    shape: Sequence[int]

    @property
    def box(self) -> Box:
        """The elements of the whole array that the part has."""
        return box_of(self.shape, self.begin)


def box_of(shape: Sequence[int], begin: Sequence[int] | None = None) -> Box:
    """Returns the box of an array of a shape that begins somewhere in another array."""
    begin = [0] * len(shape) if begin is None else begin
    return tuple([slice(b, b + n) for b, n in zip(begin, shape, strict=True)])


def common_box(one: Box, other: Box) -> Box | None:
    """Returns the elements that two boxes of one array have in common; None for none."""
    pairs = list(zip(one, other, strict=True))
    common = tuple([slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in pairs])
    return common if all(span.start < span.stop for span in common) else None


def _within(box: Box, outer: Box) -> Box:
    """Returns the place of a box inside of an array that holds the outer one."""
    return tuple(
        [slice(a.start - b.start, a.stop - b.start) for a, b in zip(box, outer, strict=True)]
    )


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


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> WrittenFile:
    """Writes arrays to a new file, and returns once it is on disk.

    Args:
        path: Path of the file.
        arrays: The arrays, by name. They must not change meanwhile.

    Raises:
        OSError: if the file cannot be written.
    """
    sources = {name: _bytes_of(np.ascontiguousarray(array)) for name, array in arrays.items()}
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
        header = _header(described, in_threads(calls))
        _write_all(descriptor, np.frombuffer(header, np.uint8), 0)
        os.fsync(descriptor)
    except BaseException:
        path.unlink()
        raise
    finally:
        os.close(descriptor)
    num_bytes = first + (ends[-1] if ends else 0)
    return WrittenFile(num_bytes, google_crc32c.value(header))


@final
class ArrayReader:
    """Reads boxes of the arrays of a checkpoint. Close it at the end.

    Args:
        path: Path of the checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stack = contextlib.ExitStack()
        self._files: dict[tuple[str, int], _ArrayFile] = {}

    def __enter__(self) -> "ArrayReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def check(self, boxes: Iterable[tuple[Box, Sequence[SavedPart]]]) -> None:
        """Checks that boxes can be read, without keeping their elements.

        Args:
            boxes: Each with the parts of its array.

        Raises:
            CheckpointError: if a box is not there, or differs from what was written.
        """
        with self._problems_told():
            calls = []
            for box, parts in boxes:
                for part, common in self._sources(box, parts):
                    calls += self._rows(part, common, None)
            in_threads(calls)

    def fill(self, target: np.ndarray, box: Box, parts: Sequence[SavedPart]) -> None:
        """Fills an array, contiguous in memory, with a box of an array that consists of `parts`.

        Raises:
            CheckpointError: as `check`.
        """
        with self._problems_told():
            calls = []
            for part, common in self._sources(box, parts):
                place = _within(common, box)
                if common[1:] == part.box[1:] == box[1:]:
                    calls += self._rows(part, common, target[place[0]] if place else target)
                else:  # the rows have other elements, too
                    of_rows = (*common[:1], *part.box[1:])
                    rows = np.empty([span.stop - span.start for span in of_rows], target.dtype)
                    in_threads(self._rows(part, common, rows))
                    target[place] = rows[_within(common, of_rows)]
            in_threads(calls)

    def _sources(self, box: Box, parts: Sequence[SavedPart]) -> list[tuple[SavedPart, Box]]:
        pairs = [(part, common_box(part.box, box)) for part in parts]
        sources = [(part, common) for part, common in pairs if common is not None]
        num_found = sum(_size(common) for _, common in sources)
        if num_found != _size(box):
            raise _UnreadableError(
                f"{parts} have {num_found} of the {_size(box)} elements of an array"
            )
        return sources

    def _rows(
        self, part: SavedPart, common: Box, target: np.ndarray | None
    ) -> list[Callable[[], None]]:
        """Returns calls that check all rows of a part that a box needs, and put them somewhere."""
        key = (part.file, part.checksum)
        if key not in self._files:
            self._files[key] = self._stack.enter_context(_opened(self._path, *key))
        if not part.shape:
            low, high, num_rows = 0, 1, 1
        else:
            rows = _within(common, part.box)[0]
            low, high, num_rows = rows.start, rows.stop, part.shape[0]
        data = None if target is None else _bytes_of(target)
        return self._files[key].calls(part.name, low, high, num_rows, data)

    @contextlib.contextmanager
    def _problems_told(self) -> Iterator[None]:
        try:
            yield
        except (OSError, _UnreadableError) as error:
            raise unreadable(self._path, str(error)) from None


def _size(box: Box) -> int:
    return math.prod(span.stop - span.start for span in box)


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
                sums = list(itertools.islice(checksums, len(_pieces(stop - start))))
                self._places[name] = (first + start, stop - start, sums)

    def calls(
        self, name: str, low_row: int, high_row: int, num_rows: int, target: np.ndarray | None
    ) -> list[Callable[[], None]]:
        """Returns calls that check rows of an array, and fill a target with their bytes."""
        if name not in self._places:
            raise _UnreadableError(f"its file {self._file} has no array {name!r}")
        first, size, checksums = self._places[name]
        row_bytes = size // num_rows
        start, stop = low_row * row_bytes, high_row * row_bytes
        if row_bytes * num_rows != size or (target is not None and target.size != stop - start):
            raise _UnreadableError(
                f"{name!r} in its file {self._file} has {size} bytes, which are not {num_rows} rows"
                " of its dtype"
            )

        def read_piece(low: int, high: int, checksum: int) -> None:
            """Reads and checks bytes `low` to `high` of the array, and copies the wanted ones."""
            is_whole = start <= low and high <= stop
            if target is not None and is_whole:
                piece = target[low - start : high - start]
            else:
                piece = np.empty(high - low, np.uint8)
            num_read = _read_all(self._descriptor, piece, first + low)
            if num_read != piece.size or google_crc32c.value(piece) != checksum:
                raise _UnreadableError(
                    f"its file {self._file} is damaged: bytes {first + low} to {first + high}, of"
                    f" {name!r}, do not have the checksum that was saved"
                )
            if target is not None and not is_whole:
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


def in_threads(calls: Sequence[Callable[[], _Result]]) -> list[_Result]:
    """Makes calls in several threads, and returns their results."""
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


# Single files of other formats: complete, written by one worker, perhaps with a checksum. Formats
# such as HDF5 ignore what follows their content.

_SEAL = b"\ndistributary crc32c %08x"
_WAIT_SECONDS = 600.0
_LOCK = ".lock"


def sync(path: Path) -> None:
    """Waits until a file or the names in a folder are on disk; some file systems sync no folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def complete_file(path: Path) -> Iterator[Path]:
    """Yields a path to write to; at the end, it replaces the file, or is removed after an error."""
    path = path.resolve()  # of a link, so that its target is replaced and not the link
    try:
        with _beside(path) as temporary:
            yield temporary
            sync(temporary)
            os.replace(temporary, path)
            sync(path.parent)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        problem = CheckpointError(
            f"{path} was not saved: the disk is full ({os.strerror(error.errno)}). What was there"
            " before is kept."
        )
        problem.errno = error.errno
        raise problem from None


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """Yields a name that nobody else has; first removes what killed writers on this host have left.

    A writer holds the lock of its name. Its process id would say nothing: other containers have
    ids of their own, and perhaps the same host name.
    """
    # The name keeps its ending, from which Keras knows the format.
    stem, dot, end = path.name.partition(".")
    start, end = f".{stem}.distributary-{socket.gethostname()}-", f"{dot}{end}"
    pattern = re.compile(rf"({re.escape(start)}[0-9a-f]{{8}}{re.escape(end)}){_LOCK}")
    for match in filter(None, map(pattern.fullmatch, os.listdir(path.parent))):
        with contextlib.suppress(OSError), path.with_name(match[0]).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an error while its writer is alive
            _remove(path.with_name(match[1]))
    temporary = path.with_name(f"{start}{secrets.token_hex(4)}{end}")
    with path.with_name(temporary.name + _LOCK).open("x") as lock:
        try:
            # Waits for one who finds the lock before it is held, and takes its writer for killed.
            with contextlib.suppress(OSError):  # where there are no locks, all that is left stays
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield temporary
        finally:
            _remove(temporary)


def _remove(temporary: Path) -> None:
    with contextlib.suppress(OSError):
        # HDF5 has the file open. If it cannot write the rest, it crashes when this process ends.
        os.truncate(temporary, 0)
    for path in (temporary, temporary.with_name(temporary.name + _LOCK)):
        with contextlib.suppress(OSError):  # nothing may take the place of the writer's own error
            path.unlink()


def write_once(path: str, place: str, write: Callable[[], None]) -> None:
    """Calls `write` on the first worker of a job, and on those that write to another place.

    All of them call this, or the first one alone. There is no collective, so it waits for
    nobody.

    Args:
        path: Path of the file, as the user has given it.
        place: The same for all workers that mean the same file.
        write: Writes the file.

    Raises:
        ClusterError: on another worker, if the first one writes nothing in time.
        OSError: on another worker with the same place, if the first one cannot write.
    """
    job = consensus()
    assert job is not None
    # The first worker may save files that the others do not. So they ask for files of this
    # position.
    position = job_programs.position
    topic = f"file {job.count(f'files at {position}')} saved at place {position}"
    if job.number == 0:
        result: dict[str, Any] = {"path": place, "error": None}
        try:
            write()
        except BaseException as error:
            result["error"] = f"{type(error).__name__}: {error}"
            raise
        finally:
            job.send_to_all(topic, result)
        return
    try:
        result = job.receive(topic, _WAIT_SECONDS)
    except TimeoutError as error:
        raise ClusterError(
            f"Saving {path!r}: worker 0 has not saved anything within {_WAIT_SECONDS:g} s."
            " Call save on all workers, or on the first one alone."
        ) from error
    if result["path"] != place:
        write()
    elif result["error"] is not None:
        raise OSError(f"Worker 0 could not save {path!r}: {result['error']}")


def seal(path: Path) -> None:
    """Appends its checksum to a file."""
    checksum = _SEAL % _checksum(path)
    with path.open("ab") as file:
        file.write(checksum)


def is_sealed(path: Path) -> bool:
    """Returns whether there is a file, and it ends with a checksum."""
    return _seal_of(path) is not None


def is_damaged(path: Path) -> bool:
    """Returns whether a sealed file has changed, or is not complete."""
    seal = _seal_of(path)
    return seal is not None and seal != _SEAL % _checksum(path, len(seal))


def _seal_of(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            file.seek(-len(_SEAL % 0), os.SEEK_END)
            seal = file.read()
    except OSError:
        return None
    return seal if seal.startswith(_SEAL.partition(b"%")[0]) else None


def _checksum(path: Path, num_last_bytes: int = 0) -> int:
    """Returns the checksum of a file, except for its last bytes."""
    left, checksum = path.stat().st_size - num_last_bytes, 0
    with path.open("rb") as file:
        while data := file.read(min(left, _PIECE_BYTES)):
            checksum, left = google_crc32c.extend(checksum, data), left - len(data)
    return checksum
