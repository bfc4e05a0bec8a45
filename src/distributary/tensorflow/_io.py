"""Files of `tf.io`, on the file system of the operating system."""

import os
import zlib
from dataclasses import dataclass
from typing import Any, Self, final

import numpy as np

from distributary.data import framed
from distributary.errors import UnsupportedError
from distributary.tensorflow._gfile import glob, makedirs
from distributary.tensorflow._host import host_array, local_path

_Path = str | os.PathLike[str]


def matching_files(pattern: _Path | list[_Path], name: str | None = None) -> Any:
    """`tf.io.matching_files`: the sorted paths that fit a pattern, or one of several."""
    return host_array(np.array(sorted(glob(pattern)), str))


def read_file(filename: _Path, name: str | None = None) -> bytes:
    """`tf.io.read_file`: outside of steps, for example in `Dataset.map`."""
    with open(local_path(filename), "rb") as file:
        return file.read()


def write_file(filename: _Path, contents: bytes | str, name: str | None = None) -> None:
    """`tf.io.write_file`: makes the folder if there is none."""
    path = local_path(filename)
    makedirs(os.path.dirname(path) or ".")
    data = np.asarray(contents, object).item()
    with open(path, "wb") as file:
        file.write(data.encode() if isinstance(data, str) else data)


@final
@dataclass(frozen=True)
class TFRecordOptions:
    """`tf.io.TFRecordOptions`: the compression of a `TFRecordWriter`; the rest has no effect."""

    compression_type: str | None = None
    flush_mode: object = None
    input_buffer_size: object = None
    output_buffer_size: object = None
    window_bits: object = None
    compression_level: int | None = None
    compression_method: object = None
    mem_level: object = None
    compression_strategy: object = None


@final
class TFRecordWriter:
    """Writes records to a file that `tf.data.TFRecordDataset` reads.

    Args:
        path: Path of the file.
        options: `TFRecordOptions`, or "GZIP", "ZLIB" or "".

    Source: `tf.io.TFRecordWriter`.
    """

    def __init__(self, path: _Path, options: TFRecordOptions | str | None = None) -> None:
        if not isinstance(options, TFRecordOptions):
            options = TFRecordOptions(options)
        kind, level = options.compression_type or "", options.compression_level
        if kind not in ("", "GZIP", "ZLIB"):
            raise UnsupportedError(
                f"tf.io.TFRecordWriter: compression_type is {kind!r}, expected GZIP, ZLIB or none."
            )
        self._file: Any = open(local_path(path), "wb")  # noqa: SIM115  (`close` is ours)
        level = 6 if level is None else level
        self._packer = zlib.compressobj(level, wbits=31 if kind == "GZIP" else 15) if kind else None

    def write(self, record: bytes) -> None:
        """Writes a record."""
        data = framed(record)
        self._file.write(data if self._packer is None else self._packer.compress(data))

    def flush(self) -> None:
        """Hands everything to the operating system."""
        if self._packer is not None:
            self._file.write(self._packer.flush(zlib.Z_SYNC_FLUSH))
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        if self._packer is not None and not self._file.closed:
            self._file.write(self._packer.flush())
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
