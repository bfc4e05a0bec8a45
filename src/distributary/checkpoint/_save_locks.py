"""Locks, which let one writer at a time save under a name: of all jobs, threads and workers.

Between jobs, the lock of the checkpoints `ckpt-1`, `ckpt-2`, ... is on the file
`.ckpt.distributary-lock` beside them. The operating system releases it when its process ends, and
the process then removes the file. Nobody waits for a lock, and readers do not need one. Only the
user of the job can open the file: whoever can open it can hold the lock.
"""

import atexit
import collections
import contextlib
import fcntl
import json
import logging
import os
import re
import socket
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from distributary.devices import JobEvent, job_programs
from distributary.errors import CheckpointError, ClusterError
from distributary.job import consensus

# Agreements of the workers of a job that save and restore together.


def agree(
    what: str, timeout_seconds: float, compute: Callable[[], Any], topic: str | None = None
) -> list[Any]:
    """Returns the results of `compute` on every worker, in worker order.

    Args:
        what: Beginning of errors, which says what the workers do together.
        timeout_seconds: Seconds to wait for the others.
        compute: Function whose result can be written as JSON.
        topic: The conversation, if it is not that of the script.

    Raises:
        Exception: any error that `compute` raises on this worker.
        CheckpointError: if `compute` raises on another worker, or one does not take part in time.
    """
    job = consensus()
    if job is None:
        return [compute()]
    failures: list[BaseException] = []

    def say() -> Any:
        try:
            return compute()
        except BaseException as error:
            failures.append(error)
            raise

    try:
        if topic is None:
            return job.agree("restoring a checkpoint", say, seconds=timeout_seconds)
        return job.agree(topic, say, topic, timeout_seconds)
    except TimeoutError as error:
        raise absent(what, timeout_seconds, error) from error
    except ClusterError as error:
        if error in failures:
            raise
        raise CheckpointError(f"{what}: {error}") from error


def this_worker() -> tuple[int, int]:
    """Returns the number of this worker, and the number of workers."""
    job = consensus()
    return (0, 1) if job is None else (job.number, job.num_workers)


def absent(what: str, timeout_seconds: float, error: Exception) -> CheckpointError:
    """Returns the error about a worker that does not take part."""
    return CheckpointError(
        f"{what}: a worker did not take part within {timeout_seconds:g} s. All workers must save"
        f" and restore in the same order. Look at the output of the other workers ({error})."
    )


# The locks

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
_has_left = threading.Condition()  # of a lock and its queue
_queues: dict[Path, list["SaveLock"]] = collections.defaultdict(list)  # by folder
_BEGIN = JobEvent("saving a checkpoint")


@final
class SaveLock:
    """The lock of one checkpoint that all workers of a job write together.

    All of them create it, in the same order, and release it, used or not; meanwhile it may be
    handed to another thread. Threads of this process write to a folder in the order in which they
    have created their locks, so a checkpoint that is saved later is written later.

    Args:
        path: Path of the checkpoint.
        is_series: Whether checkpoints with other numbers belong to this job, too.
        timeout_seconds: Seconds that workers wait for each other, in each step.

    Raises:
        WorkerMismatchError: if the other workers do something else.
    """

    def __init__(self, path: Path, is_series: bool, timeout_seconds: float) -> None:
        self._path = path
        self._is_series = is_series
        self._timeout_seconds = timeout_seconds
        self._what = f"Checkpoint {path}"
        self._job = consensus()
        self._topic: str | None = None
        if self._job is not None:
            job_programs.begin(_BEGIN)
            self._topic = f"checkpoint {self._job.count('checkpoint')}"
        self._queue = _queues[path.parent.resolve()]
        with _has_left:
            self._queue.append(self)

    @property
    def is_chief(self) -> bool:
        """True if this process writes."""
        return self._job is None or self._job.number == 0

    def acquire(self) -> None:
        """Claims the name of the checkpoint, or of its series, for this job.

        Raises:
            CheckpointError: if its folder is something else, or another job saves there.
        """
        path = self._path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            file = next(p for p in path.parents if p.is_symlink() or p.exists())
            raise CheckpointError(
                f"{file} is not a folder. Move it away, or choose another path."
            ) from None
        name, _ = name_and_number(path)
        if name != path.name:
            check_free(path.parent, path.name if self._is_series else name)
        hold(path.parent, name if self._is_series else path.name, self._is_series)

    def agree(self, compute: Callable[[], Any]) -> list[Any]:
        """Returns the results of `compute` on every worker; see the function `agree`."""
        return agree(self._what, self._timeout_seconds, compute, self._topic)

    def run_on_chief(self, what: str, write: Callable[[], str]) -> str:
        """Runs `write` on the chief, when it is this lock's turn; returns its result on all.

        Args:
            what: Name of what is returned, once for each lock.
            write: The function.

        Raises:
            Exception: on the chief, any error that `write` raises.
            CheckpointError: on the other workers, if `write` raises an error or the chief does not
                finish in time.
        """
        topic, job = f"{what} of {self._topic}", self._job
        if job is not None and job.number:
            try:
                result, problem = job.receive(topic, self._timeout_seconds)
            except (TimeoutError, ClusterError) as error:
                raise absent(self._what, self._timeout_seconds, error) from error
            if problem is not None:
                raise CheckpointError(problem)
            return str(result)
        result, problem = None, "it was interrupted"
        try:
            with _has_left:
                _has_left.wait_for(lambda: self._queue[0] is self)
            self.acquire()  # again: the file of the lock may have been removed
            result, problem = write(), None
        except BaseException as error:
            problem = str(error) or type(error).__name__
            raise
        finally:
            if job is not None:
                job.send_to_all(topic, [result, problem])
        return result

    def release(self) -> None:
        """Lets the next thread write to the folder."""
        with _has_left:
            if self in self._queue:
                self._queue.remove(self)
                _has_left.notify_all()


def wait_for_writers(directory: Path) -> None:
    """Waits until the checkpoints that threads of this process write to a directory are there.

    A writer that fails releases its lock, too, and keeps its error for its manager.
    """
    queue = _queues.get(directory.resolve(), [])
    with _has_left:
        begun = list(queue)
        _has_left.wait_for(lambda: not any(lock in queue for lock in begun))


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


def name_and_number(path: Path) -> tuple[str, int | None]:
    """Splits the name of a checkpoint: `ckpt-7` into `"ckpt"` and 7."""
    match = re.fullmatch(r"(.+)-(\d+)", path.name)
    return (path.name, None) if match is None else (match[1], int(match[2]))


def _file(directory: Path, name: str) -> Path:
    return directory.resolve() / f".{name}.distributary-lock"


def _acquired(file: Path) -> int:
    """Acquires the lock of a file, and returns its descriptor."""
    while True:
        descriptor = _opened(file, os.O_RDWR | os.O_CREAT)
        try:
            _flock(file, descriptor, fcntl.LOCK_EX)
            if _is_at(file, descriptor):  # the previous holder has not removed the file meanwhile
                content = os.pread(descriptor, 1000, 0)
                if content and _MARK.encode() not in content:
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
