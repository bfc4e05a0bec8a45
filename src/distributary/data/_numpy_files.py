"""Datasets of the rows of NumPy files."""

import errno
import functools
import math
import os
import weakref
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import numpy as np

from distributary._types import Nest
from distributary.data._arrays import Slices, slices
from distributary.data._nodes import FileSource
from distributary.data._streams import ChainedRows
from distributary.data._structure import TensorSpec
from distributary.errors import InvalidValueError


@final
@dataclass(frozen=True, eq=False)
class NumpyFiles(FileSource):
    """The rows of `.npy` files, or of the arrays in `.npz` files.

    Attributes:
        files: Names of the files.
        opened: The rows of each file by its name, also of files that other workers read.
    """

    files: tuple[str, ...]
    opened: "Mapping[str, _NpyArray | Slices]"
    batched = False
    alike = True

    def source(self) -> ChainedRows:
        return ChainedRows([self.opened[name] for name in self.files])

    def cardinality(self) -> int:
        return sum(len(self.opened[name]) for name in self.files)

    def spec(self) -> Nest:
        return self.opened[self.files[0]].spec()

    def label(self) -> str:
        return f"npy({self.cardinality()} rows, {len(self.files)} files)"


def numpy_files(files: tuple[str, ...]) -> NumpyFiles:
    """Returns the rows of files, after reading the headers of all of them.

    Raises:
        InvalidValueError: if files cannot be used or contain different arrays.
    """
    opened = {name: _open(name) for name in files}
    first = opened[files[0]].spec()
    for name, rows in opened.items():
        if rows.spec() != first:
            raise InvalidValueError(
                f"from_npy: rows of {name!r} are {rows.spec()}, but those of {files[0]!r} are"
                f" {first}. Make a dataset of each kind of files."
            )
    return NumpyFiles(files, opened)


def _open(name: str) -> "_NpyArray | Slices":
    """Returns the rows of a `.npy` file, or of the arrays in a `.npz` file as dicts."""
    if not name.endswith(".npz"):
        return _NpyArray(name)
    arrays = _arrays_of_archive(name)
    sizes = {array.shape[:1] for array in arrays.values()}
    if len(sizes) != 1 or sizes == {()}:
        shapes = {key: array.shape for key, array in arrays.items()}
        raise InvalidValueError(
            f"from_npy: {name!r} holds arrays of shapes {shapes}; all must have the same number of"
            " rows (dim 0)."
        )
    return slices(arrays)


def _arrays_of_archive(name: str) -> dict[str, np.ndarray]:
    arrays = {}
    try:
        with zipfile.ZipFile(name) as archive:
            # A damaged directory size hides members. NumPy writes no comment, so this record is
            # last.
            with open(name, "rb") as file:
                file.seek(-22, os.SEEK_END)
                tail = file.read()
            count = int.from_bytes(tail[10:12], "little")
            if tail[:4] == b"PK\5\6" and count not in (len(archive.namelist()), 0xFFFF):
                raise ValueError(f"it lists {len(archive.namelist())} of {count} members")
            for member in archive.infolist():
                with archive.open(member) as content:
                    arrays[member.filename.removesuffix(".npy")] = np.lib.format.read_array(content)
                    if content.read():  # the checksum is compared at the end
                        raise ValueError(f"{member.filename} is longer than its header says")
    # Damaged archives and headers raise many kinds of errors, for example because of endless arrays
    # or positions before the beginning.
    except Exception as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        raise InvalidValueError(
            f"from_npy: {name!r} is not a .npz file of arrays of numbers, or it is damaged:"
            f" {error!r}. Arrays of Python objects are not read, as that can run code."
        ) from error
    return arrays


@final
class _NpyArray:
    """The array of a `.npy` file, whose rows are read as they are needed."""

    def __init__(self, name: str) -> None:
        self.name = name
        with open(name, "rb") as file:
            try:
                version = np.lib.format.read_magic(file)
                read = {
                    (1, 0): np.lib.format.read_array_header_1_0,
                    (2, 0): np.lib.format.read_array_header_2_0,
                }[version]
                self.shape, fortran_order, self.dtype = read(file)
            except OSError:
                raise
            except Exception as error:  # NumPy passes on whatever its header parser raises
                raise InvalidValueError(
                    f"from_npy: {name!r} is not a .npy file that NumPy can map: {error!r}."
                ) from error
            self._offset = file.tell()
            size = os.fstat(file.fileno()).st_size
        if self.dtype.hasobject:
            raise InvalidValueError(
                f"from_npy: {name!r} holds Python objects. Reading them would mean unpickling them,"
                " which can run code. Save arrays of numbers."
            )
        if not self.shape:
            raise InvalidValueError(f"from_npy: {name!r} holds a scalar, which has no rows.")
        self._row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        expected = self._offset + self.shape[0] * self._row_bytes
        if size != expected or min(self.shape) < 0:
            raise InvalidValueError(
                f"from_npy: {name!r} has {size} bytes, but its header promises {expected} for shape"
                f" {self.shape} of {self.dtype}. The file is"
                f" {'cut off' if size < expected else 'damaged, or holds more than one array'}."
            )
        # Rows in Fortran order are not contiguous, and empty rows have no place in the file.
        self._is_readable = not fortran_order and self._row_bytes > 0

    def __len__(self) -> int:
        return int(self.shape[0])

    def spec(self) -> TensorSpec:
        """Returns the spec of a row."""
        return TensorSpec(self.shape[1:], self.dtype)

    def row(self, number: int) -> np.ndarray:
        """Returns one row, in memory of its own."""
        return self.part(number, 1)[0]

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        """Returns rows by number, in memory of their own."""
        return self._mapped.take(numbers, axis=0)

    def part(self, start: int, count: int) -> np.ndarray:
        """Returns consecutive rows, in memory of their own."""
        if self._is_readable:
            return self._read(start, count)
        return self._mapped[start : start + count].copy()

    @functools.cached_property
    def _mapped(self) -> np.ndarray:
        return np.asarray(np.load(self.name, mmap_mode="r"))

    @functools.cached_property
    def _descriptor(self) -> int:
        descriptor = os.open(self.name, os.O_RDONLY)
        # At the end of the process, threads may still be reading. If two threads open the file at
        # once, both descriptors are closed.
        weakref.finalize(self, os.close, descriptor).atexit = False
        return descriptor

    def _read(self, start: int, count: int) -> np.ndarray:
        # Not from a memory map: if the file becomes shorter, reading that kills the process.
        rows = np.empty(count * self._row_bytes, np.uint8)
        left = memoryview(rows.data)
        position = self._offset + start * self._row_bytes
        while left:
            done = os.preadv(self._descriptor, [left], position)
            if not done:
                raise InvalidValueError(
                    f"from_npy: {self.name!r} became shorter while it was being read."
                )
            left, position = left[done:], position + done
        return rows.view(self.dtype).reshape(count, *self.shape[1:])
