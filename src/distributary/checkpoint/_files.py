"""Checkpoints on disk: a folder each, which appears under its name when it is complete.

    ckpt-7/
    ├── checkpoint.json     names, shapes, dtypes; numbers and states of iterators
    ├── arrays/             arrays by name, written by orbax
    └── ps-0/               variables of parameter server 0, written by it; of each array that is
                            not in `arrays` the index has the rows that it consists of

A folder is written as `ckpt-7.tmp-...` and renamed. Where `ckpt-7` exists already it is first
renamed to `ckpt-7.old`, which counts as `ckpt-7` for as long as there is no other.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, final

import numpy as np

from distributary.checkpoint._leaves import Entry
from distributary.errors import CheckpointError, MissingPackageError
from distributary.variables import KeptCopy, SavedRows, read_rows

_FORMAT = 1
_INDEX = "checkpoint.json"
_ARRAYS = "arrays"


@final
@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds besides its arrays.

    Args:
        entries: By name.
        counters: Numbers that belong to the checkpoint itself.
        saved_at: When it was written, ns since 1970; larger than that of those written before.
    """

    entries: Mapping[str, Entry]
    counters: Mapping[str, int]
    saved_at: int


def load_orbax() -> Any:
    """The module `orbax.checkpoint`.

    Raises:
        MissingPackageError: if it is not installed.
    """
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise MissingPackageError(
            "distributary.checkpoint needs orbax-checkpoint: pip install 'distributary[checkpoint]'"
        ) from error
    return orbax.checkpoint


