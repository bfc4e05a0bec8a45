"""Datasets of the records of files: text, TFRecord, records of one size."""

import functools
import gzip
import io
import itertools
import pathlib
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any, final

from google_crc32c import value as crc32c

from distributary.data._dataset import Dataset
from distributary.data._nodes import FileSource, IteratedStream, Path, Stream
from distributary.data._sources import FilePaths, file_names
from distributary.data._structure import TensorSpec
from distributary.devices import Nest
from distributary.errors import InvalidValueError

# Files of records: how they are opened, and TFRecord's format.

_HEADER = struct.Struct("<QI")  # size of the data, checksum of these eight bytes
_FOOTER = struct.Struct("<I")  # checksum of the data
# Longer data is read in pieces, so that a wrong size ends at the end of the file.
_MAX_READ_BYTES = 1 << 24


def _open_zlib(name: str) -> IO[bytes]:
    return io.BytesIO(zlib.decompress(pathlib.Path(name).read_bytes()))


# All but `open` itself read bytes by default.
OPENERS: dict[str, Callable[[str], Any]] = {
    "": functools.partial(open, mode="rb"),
    "GZIP": gzip.open,
    "ZLIB": _open_zlib,
}


Parse = Callable[[IO[bytes], str, str], Iterator[bytes]]
"""Yields the records of a file; its name and compression are for errors."""


def read_file(what: str, name: str, compression: str, parse: Parse) -> Iterator[bytes]:
    """Yields the records of a file.

    Raises:
        InvalidValueError: if it cannot be decompressed, or `parse` says so.
    """
    try:
        with OPENERS[compression](name) as file:
            yield from parse(file, name, compression)
    except (EOFError, OSError, zlib.error) as error:
        if isinstance(error, OSError) and error.errno is not None:  # from the system
            raise
        raise InvalidValueError(
            f"{what}: {name!r} cannot be decompressed: {error}. It is damaged, cut off, or"
            f" not compressed with {compression!r}."
        ) from error


def framed(record: bytes) -> bytes:
    """Returns a record as it stands in a TFRecord file."""
    size = struct.pack("<Q", len(record))
    checksums = _masked(crc32c(size)), _masked(crc32c(bytes(record)))
    return b"".join((size, _FOOTER.pack(checksums[0]), record, _FOOTER.pack(checksums[1])))


