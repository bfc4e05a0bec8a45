"""Files of `tf.io`, `tf.io.gfile` and `tf.audio`, on the file system of the operating system."""

import glob as globs
import io
import os
import shutil
import wave
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any, NamedTuple, Self, final

import numpy as np

from distributary.data import framed
from distributary.errors import InvalidValueError, UnsupportedError
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


@final
class GFile:
    """`tf.io.gfile.GFile`: a file, opened when it is used, of bytes if the mode contains "b".

    It has the other methods of Python's files, too.
    """

    def __init__(self, name: _Path, mode: str = "r") -> None:
        #: The path and the mode.
        self.name, self.mode = local_path(name), mode
        self._opened: IO[Any] | None = None

    def _file(self) -> IO[Any]:
        if self._opened is None or self._opened.closed:
            self._opened = open(self.name, self.mode)  # noqa: SIM115  (`close` is ours)
        return self._opened

    def size(self) -> int:
        """Returns the number of bytes."""
        return os.path.getsize(self.name)

    def seekable(self) -> bool:
        """Returns whether `seek` works."""
        return self._file().seekable()

    def read(self, n: int = -1) -> Any:
        """Returns the next `n` bytes or characters, or all."""
        return self._file().read(n)

    def readline(self) -> Any:
        """Returns the next line."""
        return self._file().readline()

    def readlines(self) -> list[Any]:
        """Returns all lines that follow."""
        return self._file().readlines()

    def seek(self, offset: int | None = None, whence: int = 0, position: int | None = None) -> None:
        """Goes to a place in the file."""
        self._file().seek(position if offset is None else offset, whence)  # type: ignore[arg-type]

    def tell(self) -> int:
        """Returns the place in the file."""
        return self._file().tell()

    def write(self, file_content: object) -> None:
        """Writes bytes or text."""
        self._file().write(file_content)

    def flush(self) -> None:
        """Hands everything to the operating system."""
        self._file().flush()

    def close(self) -> None:
        """Closes the file."""
        if self._opened is not None:
            self._opened.close()

    def next(self) -> Any:
        """Returns the next line."""
        return next(self._file())

    __next__ = next

    def __iter__(self) -> Iterator[Any]:
        return self._file()

    def __enter__(self) -> IO[Any]:
        return self._file()

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def copy(src: _Path, dst: _Path, overwrite: bool = False) -> None:
    """`tf.io.gfile.copy`: raises `FileExistsError` unless you pass `overwrite=True`."""
    if not overwrite and os.path.exists(local_path(dst)):
        raise FileExistsError(f"tf.io.gfile.copy: {dst} exists. Pass overwrite=True to replace it.")
    shutil.copyfile(local_path(src), local_path(dst))


def exists(path: _Path) -> bool:
    """`tf.io.gfile.exists`."""
    return os.path.exists(local_path(path))


def glob(pattern: _Path | list[_Path]) -> list[str]:
    """`tf.io.gfile.glob`: the paths that fit a pattern, or one of several."""
    patterns = pattern if isinstance(pattern, (list, tuple)) else [pattern]
    return [path for one in patterns for path in sorted(globs.glob(local_path(one)))]


def isdir(path: _Path) -> bool:
    """`tf.io.gfile.isdir`."""
    return os.path.isdir(local_path(path))


def join(path: _Path, *paths: _Path) -> str:
    """`tf.io.gfile.join`."""
    return os.path.join(path, *paths)


def listdir(path: _Path) -> list[str]:
    """`tf.io.gfile.listdir`: the names in a folder."""
    return sorted(os.listdir(local_path(path)))


def makedirs(path: _Path) -> None:
    """`tf.io.gfile.makedirs`: a folder and those above it; it may exist."""
    os.makedirs(local_path(path), exist_ok=True)


def mkdir(path: _Path) -> None:
    """`tf.io.gfile.mkdir`."""
    os.mkdir(local_path(path))


def remove(path: _Path) -> None:
    """`tf.io.gfile.remove`: a file."""
    os.remove(local_path(path))


def rename(src: _Path, dst: _Path, overwrite: bool = False) -> None:
    """`tf.io.gfile.rename`: raises `FileExistsError` unless you pass `overwrite=True`."""
    if not overwrite and os.path.exists(local_path(dst)):
        raise FileExistsError(f"tf.io.gfile.rename: {dst} exists. Pass overwrite=True.")
    os.replace(local_path(src), local_path(dst))


def rmtree(path: _Path) -> None:
    """`tf.io.gfile.rmtree`: a folder and everything in it."""
    shutil.rmtree(local_path(path))


def stat(path: _Path) -> Any:
    """`tf.io.gfile.stat`: with `length` and `mtime_nsec`."""
    status = os.stat(local_path(path))
    return _Stat(status.st_size, status.st_mtime_ns, os.path.isdir(local_path(path)))


def walk(
    top: _Path, topdown: bool = True, onerror: Callable[[OSError], Any] | None = None
) -> Iterator[tuple[str, list[str], list[str]]]:
    """`tf.io.gfile.walk`."""
    return os.walk(local_path(top), topdown, onerror)


@final
class _Stat:
    def __init__(self, length: int, mtime_nsec: int, is_directory: bool) -> None:
        self.length, self.mtime_nsec, self.is_directory = length, mtime_nsec, is_directory


def get_registered_schemes() -> list[str]:
    """`tf.io.gfile.get_registered_schemes`: paths of the operating system only."""
    return [""]


class DecodedWav(NamedTuple):
    """The result of `tf.audio.decode_wav`: numbers from -1 to 1, and how many a second has."""

    audio: np.ndarray
    sample_rate: np.ndarray


def decode_wav(
    contents: Any, desired_channels: int = -1, desired_samples: int = -1, name: str | None = None
) -> DecodedWav:
    """`tf.audio.decode_wav`: `[samples, channels]` in float32."""
    with wave.open(io.BytesIO(host_array(contents).item())) as file:
        if file.getsampwidth() != 2:
            raise InvalidValueError(
                f"tf.audio.decode_wav: samples have {8 * file.getsampwidth()} bits, expected 16."
            )
        frames = np.frombuffer(file.readframes(file.getnframes()), "<i2")
        samples = frames.reshape(-1, file.getnchannels()).astype(np.float32) / 2**15
        rate = file.getframerate()
    if desired_channels != -1:  # the last channel stands for those that are not there
        samples = samples[:, [min(k, samples.shape[1] - 1) for k in range(desired_channels)]]
    if desired_samples != -1:
        samples = samples[:desired_samples]
        samples = np.pad(samples, [(0, desired_samples - len(samples)), (0, 0)])
    return DecodedWav(host_array(samples), host_array(rate, np.int32))
