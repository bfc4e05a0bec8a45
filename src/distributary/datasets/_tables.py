"""Datasets of the rows of tables: Parquet and Arrow files."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from distributary.datasets._batching import Unbatch
from distributary.datasets._dataset import Dataset
from distributary.datasets._file_names import FilePaths, file_names
from distributary.datasets._record_files import RecordFiles
from distributary.errors import InvalidValueError, MissingPackageError

if TYPE_CHECKING:
    import pyarrow


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
