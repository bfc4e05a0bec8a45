"""Names of files, and datasets of them."""

import glob
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np

from distributary.data._nodes import FileSource, NumberedNode
from distributary.data._structure import TensorSpec
from distributary.errors import InvalidTypeError, InvalidValueError

FilePaths: TypeAlias = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
"""The name of a file, or several names."""


def file_names(paths: FilePaths, what: str) -> tuple[str, ...]:
    """Returns one or several names of files as a tuple.

    Raises:
        InvalidTypeError: if they are not names.
        InvalidValueError: if there are none, or one does not exist.
    """
    if isinstance(paths, (str, os.PathLike)):
        paths = [paths]
    elif isinstance(paths, np.ndarray):
        paths = paths.tolist() if paths.ndim else [paths.item()]
    elif hasattr(paths, "as_numpy_iterator"):  # a dataset of names, read once
        paths = [np.asarray(name).item() for name in paths.as_numpy_iterator()]
    try:
        names = tuple(os.fsdecode(name) for name in paths)
    except TypeError:
        raise InvalidTypeError(
            f"{what}: filenames is {paths!r}, expected the name of a file, or a list of names."
        ) from None
    if not names:
        raise InvalidValueError(f"{what}: the list of files is empty, expected at least one name.")
    for name in names:
        if not os.path.isfile(name):
            raise InvalidValueError(
                f"{what}: the file {name!r} does not exist (in {os.getcwd()}). For a pattern use"
                " Dataset.list_files."
            )
    return names


def matching_files(patterns: FilePaths) -> tuple[str, ...]:
    """Returns the files that match a glob pattern, or one of several, sorted by name.

    Raises:
        InvalidValueError: if there are none.
    """
    if isinstance(patterns, (str, os.PathLike)):
        patterns = [patterns]
    names = {
        name
        for pattern in patterns
        for name in glob.glob(os.fsdecode(pattern), recursive=True)
        if os.path.isfile(name)
    }
    if not names:
        raise InvalidValueError(
            f"list_files: no file matches {[os.fsdecode(p) for p in patterns]} (in {os.getcwd()})."
            " Check the pattern, or give the whole path."
        )
    return tuple(sorted(names))


@final
@dataclass(frozen=True, eq=False)
class FileNames(NumberedNode, FileSource):
    """Names of files."""

    files: tuple[str, ...]
    batched = False

    def cardinality(self) -> int:
        return len(self.files)

    def row(self, number: int) -> str:
        return self.files[number]

    def spec(self) -> TensorSpec:
        return TensorSpec((), object)

    def label(self) -> str:
        return f"list_files({len(self.files)})"
