"""The format of TFRecord files."""

import struct
from collections.abc import Iterator
from typing import Any

from distributary.errors import InvalidValueError

_HEADER = struct.Struct("<QI")  # size of the data, checksum of these eight bytes
_FOOTER = struct.Struct("<I")  # checksum of the data
# Longer data is read in pieces, so that a wrong size ends at the end of the file.
_MAX_READ_BYTES = 1 << 24


def records_of(file: Any, name: str, compression_type: str | None) -> Iterator[bytes]:
    """Yields the records of a file, after verifying both checksums of each.

    Args:
        file: The file, decompressed.
        name: Name of the file, for errors.
        compression_type: Compression of the file, for errors.

    Raises:
        InvalidValueError: if a record is damaged or cut off. A file that is cut off between two
            records looks like a shorter file, so this is not noticed.

    Source: `tensorflow/core/lib/io/record_reader.cc`.
    """
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
            raise damaged(
                f"is cut off: its length and checksum have {len(header)} of {_HEADER.size} bytes"
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


def _read(file: Any, size: int) -> bytes:
    """Reads up to `size` bytes, and takes no more memory than the file needs."""
    if size <= _MAX_READ_BYTES:
        data: bytes = file.read(size)
        return data
    pieces = []
    while size and (piece := file.read(min(size, _MAX_READ_BYTES))):
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)
