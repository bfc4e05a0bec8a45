"""Checkpoints on disk: a folder each, which appears under its name when it is complete.

    ckpt-7/
    ├── checkpoint.json       names, shapes, dtypes; numbers, states of iterators; checksums
    ├── arrays.safetensors    arrays by name
    └── ps-0.safetensors      variables of parameter server 0, written by it; of each array that is
                              not in the file above the index has the rows that it consists of

A folder is written as `ckpt-7.tmp-...` and renamed. Where `ckpt-7` exists already it is first
renamed to `ckpt-7.replaced`, which counts as `ckpt-7` for as long as there is no other.

The index ends with the checksum of the text before it, and has the size and the checksum of every
other file. Nothing but folders that this module has written is ever replaced or removed.
"""

import collections
import contextlib
import json
import logging
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, final

import google_crc32c
import numpy as np

from distributary.checkpoint._leaves import Entry
from distributary.errors import CheckpointError
from distributary.variables import (
    KeptCopy,
    SavedRows,
    WrittenFile,
    check_free,
    hold,
    read_rows,
    write_arrays,
)

_log = logging.getLogger(__name__)

_FORMAT = 2
_INDEX = "checkpoint.json"
_ARRAYS = "arrays.safetensors"
#: The files of a checkpoint, and one that is there while parameter servers write theirs.
_OWN_FILE = re.compile(r"checkpoint\.json|(arrays|ps-\d+)\.safetensors|token")
_MARK = b'"written_by": "distributary"'  # at the beginning of them
_MARK_BYTES = 256
_SEALED = re.compile(rb'(.*")([0-9a-f]{8})"\n\}', re.DOTALL)
_TEMPORARY = re.compile(r".+\.tmp-[0-9a-f]{8}")
_MAX_NAMES_SHOWN = 3

_writers: dict[Path, threading.Lock] = collections.defaultdict(threading.Lock)
_told: set[str] = set()  # about damaged checkpoints, once each


@final
@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds besides its arrays.

    Args:
        entries: By name.
        counters: Numbers that belong to the checkpoint itself.
        saved_at: When it was written, ns since 1970; larger than that of those written before.
        files: The files of arrays, by name.
    """

    entries: Mapping[str, Entry]
    counters: Mapping[str, int]
    saved_at: int
    files: Mapping[str, WrittenFile]


def claim(path: Path, is_series: bool) -> None:
    """Makes sure that a checkpoint may be written, before anything is.

    Args:
        path: Its folder. The one that it is in is made if needed.
        is_series: Whether others of the same name, with other numbers, belong to this job, too.

    Raises:
        CheckpointError: if something else is there, or another job saves there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        file = next(p for p in path.parents if p.is_symlink() or p.exists())
        raise CheckpointError(
            f"{file} is not a folder. Move it away, or choose another path."
        ) from None
    name, number = _name_and_number(path)
    if is_series:
        check_free(path.parent, path.name)
        hold(path.parent, name, is_series=True)
    else:
        if number is not None:
            check_free(path.parent, name)
        hold(path.parent, path.name, is_series=False)
    _check_replaceable(path)


def write(
    path: Path,
    entries: Mapping[str, Entry],
    counters: Mapping[str, int],
    arrays: Mapping[str, np.ndarray],
    kept: Sequence[KeptCopy],
    is_series: bool,
) -> None:
    """Writes a checkpoint; it is there completely or not at all.

    Args:
        path: Its folder; a checkpoint that is there is replaced.
        entries: By name.
        counters: Numbers that belong to the checkpoint itself.
        arrays: NumPy arrays by name.
        kept: Others, which are kept elsewhere and saved from there.
        is_series: As for `claim`.

    Raises:
        Exception: of any kind if it cannot be written.
    """
    with _writers[path.parent.resolve()]:
        claim(path, is_series)
        _remove_leftovers(path, is_series)
        temporary = _temporary(path)
        temporary.mkdir()
        try:
            _fill(temporary, path, entries, counters, arrays, kept)
            _check_replaceable(path)
            with contextlib.suppress(FileNotFoundError):
                # Of two the one that was replaced is whole, and counts until the last line.
                path.rename(_temporary(path) if _replaced(path).exists() else _replaced(path))
            temporary.rename(path)
        except BaseException:
            with contextlib.suppress(OSError):
                _delete(temporary)
            raise
        _sync(path.parent)
        _remove_leftovers(path, is_series)


