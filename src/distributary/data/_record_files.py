"""Datasets of the records of files: text, TFRecord, records of one size."""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, final

from distributary.data._dataset import Dataset
from distributary.data._file_names import FilePaths, file_names
from distributary.data._nodes import FileSource
from distributary.data._options import UNKNOWN_CARDINALITY
from distributary.data._records import OPENERS, Parse, read_file, records
from distributary.data._streams import IteratedStream, Path, Stream
from distributary.data._structure import TensorSpec
from distributary.devices import Nest
from distributary.errors import InvalidValueError


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

    def cardinality(self) -> int:
        return UNKNOWN_CARDINALITY

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
