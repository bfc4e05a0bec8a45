"""Datasets from files: NumPy arrays, lines of text, TFRecord, Parquet and Arrow."""

import bz2
import errno
import functools
import glob
import gzip
import io
import lzma
import math
import os
import pathlib
import sys
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from distributary.datasets._nodes import Node
from distributary.datasets._options import UNKNOWN_CARDINALITY
from distributary.datasets._order_streams import Chained
from distributary.datasets._rows import ChainedRows
from distributary.datasets._sources import IteratedStream, RowsNode, slices
from distributary.datasets._streams import Path, Stream
from distributary.datasets._structure import Block, TensorSpec
from distributary.datasets._tf_records import records_of
from distributary.errors import InvalidTypeError, InvalidValueError, MissingPackageError


def file_names(given: Any, what: str) -> tuple[str, ...]:
    """Returns one or several names of files as a tuple.

    Raises:
        InvalidTypeError: if they are not names.
        InvalidValueError: if there are none, or one does not exist.
    """
    if isinstance(given, (str, os.PathLike)):
        given = [given]
    elif isinstance(given, np.ndarray):
        given = given.tolist() if given.ndim else [given.item()]
    try:
        names = tuple(os.fsdecode(name) for name in given)
    except TypeError:
        raise InvalidTypeError(
            f"{what}: filenames is {given!r}, expected the name of a file, or a list of names."
        ) from None
    if not names:
        raise InvalidValueError(f"{what}: the list of files is empty.")
    for name in names:
        if not os.path.isfile(name):
            raise InvalidValueError(
                f"{what}: the file {name!r} does not exist (in {os.getcwd()}). For a pattern use"
                " Dataset.list_files."
            )
    return names


def matching_files(patterns: Any) -> tuple[str, ...]:
    """Returns the files that match a glob pattern, or one of several, sorted by name.

    Raises:
        InvalidValueError: if there are none.
    """
    if isinstance(patterns, (str, os.PathLike)):
        patterns = [patterns]
    names = {
        name
        for pattern in patterns
        for name in glob.glob(os.fsdecode(pattern), recursive=True)
        if os.path.isfile(name)
    }
    if not names:
        raise InvalidValueError(
            f"list_files: no file matches {[os.fsdecode(p) for p in patterns]} (in {os.getcwd()})."
        )
    return tuple(sorted(names))


@final
@dataclass(frozen=True, eq=False)
class FileNames(RowsNode):
    """Names of files."""

    files: tuple[str, ...]

    def cardinality(self) -> int:
        return len(self.files)

    def row(self, number: int) -> Any:
        return self.files[number]

    def rows(self, numbers: np.ndarray) -> Block:
        return np.array([self.files[number] for number in numbers])

    def spec(self) -> Any:
        return TensorSpec((), object)

    def is_batched(self) -> bool | None:
        return False

    def label(self) -> str:
        return f"list_files({len(self.files)})"


# NumPy files