def _fill(
    folder: Path,
    path: Path,
    entries: Mapping[str, Entry],
    counters: Mapping[str, int],
    arrays: Mapping[str, np.ndarray],
    kept: Sequence[KeptCopy],
) -> None:
    """Writes the files of a checkpoint of the path to another folder."""
    # Says whose the folder is, should this process be killed.
    (folder / _INDEX).write_bytes(b"{\n " + _MARK)
    files = {_ARRAYS: write_arrays(folder / _ARRAYS, arrays)}
    rows = {name: own for copy in kept for name, own in copy.save(folder).items()}
    for part in (part for own in rows.values() for part in own):
        files[part.file] = WrittenFile((folder / part.file).stat().st_size, part.checksum)
    index = {
        "written_by": "distributary",
        "format": _FORMAT,
        "saved_at": max([time.time_ns(), *(s.saved_at + 1 for _, s in siblings(path))]),
        "counters": dict(counters),
        "files": {name: astuple(file) for name, file in files.items()},
        "entries": {
            name: {**entry, "parts": [[p.file, p.name, p.start, p.stop] for p in rows[name]]}
            if name in rows
            else entry
            for name, entry in entries.items()
        },
    }
    (folder / _INDEX).write_bytes(sealed(index))
    for name in os.listdir(folder):
        _sync(folder / name)
    _sync(folder)


def sealed(index: Mapping[str, Any]) -> bytes:
    """The text of an index, with its checksum at the end."""
    text = json.dumps({**index, "crc32c": ""}, indent=1).encode().removesuffix(b'"\n}')
    return text + f'{google_crc32c.value(text):08x}"\n}}'.encode()


def read(path: Path) -> Saved:
    """What a checkpoint holds, without its arrays.

    Raises:
        CheckpointError: if there is none, it is damaged, or of another version.
    """
    folder = located(path)
    try:
        text = (folder / _INDEX).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"There is no checkpoint at {path}: it has no file {_INDEX}. Pass the path that save()"
            " or latest_checkpoint gave; several workers need a folder that all of them see."
        ) from None
    except OSError as error:
        raise _damaged(path, f"{_INDEX} cannot be opened ({error.strerror})") from None
    match = _SEALED.fullmatch(text)
    if match is None or google_crc32c.value(match[1]) != int(match[2], 16):
        raise _damaged(
            path, f"{_INDEX} is damaged, or that of another program: its checksum is not right"
        )
    index = json.loads(text)
    if index["format"] != _FORMAT:
        raise CheckpointError(
            f"The checkpoint {path} has format {index['format']}, and this version of distributary"
            f" reads format {_FORMAT}. Install the version that wrote it."
        )
    files = {name: WrittenFile(*file) for name, file in index["files"].items()}
    for name, file in files.items():
        if not (folder / name).is_file():
            raise _damaged(path, f"{name} is missing")
        num_bytes = (folder / name).stat().st_size
        if num_bytes != file.num_bytes:
            raise _damaged(
                path, f"{name} has {num_bytes} bytes, and {file.num_bytes} bytes were written"
            )
    return Saved(index["entries"], index["counters"], index["saved_at"], files)


def _stored(entry: Entry) -> tuple[list[int], str]:
    """Shape and dtype of an array in its file."""
    data = entry.get("data", entry)  # those of random keys are others
    return ([entry["rows"]] if "rows" in entry else []) + data["shape"], data["dtype"]


def _damaged(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint {path} cannot be read: its file {problem}. Restore another checkpoint, or"
        " copy this one again from where it is whole."
    )


def read_arrays(path: Path, names: Collection[str], saved: Saved) -> dict[str, np.ndarray]:
    """The arrays of the given names.

    Raises:
        CheckpointError: if they cannot be read, or are not what was written.
    """
    arrays, rows = {}, []
    for name in names:
        shape, dtype = _stored(saved.entries[name])
        arrays[name] = np.empty(shape, _dtype(dtype))
        rows.append(rows_of(name, saved))
    read_rows(located(path), list(arrays.values()), rows)
    return arrays


def rows_of(name: str, saved: Saved) -> list[SavedRows]:
    """The rows that an array consists of."""
    entry = saved.entries[name]
    if "parts" in entry:
        return [
            SavedRows(file, saved.files[file].checksum, of_file, start, stop)
            for file, of_file, start, stop in entry["parts"]
        ]
    shape, _ = _stored(entry)
    return [SavedRows(_ARRAYS, saved.files[_ARRAYS].checksum, name, 0, shape[0] if shape else 1)]


