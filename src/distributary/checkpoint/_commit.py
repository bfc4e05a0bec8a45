"""Checkpoints on disk. Each is a folder that appears under its name once it is complete.

    ckpt-7/
    ├── checkpoint.json       names, shapes, dtypes; numbers, states of iterators; checksums
    ├── arrays.safetensors    arrays by name
    ├── kept                  empty; of a checkpoint that a manager keeps for good
    ├── worker-0.safetensors  what worker 0 has of arrays in parts, written by it
    └── ps-0.safetensors      variables of parameter server 0, written by it. For an array that is
                              not in the first file, the index lists the parts that make it up

A folder is written as `ckpt-7.tmp-...` and then renamed. If `ckpt-7` already exists, it is first
renamed to `ckpt-7.replaced`, which counts as `ckpt-7` as long as there is no other.

The index contains the size and the checksum of every other file, and ends with the checksum of the
text before it. This module replaces and removes only folders that it has written.
"""

import contextlib
import json
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, TypeAlias, final

import google_crc32c
import jax.numpy as jnp
import numpy as np

from distributary.checkpoint._files import (
    ArrayReader,
    Box,
    SavedPart,
    WrittenFile,
    box_of,
    sync,
    unreadable,
    write_arrays,
)
from distributary.checkpoint._leaves import Entry, RemoteCopy, enumerated
from distributary.checkpoint._save_locks import check_free, name_and_number
from distributary.errors import CheckpointError

_log = logging.getLogger(__name__)

_FORMAT = 3
_INDEX = "checkpoint.json"
_ARRAYS = "arrays.safetensors"
_KEPT = "kept"
#: The files of a checkpoint, and `token`, which exists while parameter servers write theirs.
_OWN_FILE = re.compile(r"checkpoint\.json|(arrays|worker-\d+|ps-\d+)\.safetensors|token|kept")
_MARK = b'"written_by": "distributary"'  # at the beginning of these files
_MARK_BYTES = 256
_SEALED = re.compile(rb'(.*")([0-9a-f]{8})"\n\}', re.DOTALL)
_TEMPORARY = re.compile(r".+\.tmp-[0-9a-f]{8}")
_OF_KERAS = "it is a file of Keras. Load it with model.load_weights or keras.models.load_model."
_NOTHING = (
    f"it has no file {_INDEX}. Pass the path that save() or latest_checkpoint gave; several workers"
    " need a folder that all of them see."
)
_OF_TENSORFLOW = ".index"  # the end of a name of a file in each of its checkpoints
_CONVERT = (
    'Only TensorFlow reads it: load it there, call model.save_weights("name.weights.h5"), and here'
    " model.load_weights with that file."
)

_warnings: set[str] = set()  # warnings about damaged checkpoints, so that each is logged once


@final
@dataclass(frozen=True)
class Saved:
    """The content of a checkpoint, except for its arrays.

    Args:
        entries: The entry of each leaf, by name.
        counters: Numbers that belong to the checkpoint itself.
        saved_at: Time of writing in ns since 1970; always later than for checkpoints written
            before.
        files: The files with arrays, by name.
    """

    entries: Mapping[str, Entry]
    counters: Mapping[str, int]
    saved_at: int
    files: Mapping[str, WrittenFile]


@final
@dataclass(frozen=True)
class Snapshot:
    """A copy, in host memory, of the state to save.

    Args:
        entries: The entry of each leaf, by name.
        counters: Numbers that belong to the checkpoint itself.
        arrays: NumPy arrays, by name. Empty on all workers but the chief.
        parts: The parts of other arrays that this worker has: where each begins, and its elements.
            Empty for an array of which other workers have all parts.
        kept: Copies of variables that are kept elsewhere and saved from there.
    """

    entries: Mapping[str, Entry]
    counters: Mapping[str, int]
    arrays: Mapping[str, np.ndarray]
    parts: Mapping[str, Sequence[tuple[Sequence[int], np.ndarray]]]
    kept: Sequence[RemoteCopy]


def make_folder(path: Path, is_series: bool) -> Path:
    """Makes a folder in which all workers write a checkpoint. Hold its `SaveLock`.

    Args:
        path: Folder of the checkpoint.
        is_series: Whether checkpoints with other numbers belong to this job, too.

    Raises:
        CheckpointError: if something else is at `path`.
        OSError: if the folder cannot be made.
    """
    check_replaceable(path)
    _remove_leftovers(path, is_series)
    folder = _temporary(path)
    try:
        folder.mkdir()
        # Marks the folder as ours, in case this process is killed.
        (folder / _INDEX).write_bytes(b"{\n " + _MARK)
    except BaseException:
        discard(folder)
        raise
    return folder