@final
class _NpyArray:
    """The array of a `.npy` file, whose rows are read as they are needed."""

    def __init__(self, name: str, memory: "_Memory") -> None:
        self.name = name
        self._memory = memory
        with open(name, "rb") as file:
            try:
                version = np.lib.format.read_magic(file)
                read = {
                    (1, 0): np.lib.format.read_array_header_1_0,
                    (2, 0): np.lib.format.read_array_header_2_0,
                }[version]
                self.shape, fortran_order, self.dtype = read(file)
            except OSError:
                raise
            except Exception as error:  # NumPy passes on whatever its header parser raises
                raise InvalidValueError(
                    f"from_npy: {name!r} is not a .npy file that NumPy can map: {error!r}."
                ) from error
            self._offset = file.tell()
            size = os.fstat(file.fileno()).st_size
        if self.dtype.hasobject:
            raise InvalidValueError(
                f"from_npy: {name!r} holds Python objects. Reading them would mean unpickling them,"
                " which can run code. Save arrays of numbers."
            )
        if not self.shape:
            raise InvalidValueError(f"from_npy: {name!r} holds a scalar, which has no rows.")
        self._row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        expected = self._offset + self.shape[0] * self._row_bytes
        if size != expected or min(self.shape) < 0:
            raise InvalidValueError(
                f"from_npy: {name!r} has {size} bytes, but its header promises {expected} for shape"
                f" {self.shape} of {self.dtype}. The file is"
                f" {'cut off' if size < expected else 'damaged, or holds more than one array'}."
            )
        # Rows in Fortran order are not contiguous, and empty rows have no place in the file.
        self._is_readable = not fortran_order and self._row_bytes > 0
        self._map: Any = None
        self._descriptor: int | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self.shape[0])

    def __del__(self) -> None:
        descriptor: int | None = getattr(self, "_descriptor", None)
        if descriptor is not None:
            os.close(descriptor)

    def spec(self) -> TensorSpec:
        """Returns the spec of a row."""
        return TensorSpec(self.shape[1:], self.dtype)

    def row(self, number: int) -> Any:
        """Returns one row, in memory of its own."""
        return self.part(number, 1)[0]

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        """Returns rows by number, in memory of their own."""
        return self._mapped().take(numbers, axis=0)

    def part(self, start: int, count: int) -> np.ndarray:
        """Returns consecutive rows, in memory of their own."""
        if self._is_readable:
            return self._read(start, count)
        return self._mapped()[start : start + count].copy()

    def _mapped(self) -> np.ndarray:
        if self._map is None:
            self._map = np.asarray(np.load(self.name, mmap_mode="r"))
        mapped: np.ndarray = self._map
        return mapped

    def _read(self, start: int, count: int) -> np.ndarray:
        # Faster than copying from a memory map, which causes a page fault for every page.
        if self._descriptor is None:
            with self._lock:
                if self._descriptor is None:
                    self._descriptor = os.open(self.name, os.O_RDONLY)
        rows = self._memory.get(count * self._row_bytes)
        left = memoryview(rows.data)
        position = self._offset + start * self._row_bytes
        while left:
            done = os.preadv(self._descriptor, [left], position)
            if not done:
                raise InvalidValueError(
                    f"from_npy: {self.name!r} became shorter while it was being read."
                )
            left, position = left[done:], position + done
        return rows.view(self.dtype).reshape(count, *self.shape[1:])


@final
class _Memory:
    """The memory of batches that nobody refers to any more, kept for later batches.

    The system fills new memory with zeros first. That takes as long as reading a file that is in
    the page cache.
    """

    def __init__(self) -> None:
        self._blocks: list[np.ndarray] = []
        self._lock = threading.Lock()

    def get(self, num_bytes: int) -> np.ndarray:
        """Returns an array uint8 `[num_bytes]` that only the caller refers to."""
        with self._lock:
            # An array that shares a block's memory holds a reference to the block.
            counts = _num_references(self._blocks)
            for block, count in zip(self._blocks, counts, strict=True):
                if block.nbytes == num_bytes and count == _UNUSED:
                    return block[:]
            block = np.empty(num_bytes, np.uint8)
            if num_bytes >= _MIN_KEPT_BYTES:
                self._blocks = [*self._blocks[1 - _MAX_KEPT :], block]
            return block[:]


def _num_references(blocks: list[np.ndarray]) -> list[int]:
    return [sys.getrefcount(block) for block in blocks]


# References of a block that only a list refers to. It depends on the version of Python.
_UNUSED = _num_references([np.empty(1, np.uint8)])[0]

# Smaller blocks come from memory that the process has already.
_MIN_KEPT_BYTES = 1 << 18
# One batch is in use, one is ready, one is being made, and one belongs to a step that still runs.
_MAX_KEPT = 4


def _open_numpy(name: str, memory: _Memory) -> Any:
    """Returns the rows of a `.npy` file, or of the arrays in a `.npz` file as dicts."""
    if not name.endswith(".npz"):
        return _NpyArray(name, memory)
    arrays = _arrays_of_archive(name)
    sizes = {array.shape[:1] for array in arrays.values()}
    if len(sizes) != 1 or sizes == {()}:
        shapes = {key: array.shape for key, array in arrays.items()}
        raise InvalidValueError(
            f"from_npy: {name!r} holds arrays of shapes {shapes}; all must have the same number of"
            " rows (dim 0)."
        )
    return slices(arrays)


