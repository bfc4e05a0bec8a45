"""Files: `tf.io.gfile`, `tf.io`, on the file system of the operating system."""

import glob as globs
import io
import os
import shutil
import struct
from collections.abc import Iterator
from typing import IO, Any, Self, final

import google_crc32c
import numpy as np

from distributary.errors import UnsupportedError

_Path = str | os.PathLike[str]


def _local(path: _Path) -> str:
    text = os.fspath(path)
    if "://" in text:
        raise UnsupportedError(
            f"tf.io.gfile: {text!r} is in an object store. Mount it as a folder, or use fsspec."
        )
    return text


def gfile(name: _Path, mode: str = "r") -> IO[Any]:
    """`tf.io.gfile.GFile`: an open file, of bytes if the mode contains "b"."""
    return open(_local(name), mode)


def copy(src: _Path, dst: _Path, overwrite: bool = False) -> None:
    """`tf.io.gfile.copy`: raises `FileExistsError` unless you pass `overwrite=True`."""
    if not overwrite and os.path.exists(_local(dst)):
        raise FileExistsError(f"tf.io.gfile.copy: {dst} exists. Pass overwrite=True to replace it.")
    shutil.copyfile(_local(src), _local(dst))


def exists(path: _Path) -> bool:
    """`tf.io.gfile.exists`."""
    return os.path.exists(_local(path))


def glob(pattern: _Path | list[_Path]) -> list[str]:
    """`tf.io.gfile.glob`: the paths that fit a pattern, or one of several."""
    patterns = pattern if isinstance(pattern, (list, tuple)) else [pattern]
    return [path for one in patterns for path in sorted(globs.glob(_local(one)))]


def isdir(path: _Path) -> bool:
    """`tf.io.gfile.isdir`."""
    return os.path.isdir(_local(path))


def join(path: _Path, *paths: _Path) -> str:
    """`tf.io.gfile.join`."""
    return os.path.join(path, *paths)


def listdir(path: _Path) -> list[str]:
    """`tf.io.gfile.listdir`: the names in a folder."""
    return sorted(os.listdir(_local(path)))


def makedirs(path: _Path) -> None:
    """`tf.io.gfile.makedirs`: a folder and those above it; it may exist."""
    os.makedirs(_local(path), exist_ok=True)


def mkdir(path: _Path) -> None:
    """`tf.io.gfile.mkdir`."""
    os.mkdir(_local(path))


def remove(path: _Path) -> None:
    """`tf.io.gfile.remove`: a file."""
    os.remove(_local(path))


def rename(src: _Path, dst: _Path, overwrite: bool = False) -> None:
    """`tf.io.gfile.rename`: raises `FileExistsError` unless you pass `overwrite=True`."""
    if not overwrite and os.path.exists(_local(dst)):
        raise FileExistsError(f"tf.io.gfile.rename: {dst} exists. Pass overwrite=True.")
    os.replace(_local(src), _local(dst))


def rmtree(path: _Path) -> None:
    """`tf.io.gfile.rmtree`: a folder and everything in it."""
    shutil.rmtree(_local(path))


def stat(path: _Path) -> Any:
    """`tf.io.gfile.stat`: with `length` and `mtime_nsec`."""
    found = os.stat(_local(path))
    return _Stat(found.st_size, found.st_mtime_ns, os.path.isdir(_local(path)))


def walk(top: _Path, topdown: bool = True) -> Iterator[tuple[str, list[str], list[str]]]:
    """`tf.io.gfile.walk`."""
    return os.walk(_local(top), topdown)


@final
class _Stat:
    def __init__(self, length: int, mtime_nsec: int, is_directory: bool) -> None:
        self.length, self.mtime_nsec, self.is_directory = length, mtime_nsec, is_directory


def read_file(filename: _Path) -> bytes:
    """`tf.io.read_file`: outside of steps, for example in `Dataset.map`."""
    with open(_local(_text(filename)), "rb") as file:
        return file.read()


def write_file(filename: _Path, contents: bytes | str) -> None:
    """`tf.io.write_file`: makes the folder if there is none."""
    path = _local(_text(filename))
    makedirs(os.path.dirname(path) or ".")
    data = contents.encode() if isinstance(contents, str) else bytes(contents)
    with open(path, "wb") as file:
        file.write(data)


def _text(name: Any) -> str:
    value = name.item() if isinstance(name, (np.ndarray, np.generic)) else name
    return os.fsdecode(value)


@final
class TFRecordWriter:
    """Writes records to a file that `tf.data.TFRecordDataset` reads; it is not compressed.

    Source: `tf.io.TFRecordWriter`.
    """

    def __init__(self, path: _Path) -> None:
        self._file: io.BufferedWriter = open(_local(path), "wb")  # noqa: SIM115  (`close` is ours)

    def write(self, record: bytes) -> None:
        """Writes a record."""
        length = struct.pack("<Q", len(record))
        for part in (length, record):
            self._file.write(part)
            crc = google_crc32c.value(bytes(part))
            masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
            self._file.write(struct.pack("<I", masked))

    def flush(self) -> None:
        """Hands everything to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