#: What a worker has written, which JSON can hold: its `WrittenFile`, if it has one, and the parts
#: of each array in it, each with its name in the file, where it begins, and its shape.
Written: TypeAlias = tuple[Sequence[int] | None, Mapping[str, Sequence[Sequence[Any]]]]


def write_parts(folder: Path, snapshot: Snapshot, worker: int) -> Written:
    """Writes the parts that a worker has to a folder that `make_folder` has made on the chief.

    Raises:
        CheckpointError: if this worker does not see the folder.
        OSError: if the parts cannot be written.
    """
    parts: dict[str, list[Sequence[Any]]] = {name: [] for name in snapshot.parts}
    arrays = {}
    for name, pieces in snapshot.parts.items():
        for begin, array in pieces:
            place = f"{name}{[*begin]}"
            arrays[place] = array
            parts[name].append([place, [*begin], [*array.shape]])
    if not arrays:
        return None, parts
    if not (folder / _INDEX).exists():
        raise CheckpointError(
            f"worker {worker} does not see the folder {folder}, which worker 0 has made. Each"
            " worker writes its parts of the variables, so all of them need the same folder"
        )
    return astuple(write_arrays(folder / _file_of(worker), arrays)), parts


def commit(
    path: Path, folder: Path, snapshot: Snapshot, written: Sequence[Written], is_series: bool
) -> None:
    """Completes a checkpoint, which appears as a whole or not at all. Hold its `SaveLock`.

    Args:
        path: Folder of the checkpoint. A checkpoint that is already there is replaced.
        folder: The folder that `make_folder` has made.
        snapshot: The state to save.
        written: What each worker has written.
        is_series: As for `make_folder`.

    Raises:
        Exception: any error, if the checkpoint cannot be written.
    """
    _fill(folder, path, snapshot, written)
    check_replaceable(path)
    with contextlib.suppress(FileNotFoundError):
        # If there already is a replaced one, it stays: it is known to be complete, and counts
        # until the new checkpoint is there.
        path.rename(_temporary(path) if _replaced(path).exists() else _replaced(path))
    folder.rename(path)
    sync(path.parent)
    _remove_leftovers(path, is_series)


def discard(folder: Path) -> None:
    """Removes what has been written of a checkpoint."""
    with contextlib.suppress(OSError):
        _delete(folder)


def _fill(folder: Path, path: Path, snapshot: Snapshot, written: Sequence[Written]) -> None:
    """Writes the files of the checkpoint for `path` to `folder`."""
    files = {_ARRAYS: write_arrays(folder / _ARRAYS, snapshot.arrays)}
    parts = {name: [*group] for copy in snapshot.kept for name, group in copy.save(folder).items()}
    for part in (part for group in parts.values() for part in group):
        files[part.file] = WrittenFile((folder / part.file).stat().st_size, part.checksum)
    for worker, (of_worker, leaves) in enumerate(written):
        if of_worker is not None:
            name, file = _file_of(worker), WrittenFile(*of_worker)
            seen = (folder / name).stat().st_size if (folder / name).exists() else 0
            if seen != file.num_bytes:
                raise CheckpointError(
                    f"worker {worker} has written {file.num_bytes} bytes to {folder / name}, of"
                    f" which worker 0 sees {seen}. All workers need the same folder"
                )
            files[name] = file
            for leaf, places in leaves.items():
                parts.setdefault(leaf, []).extend(
                    SavedPart(name, file.checksum, *place) for place in places
                )
    index = {
        "written_by": "distributary",
        "format": _FORMAT,
        "saved_at": max([time.time_ns(), *(s.saved_at + 1 for _, s in siblings(path))]),
        "counters": dict(snapshot.counters),
        "files": {name: astuple(file) for name, file in files.items()},
        "entries": {
            name: {**entry, "parts": [[p.file, p.name, p.begin, p.shape] for p in parts[name]]}
            if name in parts
            else entry
            for name, entry in snapshot.entries.items()
        },
    }
    (folder / _INDEX).write_bytes(sealed(index))
    for name in os.listdir(folder):
        sync(folder / name)
    sync(folder)


