"""Datasets of the records of files: lines of text, TFRecord, and rows of Parquet and Arrow."""

import abc
import bz2
import functools
import gzip
import io
import lzma
import pathlib
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, ClassVar, final

import numpy as np

from distributary._types import Nest
from distributary.datasets._batching import Unbatch
from distributary.datasets._dataset import Dataset
from distributary.datasets._file_names import FilePaths, file_names
from distributary.datasets._nodes import FileSource
from distributary.datasets._options import UNKNOWN_CARDINALITY
from distributary.datasets._streams import Chained, IteratedStream, Path, Stream
from distributary.datasets._structure import TensorSpec
from distributary.errors import InvalidValueError, MissingPackageError

if TYPE_CHECKING:
    import pyarrow

_HEADER = struct.Struct("<QI")  # size of the data, checksum of these eight bytes
_FOOTER = struct.Struct("<I")  # checksum of the data
# Longer data is read in pieces, so that a wrong size ends at the end of the file.
_MAX_READ_BYTES = 1 << 24


@final
@dataclass(frozen=True, eq=False)
class RecordFiles(FileSource):
    """The records of files, one file after the other.

    Attributes:
        files: Names of the files.
        read: Returns the records of a file by its name.
        name: Name for labels.
        element: Spec of a record; None to find out from one.
    """

    files: tuple[str, ...]
    read: Callable[[str], Iterator[Nest]]
    name: str
    element: TensorSpec | None = None
    batched = False

    def cardinality(self) -> int:
        return UNKNOWN_CARDINALITY

    def elements(self, path: Path) -> Stream:
        def nth(number: int) -> Stream | None:
            if number == len(self.files):
                return None
            return IteratedStream(self.read(self.files[number]))

        return Chained(nth)

    def spec(self) -> Nest:
        return super().spec() if self.element is None else self.element

    def label(self) -> str:
        return f"{self.name}({len(self.files)} files)"


def _open_zlib(name: str) -> IO[bytes]:
    return io.BytesIO(zlib.decompress(pathlib.Path(name).read_bytes()))


# All but `open` itself read bytes by default.
_OPENERS: dict[str, Callable[[str], Any]] = {
    "": functools.partial(open, mode="rb"),
    "GZIP": gzip.open,
    "ZLIB": _open_zlib,
    "BZIP2": bz2.open,
    "XZ": lzma.open,
}


class _RecordDataset(Dataset):
    """Base class of the records of files.

    Raises:
        InvalidValueError: for an unknown compression and, while reading, for damaged files.
    """

    _label: ClassVar[str]

    @staticmethod
    @abc.abstractmethod
    def _parse(file: IO[bytes], name: str, compression_type: str | None) -> Iterator[bytes]:
        """Yields the records of a file; its name and compression are for errors."""

    def __init__(
        self,
        filenames: FilePaths,
        compression_type: str | None = None,
        buffer_size: int | None = None,
        num_parallel_reads: int | None = None,
        name: str | None = None,
    ) -> None:
        what, parse = type(self).__name__, self._parse
        files = file_names(filenames, what)
        open_file = _OPENERS.get(compression_type or "")
        if open_file is None:
            raise InvalidValueError(
                f"{what}: compression_type is {compression_type!r}, expected one of"
                f" {sorted(_OPENERS)}."
            )

        def read(name: str) -> Iterator[bytes]:
            try:
                with open_file(name) as file:
                    yield from parse(file, name, compression_type)
            except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
                if isinstance(error, OSError) and error.errno is not None:  # from the system
                    raise
                raise InvalidValueError(
                    f"{what}: {name!r} cannot be decompressed: {error}. It is damaged, cut off, or"
                    f" not compressed with {compression_type!r}."
                ) from error

        super().__init__(RecordFiles(files, read, self._label, TensorSpec((), object)))


class TextLineDataset(_RecordDataset):
    """The lines of text files, as bytes without line ends.

    Args:
        filenames: Name of a file, or a list of names.
        compression_type: "GZIP", "ZLIB", "BZIP2" or "XZ"; None or "" for none.
        buffer_size: No effect.
        num_parallel_reads: No effect: files are read one after the other; use `interleave`.
        name: No effect.

    Source: `tf.data.TextLineDataset`.
    """

    _label = "text lines"

    @staticmethod
    def _parse(file: IO[bytes], name: str, compression_type: str | None) -> Iterator[bytes]:
        for line in file:
            yield line.removesuffix(b"\n").removesuffix(b"\r")