def numbered(directory: Path, name: str | None = None) -> list[tuple[Path, Saved]]:
    """The complete checkpoints `name-1`, `name-2`, ... of a directory, in the order of saving.

    Without a name those of all names. A damaged one is left out, which is logged.
    """
    pattern = re.compile(rf"{'.+' if name is None else re.escape(name)}-\d+")
    found = []
    try:
        names = {entry.removesuffix(".replaced") for entry in os.listdir(directory)}
    except (FileNotFoundError, NotADirectoryError):
        return []
    for entry in names:
        if pattern.fullmatch(entry) and not _TEMPORARY.fullmatch(entry):
            path = directory / entry
            try:
                found.append((path, read(path)))
            except CheckpointError as error:
                # Others are being removed, or not one of ours.
                if _is_marked(located(path)) and str(error) not in _told:
                    _told.add(str(error))
                    _log.warning("Left out: %s", error)
    return sorted(found, key=lambda item: item[1].saved_at)


def siblings(path: Path) -> list[tuple[Path, Saved]]:
    """The complete checkpoints of the same name with any number, in the order of saving."""
    name, number = _name_and_number(path)
    return [] if number is None else numbered(path.parent, name)


def remove(path: Path) -> None:
    """Removes a checkpoint; it is gone at once, whatever happens meanwhile.

    Raises:
        CheckpointError: if it is not, or not only, what was written here.
        OSError: if that is not allowed.
    """
    place = located(path)
    check_free(path.parent, path.name)
    problem = _foreign(place)
    if problem is not None:
        raise CheckpointError(f"{place} {problem}")
    temporary = _temporary(path)
    with contextlib.suppress(FileNotFoundError):
        place.rename(temporary)
        _delete(temporary)


def _check_replaceable(path: Path) -> None:
    """Checks that nothing is lost if a checkpoint is written to a path."""
    for place in (path, _replaced(path)):
        problem = _foreign(place)
        if problem is not None:
            raise CheckpointError(
                f"{place} {problem}, and is not replaced. Move it away, or choose another path."
            )


def _foreign(place: Path) -> str | None:
    """What at a place must not be removed, as the end of a sentence; None if nothing."""
    try:
        mode = place.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    if stat.S_ISLNK(mode):
        return "is a symbolic link"
    if not stat.S_ISDIR(mode):
        return "is a file"
    others, num_bytes = [], 0
    with os.scandir(place) as entries:
        for entry in entries:
            if _OWN_FILE.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                num_bytes += entry.stat().st_size
            else:
                others.append(entry.name)
    # A writer may be killed before it has written a byte.
    if (others or num_bytes) and not _is_marked(place):
        return "is a folder of something else than a checkpoint"
    if others:
        others.sort()
        more = len(others) - _MAX_NAMES_SHOWN
        shown = ", ".join(others[:_MAX_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
        return f"has more in it than the checkpoint ({shown})"
    return None


def _is_marked(folder: Path) -> bool:
    """Whether a folder has a file that begins as those of checkpoints do."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if _OWN_FILE.fullmatch(name):
                with contextlib.suppress(OSError), (folder / name).open("rb") as file:
                    if _MARK in file.read(_MARK_BYTES):
                        return True
    return False


def _delete(folder: Path) -> None:
    """Removes a folder with the files of a checkpoint; anything else, and then it, stays."""
    # The index last: it says whose the folder is.
    for name in sorted(os.listdir(folder), key=lambda name: name == _INDEX):
        if _OWN_FILE.fullmatch(name):
            (folder / name).unlink()
    folder.rmdir()


def _remove_leftovers(path: Path, is_series: bool) -> None:
    """Removes what writers that were killed have left of a checkpoint and, of a series, others."""
    name, _ = _name_and_number(path)
    names = rf"{re.escape(name)}-\d+" if is_series else re.escape(path.name)
    pattern = re.compile(rf"({names})\.(tmp-[0-9a-f]{{8}}|replaced)")
    for entry in os.listdir(path.parent):
        match = pattern.fullmatch(entry)
        if match is None or _foreign(path.parent / entry) is not None:
            continue
        with contextlib.suppress(OSError):  # also if another job writes it
            if match[2] == "replaced":
                if not (path.parent / match[1]).exists():
                    continue
                read(path.parent / match[1])
            if match[1] != path.name:
                check_free(path.parent, match[1])
            _delete(path.parent / entry)


def _name_and_number(path: Path) -> tuple[str, int | None]:
    """`"ckpt"` and 7 of `ckpt-7`."""
    match = re.fullmatch(r"(.+)-(\d+)", path.name)
    return (path.name, None) if match is None else (match[1], int(match[2]))


def _temporary(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")


def located(path: Path) -> Path:
    """Where a checkpoint is: its path, unless it is being replaced."""
    replaced = _replaced(path)
    return replaced if replaced.exists() and not path.exists() else path


def _replaced(path: Path) -> Path:
    return path.with_name(f"{path.name}.replaced")


def _dtype(name: str) -> Any:
    import jax.numpy as jnp

    return jnp.dtype(name)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
