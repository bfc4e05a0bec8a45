"""`tf.io.gfile`: files of the operating system."""

import glob as globs
import os
import shutil
from collections.abc import Callable, Iterator
from typing import IO, Any, final

from distributary.tensorflow._host import local_path

_Path = str | os.PathLike[str]


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