def records(file: IO[bytes], name: str, compression: str) -> Iterator[bytes]:
    """Yields the records of a TFRecord file.

    Raises:
        InvalidValueError: for a record that is damaged.

    Source: `tensorflow/core/lib/io/record_reader.cc`.
    """
    position = number = 0

    def damaged(how: str) -> InvalidValueError:
        return InvalidValueError(
            f"TFRecordDataset: record {number} of {name!r}, at byte {position}, {how}. Check"
            f" that it is a TFRecord file with compression_type={compression!r}; if it is,"
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


# Datasets


@final
@dataclass(frozen=True, eq=False)
class RecordFiles(FileSource):
    """The records of files, one file after the other.

    Attributes:
        files: Names of the files.
        read: Returns the records of a file by its name.
        name: Name for labels.
    """

    files: tuple[str, ...]
    read: Callable[[str], Iterator[bytes]]
    name: str
    batched = False

    def elements(self, path: Path) -> Stream:
        return IteratedStream(itertools.chain.from_iterable(map(self.read, self.files)))

    def spec(self) -> Nest:
        return TensorSpec((), object)

    def label(self) -> str:
        return f"{self.name}({len(self.files)} files)"


def _record_files(
    what: str, filenames: FilePaths, compression_type: str | None, parse: Parse
) -> RecordFiles:
    """Returns the node of the records of files, which `parse` yields."""
    files = file_names(filenames, what)
    compression = compression_type or ""
    if compression not in OPENERS:
        raise InvalidValueError(
            f"{what}: compression_type is {compression_type!r}, expected one of {sorted(OPENERS)}."
        )
    read = functools.partial(read_file, what, compression=compression, parse=parse)
    return RecordFiles(files, read, what)


class _RecordDataset(Dataset):
    """Base class of the records of files.

    Raises:
        InvalidValueError: for an unknown compression and, while reading, for damaged files.
    """

    _parse: Parse

    def __init__(
        self,
        filenames: FilePaths,
        compression_type: str | None = None,
        buffer_size: int | None = None,
        num_parallel_reads: int | None = None,
        name: str | None = None,
    ) -> None:
        what = next(cls.__name__ for cls in type(self).__mro__ if "_parse" in vars(cls))
        super().__init__(_record_files(what, filenames, compression_type, self._parse))


class TextLineDataset(_RecordDataset):
    """The lines of text files, as bytes without line ends.

    Args:
        filenames: Name of a file, or a list of names.
        compression_type: "GZIP" or "ZLIB"; None or "" for none.
        buffer_size: No effect.
        num_parallel_reads: No effect: files are read one after the other; use `interleave`.
        name: No effect.

    Source: `tf.data.TextLineDataset`.
    """

    @staticmethod
    def _parse(file: IO[bytes], name: str, compression: str) -> Iterator[bytes]:
        for line in file:
            yield line.removesuffix(b"\n").removesuffix(b"\r")


class TFRecordDataset(_RecordDataset):
    """The records of TFRecord files, as bytes.

    The lengths and contents of all records are compared with their checksums. A file that is cut
    off between two records looks like a shorter file, so this is not noticed.

    Args:
        filenames: Name of a file, or a list of names.
        compression_type: "GZIP" or "ZLIB"; None or "" for none.
        buffer_size: No effect.
        num_parallel_reads: No effect: files are read one after the other; use `interleave`.
        name: No effect.

    Source: `tf.data.TFRecordDataset`; `tensorflow/core/lib/io/record_reader.cc`.
    """

    _parse = staticmethod(records)


class FixedLengthRecordDataset(Dataset):
    """The records of files in which every record has the same number of bytes.

    Args:
        filenames: Name of a file, or a list of names.
        record_bytes: Number of bytes of a record.
        header_bytes: Number of bytes to skip at the beginning of every file.
        footer_bytes: Number of bytes to skip at the end of every file.
        buffer_size: No effect.
        compression_type: "GZIP" or "ZLIB"; None or "" for none.
        num_parallel_reads: No effect: files are read one after the other; use `interleave`.
        name: No effect.

    Raises:
        InvalidValueError: while reading, for a file with a part of a record.

    Source: `tf.data.FixedLengthRecordDataset`.
    """

    def __init__(
        self,
        filenames: FilePaths,
        record_bytes: int,
        header_bytes: int | None = None,
        footer_bytes: int | None = None,
        buffer_size: int | None = None,
        compression_type: str | None = None,
        num_parallel_reads: int | None = None,
        name: str | None = None,
    ) -> None:
        what = "FixedLengthRecordDataset"
        record, header, footer = int(record_bytes), int(header_bytes or 0), int(footer_bytes or 0)
        if record < 1 or header < 0 or footer < 0:
            raise InvalidValueError(
                f"{what}: record_bytes is {record_bytes}, header_bytes {header_bytes}, footer_bytes"
                f" {footer_bytes}; expected 1 or more, and 0 or more."
            )

        def parse(file: IO[bytes], name: str, compression: str) -> Iterator[bytes]:
            skipped = len(file.read(header))
            data = file.read(record + footer)
            while len(data) == record + footer:
                yield data[:record]
                data = data[record:] + file.read(record)
            if skipped < header or len(data) != footer:
                raise InvalidValueError(
                    f"{what}: {name!r} has {len(data) - footer} bytes more than whole records of"
                    f" {record} bytes, after {header} and before {footer} bytes. Check these"
                    " numbers."
                )

        super().__init__(_record_files(what, filenames, compression_type, parse))