class TFRecordDataset(_RecordDataset):
    """The records of TFRecord files, as bytes.

    The lengths and contents of all records are compared with their checksums. A file that is cut
    off between two records looks like a shorter file, so this is not noticed.

    Args:
        filenames: Name of a file, or a list of names.
        compression_type: "GZIP", "ZLIB", "BZIP2" or "XZ"; None or "" for none.
        buffer_size: No effect.
        num_parallel_reads: No effect: files are read one after the other; use `interleave`.
        name: No effect.

    Source: `tf.data.TFRecordDataset`; `tensorflow/core/lib/io/record_reader.cc`.
    """

    _label = "tfrecord"

    @staticmethod
    def _parse(file: IO[bytes], name: str, compression_type: str | None) -> Iterator[bytes]:
        from google_crc32c import value as crc32c

        position = number = 0

        def damaged(how: str) -> InvalidValueError:
            return InvalidValueError(
                f"TFRecordDataset: record {number} of {name!r}, at byte {position}, {how}. Check"
                f" that it is a TFRecord file with compression_type={compression_type!r}; if it is,"
                " write or copy it again."
            )

        while header := file.read(_HEADER.size):
            if len(header) < _HEADER.size:
                there = len(header)
                raise damaged(
                    f"is cut off: its length and checksum have {there} of {_HEADER.size} bytes"
                )
            size, checksum = _HEADER.unpack(header)
            if _masked(crc32c(header[:8])) != checksum:
                raise damaged(f"has a damaged length, {size}: its checksum differs")
            data = _read(file, size)
            footer = file.read(_FOOTER.size)
            if len(data) < size or len(footer) < _FOOTER.size:
                there = len(data) + len(footer)
                raise damaged(f"is cut off: it has {there} of {size + _FOOTER.size} bytes")
            if _masked(crc32c(data)) != _FOOTER.unpack(footer)[0]:
                raise damaged(f"is damaged: the checksum of its {size} bytes differs")
            yield data
            position += _HEADER.size + size + _FOOTER.size
            number += 1


def _masked(crc: int) -> int:
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _read(file: IO[bytes], size: int) -> bytes:
    """Reads up to `size` bytes, and takes no more memory than the file needs."""
    if size <= _MAX_READ_BYTES:
        return file.read(size)
    pieces = []
    while size and (piece := file.read(min(size, _MAX_READ_BYTES))):
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


class ParquetDataset(Dataset):
    """The rows of Parquet or Arrow IPC files, as dicts from column names to values.

    Needs pyarrow.

    Args:
        filenames: Name of a file, or a list of names. Files that end in `.arrow`, `.feather` and
            `.ipc` are Arrow files.
        columns: Names of the columns to read; None for all.

    Raises:
        MissingPackageError: if pyarrow is not installed.
        InvalidValueError: while reading, for missing values and lists of different lengths.
    """

    def __init__(self, filenames: FilePaths, columns: Sequence[str] | None = None) -> None:
        files = file_names(filenames, "ParquetDataset")
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise MissingPackageError("ParquetDataset needs pyarrow: pip install pyarrow") from None
        wanted = None if columns is None else list(columns)

        def batches(name: str) -> "Iterator[pyarrow.RecordBatch]":
            try:
                if name.endswith((".arrow", ".feather", ".ipc")):
                    with pyarrow.memory_map(name) as file:
                        reader = pyarrow.ipc.open_file(file)
                        for i in range(reader.num_record_batches):
                            batch = reader.get_batch(i)
                            yield batch if wanted is None else batch.select(wanted)
                else:
                    with pyarrow.parquet.ParquetFile(name, page_checksum_verification=True) as file:
                        yield from file.iter_batches(columns=wanted)
            except (pyarrow.ArrowException, OSError) as error:
                if isinstance(error, OSError) and error.errno is not None:  # from the system
                    raise
                raise InvalidValueError(
                    f"ParquetDataset: {name!r} cannot be read: {error}. It is damaged, cut off, or"
                    " does not have these columns."
                ) from error

        def read(name: str) -> Iterator[dict[str, np.ndarray]]:
            for batch in batches(name):
                columns = zip(batch.schema.names, batch.columns, strict=True)
                yield {column: _array(name, column, values) for column, values in columns}

        super().__init__(Unbatch(RecordFiles(files, read, "parquet")))


def _array(name: str, column: str, values: "pyarrow.Array") -> np.ndarray:
    """Returns the values of a column as an array `[row, ...]`."""
    from pyarrow import types

    if values.null_count:
        raise InvalidValueError(
            f"ParquetDataset: column {column!r} of {name!r} has missing values, which arrays"
            " cannot hold. Fill or drop them, or leave out the column with columns=[...]."
        )
    kind = values.type
    num_items = kind.list_size if types.is_fixed_size_list(kind) else -1
    if types.is_list(kind) or types.is_large_list(kind):
        if len(np.unique(np.diff(values.offsets.to_numpy()))) > 1:
            raise InvalidValueError(
                f"ParquetDataset: column {column!r} of {name!r} holds lists of different lengths."
                " Write lists of one length, or leave out the column with columns=[...]."
            )
    elif num_items < 0:
        return values.to_numpy(zero_copy_only=False)
    return values.flatten().to_numpy(zero_copy_only=False).reshape(len(values), num_items)
