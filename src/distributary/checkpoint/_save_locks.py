"""Locks, which let only one job at a time save under a name.

The lock of the checkpoints `ckpt-1`, `ckpt-2`, ... is on the file `.ckpt.distributary-lock` beside
them. The operating system releases it when its process ends, and the process then removes the file.
Nobody waits for a lock, and readers do not need one. Only the user of the job can open the file:
whoever can open it can hold the lock.
"""

import atexit
import contextlib
import fcntl
import json
import logging
import os
import socket
import stat
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from distributary.errors import CheckpointError

_log = logging.getLogger(__name__)

_MARK = "distributary"
_MODE = stat.S_IRUSR | stat.S_IWUSR
# A process that checks whether a lock is free holds it for a moment, so it is worth trying again.
_NUM_TRIES = 5
_SECONDS_BETWEEN_TRIES = 0.05
# Each lock needs a file descriptor, and a process often has only 1024.
_MAX_SINGLE = 64

_lock = threading.Lock()


@dataclass
class _Held:
    """A lock of this process. Closing its descriptor releases it."""

    descriptor: int
    is_series: bool


_held: dict[Path, _Held] = {}  # by file


def hold(directory: Path, name: str, is_series: bool) -> None:
    """Acquires the lock of a name, so that until it ends only this process saves under it.

    Args:
        directory: Directory of the checkpoints.
        name: Name of one checkpoint, or of a series without the numbers.
        is_series: True for a series. Only the last 64 locks of single checkpoints are kept.

    Raises:
        CheckpointError: if another process has the lock; the error names the process.
        OSError: if the lock file cannot be written.
    """
    file = _file(directory, name)
    with _lock:
        held = _held.pop(file, None)
        if held is not None and not _is_at(file, held.descriptor):  # the file has been removed
            os.close(held.descriptor)
            held = None
        if held is None:
            file.parent.mkdir(parents=True, exist_ok=True)
            held = _Held(_acquired(file), is_series)
        held.is_series = held.is_series or is_series
        _held[file] = held
        single = [file for file, held in _held.items() if not held.is_series]
        for oldest in single[:-_MAX_SINGLE]:
            _remove(oldest)


def release(directory: Path, name: str) -> None:
    """Releases the lock of a name, so that other processes can save under it."""
    file = _file(directory, name)
    with _lock:
        if file in _held:
            _remove(file)


def check_free(directory: Path, name: str) -> None:
    """Checks that no other process saves under a name.

    Raises:
        CheckpointError: if another process does; the error names it.
    """
    file = _file(directory, name)
    with _lock:
        if file in _held:
            return
        try:
            descriptor = _opened(file, os.O_RDWR)
        except FileNotFoundError:
            return
        try:
            _flock(file, descriptor, fcntl.LOCK_SH)
        finally:
            os.close(descriptor)


def _file(directory: Path, name: str) -> Path:
    return directory.resolve() / f".{name}.distributary-lock"


def _acquired(file: Path) -> int:
    """Acquires the lock of a file, and returns its descriptor."""
    while True:
        descriptor = _opened(file, os.O_RDWR | os.O_CREAT)
        try:
            _flock(file, descriptor, fcntl.LOCK_EX)
            if _is_at(file, descriptor):  # the previous holder has not removed the file meanwhile
                found = os.pread(descriptor, 1000, 0)
                if found and _MARK.encode() not in found:
                    raise CheckpointError(
                        f"{file} is not a lock of checkpoints, but has its name. Move it away."
                    )
                if os.fstat(descriptor).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                    file.unlink()  # others may have it open, and could hold it after this job
                else:
                    _say_who(descriptor)
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _opened(file: Path, flags: int) -> int:
    try:
        return os.open(file, flags | os.O_NOFOLLOW | os.O_CLOEXEC, _MODE)
    except PermissionError:
        if not file.exists():
            raise
        raise CheckpointError(
            f"{file} is the lock of user {file.owner()}, whose job saves to {file.parent} under the"
            " same name. If that job has ended, remove the file; else choose another folder or"
            " name."
        ) from None


def _flock(file: Path, descriptor: int, kind: int) -> None:
    for attempt in range(_NUM_TRIES):
        if attempt:
            time.sleep(_SECONDS_BETWEEN_TRIES)
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return
        except (BlockingIOError, PermissionError):
            continue
        except OSError as error:
            _log.warning(
                "%s: this file system has no locks (%s), so two jobs that save here would not"
                " notice each other.",
                file.parent,
                error,
            )
            return
    raise CheckpointError(
        f"{_who(descriptor)} saves to {file.parent} under the same name, and two jobs would replace"
        " each other's checkpoints. End it, or choose another folder or name."
    )


def _say_who(descriptor: int) -> None:
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    holder = {"lock_of": _MARK, "host": socket.gethostname(), "pid": os.getpid(), "since": since}
    with contextlib.suppress(OSError):  # raised if the disk is full
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(holder).encode(), 0)


def _who(descriptor: int) -> str:
    try:
        holder = json.loads(os.pread(descriptor, 1000, 0))
        return f"process {holder['pid']} on host {holder['host']} (since {holder['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def _is_at(file: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(file))
    except FileNotFoundError:
        return False


def _remove(file: Path) -> None:
    descriptor = _held.pop(file).descriptor
    with contextlib.suppress(OSError):
        if _is_at(file, descriptor):
            file.unlink()
    os.close(descriptor)


@atexit.register
def _release_all() -> None:
    for file in list(_held):
        _remove(file)


def _leave_to_parent() -> None:
    """Forgets the locks in a forked process: they belong to its parent."""
    global _lock
    _lock = threading.Lock()
    while _held:
        os.close(_held.popitem()[1].descriptor)


os.register_at_fork(after_in_child=_leave_to_parent)
