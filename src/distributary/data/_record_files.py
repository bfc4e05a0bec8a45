"""Datasets of the records of files: text, TFRecord, records of one size, Parquet and Arrow."""

import abc
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, final

import numpy as np

from distributary._types import Nest
from distributary.data._batching import Unbatch
from distributary.data._dataset import Dataset
from distributary.data._file_names import FilePaths, file_names
from distributary.data._nodes import FileSource
from distributary.data._options import UNKNOWN_CARDINALITY
from distributary.data._records import OPENERS, Parse, read_file, records
from distributary.data._streams import Chained, IteratedStream, Path, Stream
from distributary.data._structure import TensorSpec
from distributary.errors import InvalidValueError, MissingPackageError

if TYPE_CHECKING:
    import pyarrow


_BYTES = TensorSpec((), object)


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


def record_files(
    what: str,
    filenames: FilePaths,
    compression_type: str | None,
    parse: Parse[Any],
    element: TensorSpec | None,
) -> RecordFiles:
    """Returns the node of the records of files.

    Args:
        what: Name of the dataset, for errors.
        filenames: Name of a file, or several.
        compression_type: Compression of the files; None for none.
        parse: Yields the records of a file.
        element: Spec of a record; None to find out from one.

    Raises:
        InvalidValueError: for an unknown compression and, while reading, for damaged files.
    """
    files = file_names(filenames, what)
    compression = compression_type or ""
    if compression not in OPENERS:
        raise InvalidValueError(
            f"{what}: compression_type is {compression_type!r}, expected one of {sorted(OPENERS)}."
        )
    read = functools.partial(read_file, what, compression=compression, parse=parse)
    return RecordFiles(files, read, what, element)


class _RecordDataset(Dataset):
    """Base class of the records of files.

    Raises:
        InvalidValueError: for an unknown compression and, while reading, for damaged files.
    """

    @staticmethod
    @abc.abstractmethod
    def _parse(file: IO[bytes], name: str, compression: str) -> Iterator[bytes]:
        """Yields the records of a file; its name and compression are for errors."""

    def __init__(
        self,
        filenames: FilePaths,
        compression_type: str | None = None,
        buffer_size: int | None = None,
        num_parallel_reads: int | None = None,
        name: str | None = None,
    ) -> None:
        what = next(own.__name__ for own in type(self).__mro__ if "_parse" in vars(own))
        super().__init__(record_files(what, filenames, compression_type, self._parse, _BYTES))


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
        compression_type: "GZIP", "ZLIB", "BZIP2" or "XZ"; None or "" for none.
        buffer_size: No effect.
        num_parallel_reads: No effect: files are read one after the other; use `interleave`.
        name: No effect.

    Source: `tf.data.TFRecordDataset`; `tensorflow/core/lib/io/record_reader.cc`.
    """

    @staticmethod
    def _parse(file: IO[bytes], name: str, compression: str) -> Iterator[bytes]:
        return records(file, name, compression)


class FixedLengthRecordDataset(Dataset):
    """The records of files in which every record has the same number of bytes.

    Args:
        filenames: Name of a file, or a list of names.
        record_bytes: Number of bytes of a record.
        header_bytes: Number of bytes to skip at the beginning of every file.
        footer_bytes: Number of bytes to skip at the end of every file.
        buffer_size: No effect.
        compression_type: "GZIP", "ZLIB", "BZIP2" or "XZ"; None or "" for none.
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

        super().__init__(record_files(what, filenames, compression_type, parse, _BYTES))


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
