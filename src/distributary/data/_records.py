"""Files of records: how they are opened, and TFRecord's format."""

import functools
import gzip
import io
import pathlib
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any

from google_crc32c import value as crc32c

from distributary.errors import InvalidValueError

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