def _arrays_of_archive(name: str) -> dict[str, np.ndarray]:
    arrays = {}
    try:
        with zipfile.ZipFile(name) as archive:
            # A damaged directory size hides members. NumPy writes no comment, so this record is
            # last.
            with open(name, "rb") as file:
                file.seek(-22, os.SEEK_END)
                tail = file.read()
            count = int.from_bytes(tail[10:12], "little")
            if tail[:4] == b"PK\5\6" and count not in (len(archive.namelist()), 0xFFFF):
                raise ValueError(f"it lists {len(archive.namelist())} of {count} members")
            for member in archive.infolist():
                with archive.open(member) as content:
                    arrays[member.filename.removesuffix(".npy")] = np.lib.format.read_array(content)
                    if content.read():  # the checksum is compared at the end
                        raise ValueError(f"{member.filename} is longer than its header says")
    # Damaged archives and headers raise many kinds of errors, for example because of endless arrays
    # or positions before the beginning.
    except Exception as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        raise InvalidValueError(
            f"from_npy: {name!r} is not a .npz file of arrays of numbers, or it is damaged:"
            f" {error!r}. Arrays of Python objects are not read, as that can run code."
        ) from error
    return arrays


@final
@dataclass(frozen=True, eq=False)
class NumpyFiles(RowsNode):
    """The rows of `.npy` files, or of the arrays in `.npz` files."""

    files: tuple[str, ...]
    # A file by its name, and the rows of several files together by the tuple of their names.
    _opened: dict[Any, Any] = field(default_factory=dict)
    _memory: _Memory = field(default_factory=_Memory)

    def _open(self, name: str) -> Any:
        if name not in self._opened:
            self._opened[name] = _open_numpy(name, self._memory)
        return self._opened[name]

    def source(self) -> ChainedRows:
        if self.files not in self._opened:
            self._opened[self.files] = ChainedRows([self._open(name) for name in self.files])
        rows: ChainedRows = self._opened[self.files]
        return rows

    def cardinality(self) -> int:
        return len(self.source())

    def check(self) -> None:
        """Reads the headers of all files, and checks that their arrays match.

        Raises:
            InvalidValueError: if files cannot be used or contain different arrays.
        """
        first = self.spec()
        for name in self.files:
            own = self._open(name).spec()
            if own != first:
                raise InvalidValueError(
                    f"from_npy: rows of {name!r} are {own}, but those of {self.files[0]!r} are"
                    f" {first}."
                )

    def spec(self) -> Any:
        return self._open(self.files[0]).spec()

    def is_batched(self) -> bool | None:
        return False

    def label(self) -> str:
        return f"npy({len(self)} rows, {len(self.files)} files)"


# Records


@final
@dataclass(frozen=True, eq=False)
class RecordFiles(Node):
    """The records of files, one file after the other.

    Attributes:
        files: Names of the files.
        read: Returns the records of a file by its name.
        name: Name for labels.
        element: Spec of a record; None to find out from one.
    """

    files: tuple[str, ...]
    read: Callable[[str], Iterator[Any]]
    name: str
    element: Any = None

    def cardinality(self) -> int:
        return UNKNOWN_CARDINALITY

    def elements(self, path: Path) -> Stream:
        def nth(number: int) -> Stream | None:
            if number == len(self.files):
                return None
            return IteratedStream(self.read(self.files[number]), lambda record, _: record)

        return Chained(nth, False)

    def spec(self) -> Any:
        return super().spec() if self.element is None else self.element

    def is_batched(self) -> bool | None:
        return False

    def label(self) -> str:
        return f"{self.name}({len(self.files)} files)"


def _open_zlib(name: str) -> Any:
    return io.BytesIO(zlib.decompress(pathlib.Path(name).read_bytes()))


# All but `open` itself read bytes by default.
_OPENERS: dict[str, Callable[[str], Any]] = {
    "": functools.partial(open, mode="rb"),
    "GZIP": gzip.open,
    "ZLIB": _open_zlib,
    "BZIP2": bz2.open,
    "XZ": lzma.open,
}