def write(
    path: Path,
    entries: Mapping[str, Entry],
    counters: Mapping[str, int],
    arrays: Mapping[str, Any],
    kept: Sequence[KeptCopy],
) -> None:
    """Writes a checkpoint; it is there completely or not at all.

    Args:
        path: Its folder; what is there is replaced.
        entries: By name.
        counters: Numbers that belong to the checkpoint itself.
        arrays: NumPy arrays by name.
        kept: Others, which are kept elsewhere and saved from there.

    Raises:
        Exception: of any kind if it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(path)
    temporary = _temporary(path)
    temporary.mkdir()
    try:
        # Orbax refuses arrays without elements and an empty tree.
        stored = {name: array for name, array in arrays.items() if array.size}
        if stored:
            _write_arrays(temporary / _ARRAYS, stored)
        rows = {name: own for copy in kept for name, own in copy.save(temporary).items()}
        saved_at = max([time.time_ns(), *(s.saved_at + 1 for _, s in siblings(path))])
        index = {
            "format": _FORMAT,
            "saved_at": saved_at,
            "counters": dict(counters),
            "entries": {
                name: {**entry, "parts": [astuple(part) for part in rows[name]]}
                if name in rows
                else entry
                for name, entry in entries.items()
            },
        }
        (temporary / _INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
        for folder, _, names in os.walk(temporary):
            for name in names:
                _sync(Path(folder, name))
            _sync(Path(folder))
        with contextlib.suppress(FileNotFoundError):
            path.rename(_old(path))
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _sync(path.parent)
    _remove_leftovers(path)


def _write_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    ocp = load_orbax()
    path.mkdir()
    handler = _handler(ocp)
    folder = _epath(path)
    handler.save(folder, args=ocp.args.PyTreeSave(dict(arrays)))
    handler.finalize(folder)
    handler.close()


def read(path: Path) -> Saved:
    """What a checkpoint holds, without its arrays.

    Raises:
        CheckpointError: if there is none, or it is of a later version.
    """
    try:
        index = json.loads((located(path) / _INDEX).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"There is no checkpoint at {path}: it has no file {_INDEX}. Pass the path that save()"
            " or latest_checkpoint gave; several workers need a folder that all of them see."
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"The checkpoint {path} cannot be read: {error}") from error
    if index["format"] != _FORMAT:
        raise CheckpointError(
            f"The checkpoint {path} has format {index['format']}, and this version of distributary"
            f" reads format {_FORMAT}. Install a later version."
        )
    return Saved(index["entries"], index["counters"], index["saved_at"])


def read_arrays(path: Path, names: Collection[str], saved: Saved) -> dict[str, np.ndarray]:
    """The arrays of the given names.

    Raises:
        CheckpointError: if they cannot be read.
    """
    wanted = {name: saved.entries[name] for name in names}
    arrays, stored = {}, []
    for name, entry in wanted.items():
        if 0 in entry["shape"] or "parts" in entry:
            shape = ([entry["rows"]] if "rows" in entry else []) + entry["shape"]
            arrays[name] = np.zeros(shape, _dtype(entry["dtype"]))
        else:
            stored.append(name)
    in_parts = [name for name in arrays if "parts" in wanted[name]]
    if in_parts:
        rows = [rows_of(name, wanted[name]) for name in in_parts]
        read_rows(located(path), [arrays[name] for name in in_parts], rows)
    if not stored:
        return arrays
    ocp = load_orbax()
    as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)
    args = ocp.args.PyTreeRestore(
        item=dict.fromkeys(stored, 0),
        restore_args=dict.fromkeys(stored, as_numpy),
        partial_restore=True,
    )
    handler = _handler(ocp)
    try:
        arrays |= handler.restore(_epath(located(path) / _ARRAYS), args=args)
    except Exception as error:
        raise CheckpointError(f"The checkpoint {path} cannot be read: {error}") from error
    finally:
        handler.close()
    return arrays


def rows_of(name: str, entry: Entry) -> list[SavedRows]:
    """The rows that an array consists of."""
    if "parts" in entry:
        return [SavedRows(*part) for part in entry["parts"]]
    return [SavedRows(_ARRAYS, name, 0, entry["shape"][0] if entry["shape"] else 1)]


def numbered(directory: Path, name: str | None = None) -> list[tuple[Path, Saved]]:
    """The complete checkpoints `name-1`, `name-2`, ... of a directory, in the order of saving.

    Without a name those of all names.
    """
    pattern = re.compile(rf"{'.+' if name is None else re.escape(name)}-\d+")
    found = []
    try:
        names = {entry.removesuffix(".old") for entry in os.listdir(directory)}
    except (FileNotFoundError, NotADirectoryError):
        return []
    for entry in names:
        if pattern.fullmatch(entry):
            with contextlib.suppress(CheckpointError):  # being removed, or not one of ours
                found.append((directory / entry, read(directory / entry)))
    return sorted(found, key=lambda item: item[1].saved_at)


def siblings(path: Path) -> list[tuple[Path, Saved]]:
    """The complete checkpoints of the same name with any number, in the order of saving."""
    name, number = _name_and_number(path)
    return [] if number is None else numbered(path.parent, name)


def remove(path: Path) -> None:
    """Removes a checkpoint; it is gone at once, whatever happens meanwhile.

    Raises:
        OSError: if that is not allowed.
    """
    with contextlib.suppress(FileNotFoundError):
        located(path).rename(_temporary(path))
    _remove_leftovers(path)


def _remove_leftovers(path: Path) -> None:
    """Removes what writers that were killed have left of a checkpoint and those like it."""
    name, number = _name_and_number(path)
    names = re.escape(path.name) if number is None else rf"{re.escape(name)}-\d+"
    pattern = re.compile(rf"({names})\.(tmp-[0-9a-f]{{8}}|old)")
    for entry in os.listdir(path.parent):
        match = pattern.fullmatch(entry)
        if match and (match[2] != "old" or (path.parent / match[1] / _INDEX).exists()):
            shutil.rmtree(path.parent / entry, ignore_errors=True)


def _name_and_number(path: Path) -> tuple[str, int | None]:
    """`"ckpt"` and 7 of `ckpt-7`."""
    match = re.fullmatch(r"(.+)-(\d+)", path.name)
    return (path.name, None) if match is None else (match[1], int(match[2]))


def _temporary(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")


def located(path: Path) -> Path:
    """Where a checkpoint is: its path, unless it is being replaced."""
    old = _old(path)
    return old if old.exists() and not path.exists() else path


def _old(path: Path) -> Path:
    return path.with_name(f"{path.name}.old")


def _handler(ocp: Any) -> Any:
    # The arrays are whole in this process: orbax must not wait for others.
    import jax

    this = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=this, active_processes={this})
    return ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)


def _epath(path: Path) -> Any:
    from etils import epath  # a dependency of orbax

    return epath.Path(path)


def _dtype(name: str) -> Any:
    import jax.numpy as jnp

    return jnp.dtype(name)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
