"""Single files of other formats: complete, written by one worker, perhaps with a checksum.

Formats such as HDF5 ignore what follows their content.
"""

import errno
import fcntl
import os
import re
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import google_crc32c

from distributary.checkpoint._commit import sync
from distributary.devices import job_programs
from distributary.errors import CheckpointError, ClusterError
from distributary.job import consensus

_SEAL = b"\ndistributary crc32c %08x"
_PIECE_BYTES = 4 << 20
_WAIT_SECONDS = 600.0
_LOCK = ".lock"


@contextmanager
def complete_file(path: Path) -> Iterator[Path]:
    """Yields a path to write to; at the end, it replaces the file, or is removed after an error."""
    path = path.resolve()  # of a link, so that its target is replaced and not the link
    try:
        with _beside(path) as temporary:
            yield temporary
            sync(temporary)
            os.replace(temporary, path)
            sync(path.parent)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        problem = CheckpointError(
            f"{path} was not saved: the disk is full ({os.strerror(error.errno)}). What was there"
            " before is kept."
        )
        problem.errno = error.errno
        raise problem from None


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """Yields a name that nobody else has; first removes what killed writers on this host have left.

    A writer holds the lock of its name. Its process id would say nothing: other containers have
    ids of their own, and perhaps the same host name.
    """
    # The name keeps its ending, from which Keras knows the format.
    stem, dot, end = path.name.partition(".")
    start, end = f".{stem}.distributary-{socket.gethostname()}-", f"{dot}{end}"
    pattern = re.compile(rf"({re.escape(start)}[0-9a-f]{{8}}{re.escape(end)}){_LOCK}")
    for match in filter(None, map(pattern.fullmatch, os.listdir(path.parent))):
        with suppress(OSError), path.with_name(match[0]).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an error while its writer is alive
            _remove(path.with_name(match[1]))
    temporary = path.with_name(f"{start}{secrets.token_hex(4)}{end}")
    with path.with_name(temporary.name + _LOCK).open("x") as lock:
        try:
            # Waits for one who finds the lock before it is held, and takes its writer for killed.
            with suppress(OSError):  # where there are no locks, all that is left stays
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield temporary
        finally:
            _remove(temporary)


def _remove(temporary: Path) -> None:
    with suppress(OSError):
        # HDF5 has the file open. If it cannot write the rest, it crashes when this process ends.
        os.truncate(temporary, 0)
    for path in (temporary, temporary.with_name(temporary.name + _LOCK)):
        with suppress(OSError):  # nothing may take the place of the writer's own error
            path.unlink()


def write_once(path: str, place: str, write: Callable[[], None]) -> None:
    """Calls `write` on the first worker of a job, and on those that write to another place.

    All of them call this, or the first one alone. There is no collective, so it waits for
    nobody.

    Args:
        path: Path of the file, as the user has given it.
        place: The same for all workers that mean the same file.
        write: Writes the file.

    Raises:
        ClusterError: on another worker, if the first one writes nothing in time.
        OSError: on another worker with the same place, if the first one cannot write.
    """
    job = consensus()
    assert job is not None
    # The first worker may save files that the others do not. So they ask for files of this
    # position.
    position = job_programs.position
    topic = f"file {job.count(f'files at {position}')} saved at place {position}"
    if job.number == 0:
        result: dict[str, Any] = {"path": place, "error": None}
        try:
            write()
        except BaseException as error:
            result["error"] = f"{type(error).__name__}: {error}"
            raise
        finally:
            job.send_to_all(topic, result)
        return
    try:
        result = job.receive(topic, _WAIT_SECONDS)
    except TimeoutError as error:
        raise ClusterError(
            f"Saving {path!r}: worker 0 has not saved anything within {_WAIT_SECONDS:g} s."
            " Call save on all workers, or on the first one alone."
        ) from error
    if result["path"] != place:
        write()
    elif result["error"] is not None:
        raise OSError(f"Worker 0 could not save {path!r}: {result['error']}")


def seal(path: Path) -> None:
    """Appends its checksum to a file."""
    checksum = _SEAL % _checksum(path)
    with path.open("ab") as file:
        file.write(checksum)


def is_sealed(path: Path) -> bool:
    """Returns whether there is a file, and it ends with a checksum."""
    return _seal_of(path) is not None


def is_damaged(path: Path) -> bool:
    """Returns whether a sealed file has changed, or is not complete."""
    seal = _seal_of(path)
    return seal is not None and seal != _SEAL % _checksum(path, len(seal))


def _seal_of(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            file.seek(-len(_SEAL % 0), os.SEEK_END)
            seal = file.read()
    except OSError:
        return None
    return seal if seal.startswith(_SEAL.partition(b"%")[0]) else None


def _checksum(path: Path, num_last_bytes: int = 0) -> int:
    """Returns the checksum of a file, except for its last bytes."""
    left, checksum = path.stat().st_size - num_last_bytes, 0
    with path.open("rb") as file:
        while data := file.read(min(left, _PIECE_BYTES)):
            checksum, left = google_crc32c.extend(checksum, data), left - len(data)
    return checksum
