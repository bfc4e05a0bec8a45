"""Arrays in files that several processes write and read, each some rows."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np

from distributary.errors import CheckpointError, MissingPackageError

__all__ = ["SavedRows", "num_bytes_of", "read_rows", "rows_between", "write_arrays"]

_CHUNK_BYTES = 4 << 20
_FOLDER = re.compile(r"arrays|ps-\d+")


@final
@dataclass(frozen=True, slots=True)
class SavedRows:
    """Some rows of an array in a checkpoint.

    Attributes:
        folder: Name of the folder in that of the checkpoint.
        name: Of the array in it.
        start: The first row. A scalar has one row.
        stop: The row after the last.
    """

    folder: str
    name: str
    start: int
    stop: int


def rows_between(rows: Sequence[SavedRows], start: int, stop: int) -> list[SavedRows]:
    """Rows `start` to `stop` of what consists of `rows`."""
    found = []
    for part in rows:
        size = part.stop - part.start
        low, high = max(start, 0), min(stop, size)
        if low < high:
            found.append(SavedRows(part.folder, part.name, part.start + low, part.start + high))
        start, stop = start - size, stop - size
    return found


def write_arrays(folder: Path, arrays: Mapping[str, np.ndarray]) -> int:
    """Writes arrays to a new folder; returns its number of bytes when they are on disk.

    Args:
        folder: Becomes an OCDBT database of zarr3 arrays, in chunks of rows with checksums.
        arrays: By name. Nobody changes them meanwhile.

    Raises:
        Exception: of any kind if they cannot be written.
    """
    ts = _tensorstore()
    folder.mkdir()
    with ts.Transaction() as transaction:
        opened = [
            ts.open(_array_to_write(folder, name, array), transaction=transaction)
            for name, array in arrays.items()
        ]
        writes = [
            store.result().write(array, can_reference_source_data_indefinitely=True)
            for store, array in zip(opened, arrays.values(), strict=True)
        ]
        for write in writes:  # what is on its way would not be part of the transaction
            write.result()
    return num_bytes_of(folder)


def num_bytes_of(folder: Path) -> int:
    """Size of all files in a folder, 0 if there is none."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def read_rows(
    path: Path, arrays: Sequence[np.ndarray], rows: Sequence[Sequence[SavedRows]]
) -> None:
    """Fills arrays with rows of a checkpoint.

    Args:
        path: Of the checkpoint.
        arrays: What is filled.
        rows: For every array the rows that it consists of, in order.

    Raises:
        CheckpointError: if there are no such rows of the shape and dtype, or they cannot be read.
    """
    ts = _tensorstore()
    try:
        opened = [[ts.open(_array_to_read(path, part)) for part in own] for own in rows]
        writes = []
        for array, own, stores in zip(arrays, rows, opened, strict=True):
            start, target = 0, ts.array(array)
            num_rows = array.shape[0] if array.ndim else 1
            if sum(part.stop - part.start for part in own) != num_rows:
                raise ValueError(f"{own} are not the {num_rows} rows of an array")
            for part, store in zip(own, stores, strict=True):
                source = store.result()
                if array.ndim:
                    stop = start + part.stop - part.start
                    source, piece, start = source[part.start : part.stop], target[start:stop], stop
                else:
                    piece = target
                writes.append(piece.write(source))
        for write in writes:
            write.result()
    except Exception as error:
        reason = str(error).partition(" [tensorstore_spec=")[0]
        raise CheckpointError(f"The checkpoint {path} cannot be read: {reason}") from error


def _array_to_write(folder: Path, name: str, array: np.ndarray) -> Any:
    chunk = list(array.shape)
    if chunk:
        row_bytes = max(1, math.prod(array.shape[1:]) * array.itemsize)
        chunk[0] = min(chunk[0], max(1, _CHUNK_BYTES // row_bytes))
    return {
        "driver": "zarr3",
        "kvstore": _database(folder, name),
        "metadata": {
            "shape": list(array.shape),
            "data_type": array.dtype.name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
            "codecs": [
                {"name": "bytes", "configuration": {"endian": "little"}},
                {"name": "crc32c"},
            ],
        },
        "create": True,
    }


def _array_to_read(path: Path, rows: SavedRows) -> Any:
    if not _FOLDER.fullmatch(rows.folder):  # it might lead out of the checkpoint
        raise ValueError(f"{rows.folder!r} is no folder of a checkpoint")
    return {"driver": "auto", "kvstore": _database(path / rows.folder, rows.name)}


def _database(folder: Path, name: str) -> Any:
    base = {"driver": "file", "path": f"{folder}/"}
    return {"driver": "ocdbt", "base": base, "path": f"{name.removesuffix('/')}/"}


def _tensorstore() -> Any:
    try:
        import tensorstore
    except ImportError as error:
        raise MissingPackageError(
            "Checkpoints need tensorstore: pip install 'distributary[checkpoint]'"
        ) from error
    return tensorstore