def opener(compression_type: str | None, what: str) -> Callable[[str], Any]:
    """Returns the function that opens files with a compression."""
    try:
        return _OPENERS[compression_type or ""]
    except KeyError:
        raise InvalidValueError(
            f"{what}: compression_type is {compression_type!r}, expected one of {sorted(_OPENERS)}."
        ) from None


@contextmanager
def _decompressed(what: str, name: str, compression_type: str | None) -> Iterator[None]:
    """Runs the block, and names the file if its compressed data turns out to be damaged."""
    try:
        yield
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # from the system
            raise
        raise InvalidValueError(
            f"{what}: {name!r} cannot be decompressed: {error}. It is damaged, cut off, or not"
            f" compressed with {compression_type!r}."
        ) from error


def text_lines(files: tuple[str, ...], compression_type: str | None) -> Node:
    """Returns the lines of text files, as bytes without line ends."""
    open_file = opener(compression_type, "TextLineDataset")

    def read(name: str) -> Iterator[bytes]:
        with _decompressed("TextLineDataset", name, compression_type), open_file(name) as file:
            for line in file:
                yield line.removesuffix(b"\n").removesuffix(b"\r")

    return RecordFiles(files, read, "text lines", TensorSpec((), object))


def tf_records(files: tuple[str, ...], compression_type: str | None) -> Node:
    """Returns the records of TFRecord files, as bytes."""
    open_file = opener(compression_type, "TFRecordDataset")

    def read(name: str) -> Iterator[bytes]:
        with _decompressed("TFRecordDataset", name, compression_type), open_file(name) as file:
            yield from records_of(file, name, compression_type)

    return RecordFiles(files, read, "tfrecord", TensorSpec((), object))


# Tables


def parquet_rows(files: tuple[str, ...], columns: Sequence[str] | None) -> Node:
    """Returns the rows of Parquet or Arrow files, as dicts from column names to values."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingPackageError("ParquetDataset needs pyarrow: pip install pyarrow") from None

    def batches(name: str) -> Iterator[Any]:
        if name.endswith((".arrow", ".feather", ".ipc")):
            with pyarrow.memory_map(name) as file:
                reader = pyarrow.ipc.open_file(file)
                for i in range(reader.num_record_batches):
                    batch = reader.get_batch(i)
                    yield batch if columns is None else batch.select(list(columns))
        else:
            with pyarrow.parquet.ParquetFile(name, page_checksum_verification=True) as file:
                yield from file.iter_batches(columns=None if columns is None else list(columns))

    def read_batches(name: str) -> Iterator[Any]:
        try:
            yield from batches(name)
        except (pyarrow.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise InvalidValueError(
                f"ParquetDataset: {name!r} cannot be read: {error}. It is damaged, cut off, or does"
                " not have these columns."
            ) from error

    def read(name: str) -> Iterator[Any]:
        for batch in read_batches(name):
            yield {
                column: _column(name, column, values)
                for column, values in zip(batch.schema.names, batch.columns, strict=True)
            }

    return RecordFiles(files, read, "parquet")


def _column(name: str, column: str, values: Any) -> np.ndarray:
    import pyarrow

    if values.null_count:
        raise InvalidValueError(
            f"ParquetDataset: column {column!r} of {name!r} has missing values, which arrays"
            " cannot hold. Fill or drop them, or leave out the column with columns=[...]."
        )
    kind = values.type
    if pyarrow.types.is_fixed_size_list(kind):
        flat = values.flatten().to_numpy(zero_copy_only=False)
        return flat.reshape(len(values), kind.list_size)
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        sizes = np.diff(values.offsets.to_numpy())
        if len(set(sizes.tolist())) > 1:
            raise InvalidValueError(
                f"ParquetDataset: column {column!r} of {name!r} holds lists of different lengths."
                " Write lists of one length, or leave out the column with columns=[...]."
            )
        flat = values.flatten().to_numpy(zero_copy_only=False)
        return flat.reshape(len(values), -1)
    return values.to_numpy(zero_copy_only=False)
