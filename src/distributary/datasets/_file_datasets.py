"""Datasets of files, as classes like those in tf.data."""

from collections.abc import Sequence
from typing import Any

from distributary.datasets._dataset import Dataset
from distributary.datasets._elements import Unbatch
from distributary.datasets._files import file_names, parquet_rows, text_lines, tf_records
from distributary.errors import InvalidTypeError


class TextLineDataset(Dataset):
    """The lines of text files, as bytes without line ends.

    Args:
        filenames: Name of a file, or a list of names.
        compression_type: "GZIP", "ZLIB", "BZIP2" or "XZ"; None or "" for none.

    Source: `tf.data.TextLineDataset`.
    """

    def __init__(
        self, filenames: Any, compression_type: str | None = None, **_without_effect: Any
    ) -> None:
        _check_reader_options("TextLineDataset", _without_effect)
        files = file_names(filenames, "TextLineDataset")
        super().__init__(text_lines(files, compression_type))


class TFRecordDataset(Dataset):
    """The records of TFRecord files, as bytes.

    The lengths and contents of all records are compared with their checksums.

    Args:
        filenames: Name of a file, or a list of names.
        compression_type: "GZIP", "ZLIB", "BZIP2" or "XZ"; None or "" for none.

    Source: `tf.data.TFRecordDataset`.
    """

    def __init__(
        self, filenames: Any, compression_type: str | None = None, **_without_effect: Any
    ) -> None:
        _check_reader_options("TFRecordDataset", _without_effect)
        files = file_names(filenames, "TFRecordDataset")
        super().__init__(tf_records(files, compression_type))


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

    def __init__(self, filenames: Any, columns: Sequence[str] | None = None) -> None:
        files = file_names(filenames, "ParquetDataset")
        super().__init__(Unbatch(parquet_rows(files, columns)))


def _check_reader_options(what: str, options: dict[str, Any]) -> None:
    unknown = set(options) - {"buffer_size", "num_parallel_reads", "name"}
    if unknown:
        raise InvalidTypeError(f"{what}: unknown arguments {sorted(unknown)}.")