def _file_of(worker: int) -> str:
    return f"worker-{worker}.safetensors"


def sealed(index: Mapping[str, Any]) -> bytes:
    """Returns the text of an index, with its checksum at the end."""
    text = json.dumps({**index, "crc32c": ""}, indent=1).encode().removesuffix(b'"\n}')
    return text + f'{google_crc32c.value(text):08x}"\n}}'.encode()


def read(path: Path) -> Saved:
    """Reads a checkpoint, except for its arrays.

    Raises:
        CheckpointError: if there is no checkpoint, or it is damaged or of another version.
    """
    folder = located(path)
    try:
        text = (folder / _INDEX).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        is_of_keras = path.name.endswith((".h5", ".keras")) and path.exists()
        found = _OF_KERAS if is_of_keras else not_of_keras(path) or _NOTHING
        raise CheckpointError(f"There is no checkpoint at {path}: {found}") from None
    except OSError as error:
        raise unreadable(path, f"its file {_INDEX} cannot be opened ({error.strerror})") from None
    match = _SEALED.fullmatch(text)
    if match is None or google_crc32c.value(match[1]) != int(match[2], 16):
        raise unreadable(
            path,
            f"its file {_INDEX} is damaged, or that of another program: its checksum is not right",
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
            raise unreadable(path, f"its file {name} is missing")
        num_bytes = (folder / name).stat().st_size
        if num_bytes != file.num_bytes:
            raise unreadable(
                path,
                f"its file {name} has {num_bytes} bytes, and {file.num_bytes} bytes were written",
            )
    return Saved(index["entries"], index["counters"], index["saved_at"], files)


def stored_shape(entry: Entry) -> list[int]:
    """Returns the shape that an array has in its file."""
    # Random keys are saved as arrays of another shape and dtype.
    return ([entry["rows"]] if "rows" in entry else []) + list(entry.get("data", entry)["shape"])


def read_array(reader: ArrayReader, name: str, saved: Saved, box: Box | None = None) -> np.ndarray:
    """Reads an array of a checkpoint, or a box of it.

    Raises:
        CheckpointError: if it cannot be read, or differs from what was written.
    """
    entry = saved.entries[name]
    box = whole_box(entry) if box is None else box
    dtype = jnp.dtype(entry.get("data", entry)["dtype"])
    array = np.empty([span.stop - span.start for span in box], dtype)
    reader.fill(array, box, parts_of(name, saved))
    return array


def read_arrays(path: Path, names: Collection[str], saved: Saved) -> dict[str, np.ndarray]:
    """Reads the arrays with the given names; raises as `read_array`."""
    with ArrayReader(located(path)) as reader:
        return {name: read_array(reader, name, saved) for name in names}


def parts_of(name: str, saved: Saved) -> list[SavedPart]:
    """Returns the parts that make up an array."""
    entry = saved.entries[name]
    if "parts" in entry:
        return [
            SavedPart(file, saved.files[file].checksum, *place) for file, *place in entry["parts"]
        ]
    shape = stored_shape(entry)
    return [SavedPart(_ARRAYS, saved.files[_ARRAYS].checksum, name, [0] * len(shape), shape)]


def whole_box(entry: Entry) -> Box:
    """Returns the box of a whole array."""
    return box_of(stored_shape(entry))


def numbered(directory: Path, name: str | None = None) -> list[tuple[Path, Saved]]:
    """Returns the complete checkpoints `name-1`, `name-2`, ... of a directory, in order of saving.

    Without a name, returns those of all names. Damaged checkpoints are left out and logged.
    """
    pattern = re.compile(rf"{'.+' if name is None else re.escape(name)}-\d+")
    checkpoints = []
    try:
        names = {entry.removesuffix(".replaced") for entry in os.listdir(directory)}
    except (FileNotFoundError, NotADirectoryError):
        return []
    for entry in names:
        if pattern.fullmatch(entry) and not _TEMPORARY.fullmatch(entry):
            path = directory / entry
            try:
                checkpoints.append((path, read(path)))
            except CheckpointError as error:
                # Unmarked folders are being removed, or are not ours.
                if _is_marked(located(path)) and str(error) not in _warnings:
                    _warnings.add(str(error))
                    _log.warning("Left out: %s", error)
    others = {entry.removesuffix(_OF_TENSORFLOW) for entry in names} - names
    others = {one for one in others if any(name.startswith(f"{one}.data-") for name in names)}
    if others and not checkpoints and str(directory) not in _warnings:
        _warnings.add(str(directory))
        _log.warning("%s has the checkpoint %s of TensorFlow. %s", directory, min(others), _CONVERT)
    return sorted(checkpoints, key=lambda item: item[1].saved_at)


def not_of_keras(path: Path) -> str | None:
    """Returns what is at a path that Keras cannot load, and how to load it; None for nothing."""
    if (path / _INDEX).exists():
        return "it is a checkpoint of distributary. Write Checkpoint(model=model).restore(path)."
    if (path / "saved_model.pb").exists():
        return f"it is a SavedModel of TensorFlow. {_CONVERT}"
    name = path.name.removesuffix(_OF_TENSORFLOW) + _OF_TENSORFLOW
    for index in (path.with_name(name), *sorted(path.glob(f"*{_OF_TENSORFLOW}"))):
        if index.exists():
            return f"{index} is one of TensorFlow. {_CONVERT}"
    return None


def siblings(path: Path) -> list[tuple[Path, Saved]]:
    """Returns the complete checkpoints of the same name with any number, in order of saving."""
    name, number = name_and_number(path)
    return [] if number is None else numbered(path.parent, name)


def keep(path: Path) -> None:
    """Notes that a checkpoint is kept for good, also by later managers of the directory."""
    (located(path) / _KEPT).touch()


def is_kept(path: Path) -> bool:
    """Returns whether `keep` has noted a checkpoint."""
    return (located(path) / _KEPT).exists()


def remove(path: Path) -> None:
    """Removes a checkpoint. It disappears at once, as a whole.

    Raises:
        CheckpointError: if the folder is not a checkpoint, or contains other files, too.
        OSError: if it cannot be removed.
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


def check_replaceable(path: Path) -> None:
    """Checks that writing a checkpoint to a path destroys nothing else."""
    for place in (path, _replaced(path)):
        problem = _foreign(place)
        if problem is not None:
            raise CheckpointError(
                f"{place} {problem}, and is not replaced. Move it away, or choose another path."
            )


def _foreign(place: Path) -> str | None:
    """Returns why a place must not be removed, as the end of a sentence, or None if it may be."""
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
    # Empty files are ours, too: a writer may be killed before it has written a byte.
    if (others or num_bytes) and not _is_marked(place):
        return "is a folder of something else than a checkpoint"
    if others:
        return f"has more in it than the checkpoint ({enumerated(sorted(others))})"
    return None


def _is_marked(folder: Path) -> bool:
    """Returns whether a folder has a file that begins like the files of a checkpoint."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if _OWN_FILE.fullmatch(name):
                with contextlib.suppress(OSError), (folder / name).open("rb") as file:
                    if _MARK in file.read(_MARK_BYTES):
                        return True
    return False


def _delete(folder: Path) -> None:
    """Removes the files of a checkpoint and its folder. A folder with other files in it stays."""
    # The index last, as it marks the folder as ours.
    for name in sorted(os.listdir(folder), key=lambda name: name == _INDEX):
        if _OWN_FILE.fullmatch(name):
            (folder / name).unlink()
    folder.rmdir()


def _remove_leftovers(path: Path, is_series: bool) -> None:
    """Removes the leftovers of killed writers of a checkpoint, or of its whole series."""
    name, _ = name_and_number(path)
    names = rf"{re.escape(name)}-\d+" if is_series else re.escape(path.name)
    pattern = re.compile(rf"({names})\.(tmp-[0-9a-f]{{8}}|replaced)")
    for entry in os.listdir(path.parent):
        match = pattern.fullmatch(entry)
        if match is None or _foreign(path.parent / entry) is not None:
            continue
        with contextlib.suppress(OSError):  # raised, too, if another job is writing it
            if match[2] == "replaced":
                if not (path.parent / match[1]).exists():
                    continue
                read(path.parent / match[1])
            if match[1] != path.name:
                check_free(path.parent, match[1])
            _delete(path.parent / entry)


def _temporary(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")


def located(path: Path) -> Path:
    """Returns the folder of a checkpoint: its path, unless it is just being replaced."""
    replaced = _replaced(path)
    return replaced if replaced.exists() and not path.exists() else path


def _replaced(path: Path) -> Path:
    return path.with_name(f"{path.name}.replaced")
