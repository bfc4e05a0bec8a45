"""Waits of the threads of this process and of its children, as Linux sees them.

They come from `/proc/<pid>/task/<tid>/syscall`, the system call in which a thread waits with its
arguments, and from processor times.

Source: proc(5), syscall(2), and clock_getcpuclockid(3) for the clocks of threads and processes.
"""

import contextlib
import ctypes
import operator
import os
import platform
import select
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import TypeAlias, final

_PRIVATE_FUTEX = 128
_FUTEX_COMMANDS = 127
_FUTEX_WAITS = {0, 6, 9}  # FUTEX_WAIT, FUTEX_LOCK_PI, FUTEX_WAIT_BITSET
_TIMER_ABSTIME = 1
_PAUSE_MICROSECONDS = 2000
_COMPUTED_SECONDS = 0.0002  # more than it takes to ask for the lock
_GET_FILE_OF_PROCESS = 438  # pidfd_getfd, the same number on all architectures
_MAX_FILES = 1024  # of those that one call waits for

_Arguments: TypeAlias = Sequence[int]  # of a system call, always six
_File: TypeAlias = tuple[int, bool]  # a descriptor, and whether the thread wants to write there

_libc = ctypes.PyDLL(None) if sys.platform == "linux" else None


class Kind(Enum):
    """The kinds of a wait."""

    NONE = auto()  # it computes, or could
    LOCK = auto()  # another thread must wake it, perhaps one of another process
    SLEEP = auto()
    FILES = auto()  # a file must become readable or writable
    CHILD = auto()  # a child must end
    SIGNAL = auto()
    UNKNOWN = auto()


@final
@dataclass(frozen=True)
class Wait:
    """The event that a thread waits for.

    Attributes:
        kind: Kind of the event.
        end: None if the wait may last forever, otherwise its deadline in nanoseconds of any clock;
            0 if only its duration is known.
        files: For `Kind.FILES`, descriptors and whether the thread wants to write there.
        is_private: For `Kind.LOCK`, whether only threads of the same process can wake it.
    """

    kind: Kind
    end: int | None = None
    files: tuple[_File, ...] = ()
    is_private: bool = True


_WaitOf: TypeAlias = Callable[[int, _Arguments], Wait]

_RUNS = Wait(Kind.NONE)
_UNKNOWN = Wait(Kind.UNKNOWN)


def can_look() -> bool:
    """Returns whether this machine tells what threads wait for."""
    return bool(_waits) and bool(_read_at_once(b"/proc/self/syscall"))


def wait_of(pid: int, tid: int) -> Wait:
    """Returns the present wait of a thread, without handing on the lock of Python."""
    fields = _read_at_once(b"/proc/%d/task/%d/syscall" % (pid, tid)).split()
    if not fields:
        return _UNKNOWN
    if fields[0] == b"running":
        return _RUNS
    wait = _waits.get(int(fields[0]))
    arguments = [int(field, 16) for field in fields[1:7]]
    if wait is None or len(arguments) < 6:  # the number is -1 outside of a system call
        return _UNKNOWN
    return wait(pid, arguments)


def is_from_elsewhere(wait: Wait, pid: int, tree: Collection[int], servers: bool) -> bool:
    """Returns whether a process outside of `tree` can end a wait for files.

    Args:
        wait: The wait of a thread of process `pid`.
        pid: The process.
        tree: This process and its children.
        servers: Whether the arrival of a new client counts.
    """
    return any(_is_file_from_elsewhere(pid, fd, writes, tree, servers) for fd, writes in wait.files)


def tasks_of(pid: int) -> list[int]:
    """Returns the ids of all threads of a process; an empty list if it has ended."""
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    return []


def children_of(pid: int, ignored: Collection[int]) -> list[int]:
    """Returns the running processes that a process and its children have started.

    Leaves out the `ignored` ones and the processes they have started.
    """
    found = []
    for tid in tasks_of(pid):
        for word in _read_at_once(b"/proc/%d/task/%d/children" % (pid, tid)).split():
            child = int(word)
            if child not in ignored and _state(child) not in ("", "Z", "X"):
                found += [child, *children_of(child, ignored)]
    return found


def is_stopped(pid: int) -> bool:
    """Returns whether a signal or a debugger has stopped a process."""
    return _state(pid) in ("T", "t")


def cpu_seconds_of_thread(tid: int) -> float | None:
    """Returns the processor time of a thread of this process; None if it has ended."""
    return _cpu_seconds(_clock_of_thread(tid))


def cpu_seconds_of_process(pid: int) -> float | None:
    """Returns the processor time of a process; None if it has ended."""
    return _cpu_seconds((~pid << 3) | 2)


def computes_without_python(tid: int) -> bool:
    """Returns whether a thread of this process computes while the caller has the lock of Python.

    Then it computes in a library, because a thread that executes Python waits for the lock.
    """
    if _libc is None:
        return True
    read = partial(time.clock_gettime, _clock_of_thread(tid))
    # A pause, in which the thread may have this core. All is one call in C, because between two
    # instructions of Python the lock could be handed over.
    pause = partial(_libc.usleep, _PAUSE_MICROSECONDS)
    try:
        before, _, after = map(operator.call, (read, pause, read))
    except OSError:
        return True
    return after - before > _COMPUTED_SECONDS


def num_bytes_moved(tid: int) -> int:
    """Returns the number of bytes that a thread of this process has read and written in files."""
    fields = _read_at_once(b"/proc/self/task/%d/io" % tid).split()
    return int(fields[1]) + int(fields[3]) if len(fields) > 3 else 0


def _clock_of_thread(tid: int) -> int:
    return (~tid << 3) | 6


def _cpu_seconds(clock: int) -> float | None:
    with contextlib.suppress(OSError):
        return time.clock_gettime(clock)
    return None


def _state(pid: int) -> str:
    # The name before the state, in parentheses, may hold any character.
    fields = _read_at_once(b"/proc/%d/stat" % pid).rpartition(b")")[2].split()
    return fields[0].decode() if fields else ""


def _read_at_once(path: bytes, offset: int = 0, num_bytes: int = 4096) -> bytes:
    """Reads a small file of /proc and keeps the lock of Python, as `os.read` does not.

    So the content belongs to the frames that are looked at in the same moment.
    """
    if _libc is None:
        return b""
    fd = _libc.open(path, os.O_RDONLY | os.O_CLOEXEC)
    if fd < 0:
        return b""
    buffer = ctypes.create_string_buffer(num_bytes)
    length = _libc.pread(fd, buffer, ctypes.c_size_t(num_bytes), ctypes.c_int64(offset))
    _libc.close(fd)
    return buffer.raw[: max(0, length)]


def _memory(pid: int, address: int, num_bytes: int) -> bytes:
    # Not through a pointer: the thread may have ended meanwhile, and its memory may be gone.
    data = _read_at_once(b"/proc/%d/mem" % pid, address, num_bytes)
    return data if len(data) == num_bytes else b""


def _time_at(pid: int, address: int) -> int | None:
    data = _memory(pid, address, 16)
    if not data:
        return None
    seconds, nanoseconds = struct.unpack("qq", data)
    return int(seconds) * 10**9 + int(nanoseconds)


def _is_negative(argument: int) -> bool:
    return bool(argument & 0x80000000)  # sign bit of an int


# The waits of system calls, from their arguments


def _futex_wait(pid: int, arguments: _Arguments) -> Wait:
    _, operation, _, timeout, *_ = arguments
    command = operation & _FUTEX_COMMANDS
    if command not in _FUTEX_WAITS:
        return _UNKNOWN
    end = None
    if timeout:
        end = (_time_at(pid, timeout) or 0) if command else 0
    return Wait(Kind.LOCK, end, is_private=bool(operation & _PRIVATE_FUTEX))


def _clock_wait(pid: int, arguments: _Arguments) -> Wait:
    is_absolute = arguments[1] & _TIMER_ABSTIME
    return Wait(Kind.SLEEP, (_time_at(pid, arguments[2]) or 0) if is_absolute else 0)


def _read_wait(pid: int, arguments: _Arguments) -> Wait:
    return Wait(Kind.FILES, files=((arguments[0], False),))


def _write_wait(pid: int, arguments: _Arguments) -> Wait:
    return Wait(Kind.FILES, files=((arguments[0], True),))


def _wait_for_any(files: Iterable[_File], is_endless: bool) -> Wait:
    end = None if is_endless else 0
    if files := tuple(files):
        return Wait(Kind.FILES, end, files)
    return Wait(Kind.SIGNAL if is_endless else Kind.SLEEP, end)


def _poll_wait(pid: int, arguments: _Arguments) -> Wait:
    return _wait_for_any(_polled(pid, arguments), _is_negative(arguments[2]))


def _ppoll_wait(pid: int, arguments: _Arguments) -> Wait:
    return _wait_for_any(_polled(pid, arguments), arguments[2] == 0)


def _select_wait(pid: int, arguments: _Arguments) -> Wait:
    return _wait_for_any(_selected(pid, arguments), arguments[4] == 0)


def _epoll_wait(pid: int, arguments: _Arguments) -> Wait:
    return _wait_for_any(_watched(pid, arguments[0]), _is_negative(arguments[3]))


def _signal_wait(pid: int, arguments: _Arguments) -> Wait:
    return Wait(Kind.SIGNAL)


def _timed_signal_wait(pid: int, arguments: _Arguments) -> Wait:
    return Wait(Kind.SIGNAL, None if arguments[2] == 0 else 0)


def _polled(pid: int, arguments: _Arguments) -> Iterator[_File]:
    address, number = arguments[0], min(arguments[1], _MAX_FILES)
    for fd, events, _ in struct.iter_unpack("ihh", _memory(pid, address, 8 * number)):
        if fd >= 0:
            yield from _wanted(fd, events)


def _wanted(fd: int, events: int) -> Iterator[_File]:
    if events & select.POLLOUT:
        yield fd, True
    if events & ~select.POLLOUT or not events:
        yield fd, False


def _selected(pid: int, arguments: _Arguments) -> Iterator[_File]:
    number = min(arguments[0], _MAX_FILES)
    for address, writes in ((arguments[1], False), (arguments[2], True)):
        if address:
            bits = int.from_bytes(_memory(pid, address, 8 * ((number + 63) // 64)), "little")
            yield from ((fd, writes) for fd in range(number) if bits >> fd & 1)


def _watched(pid: int, epoll: int) -> Iterator[_File]:
    for line in _read_at_once(b"/proc/%d/fdinfo/%d" % (pid, epoll), num_bytes=1 << 16).split(b"\n"):
        words = line.split()
        if len(words) > 3 and words[0] == b"tfd:":
            yield from _wanted(int(words[1]), int(words[3], 16) & 0xFFFF)


# The numbers of each call on x86-64 and aarch64, which lacks some; from the tables of Linux.
_CALLS: dict[str, tuple[int | None, int | None, _WaitOf]] = {
    "read": (0, 63, _read_wait),
    "readv": (19, 65, _read_wait),
    "pread64": (17, 67, _read_wait),
    "recvfrom": (45, 207, _read_wait),
    "recvmsg": (47, 212, _read_wait),
    "accept": (43, 202, _read_wait),
    "accept4": (288, 242, _read_wait),
    "write": (1, 64, _write_wait),
    "writev": (20, 66, _write_wait),
    "sendto": (44, 206, _write_wait),
    "sendmsg": (46, 211, _write_wait),
    "poll": (7, None, _poll_wait),
    "ppoll": (271, 73, _ppoll_wait),
    "select": (23, None, _select_wait),
    "pselect6": (270, 72, _select_wait),
    "epoll_wait": (232, None, _epoll_wait),
    "epoll_pwait": (281, 22, _epoll_wait),
    "futex": (202, 98, _futex_wait),
    "nanosleep": (35, 101, lambda pid, arguments: Wait(Kind.SLEEP, 0)),
    "clock_nanosleep": (230, 115, _clock_wait),
    "wait4": (61, 260, lambda pid, arguments: Wait(Kind.CHILD)),
    "waitid": (247, 95, lambda pid, arguments: Wait(Kind.CHILD)),
    "pause": (34, None, _signal_wait),
    "rt_sigsuspend": (130, 133, _signal_wait),
    "rt_sigtimedwait": (128, 137, _timed_signal_wait),
}
_column = {"x86_64": 0, "aarch64": 1}.get(platform.machine())
_waits = {} if _column is None else {call[_column]: call[2] for call in _CALLS.values()}


# Who has the other end


def _is_file_from_elsewhere(
    pid: int, fd: int, writes: bool, tree: Collection[int], servers: bool
) -> bool:
    path = f"/proc/{pid}/fd/{fd}"
    try:
        status, target = os.stat(path), os.readlink(path)
    except OSError:
        return True
    if stat.S_ISFIFO(status.st_mode):
        return not _is_pipe_held(status.st_ino, tree, by_readers=writes)
    if stat.S_ISSOCK(status.st_mode):
        return _is_socket_from_elsewhere(pid, fd, tree, servers)
    if target.startswith("anon_inode:"):
        if "eventpoll" in target:
            inner = Wait(Kind.FILES, files=tuple(_watched(pid, fd)))
            return is_from_elsewhere(inner, pid, tree, servers)
        return "pidfd" not in target  # threads of libraries wake each other by an eventfd
    # A wait for a person at a terminal may never end; one for a disk ends by itself.
    return writes or not target.startswith(("/dev/tty", "/dev/pts/", "/dev/console"))


def _is_pipe_held(number: int, tree: Collection[int], by_readers: bool) -> bool:
    """Returns whether a process of `tree` holds the other end of a pipe."""
    wanted = os.O_RDONLY if by_readers else os.O_WRONLY
    for pid in tree:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                if _is_open_pipe(pid, int(name), number, {wanted, os.O_RDWR}):
                    return True
    return False


def _is_open_pipe(pid: int, fd: int, number: int, modes: Collection[int]) -> bool:
    with contextlib.suppress(OSError):
        status = os.stat(f"/proc/{pid}/fd/{fd}")
        if stat.S_ISFIFO(status.st_mode) and status.st_ino == number:
            text = _read_at_once(b"/proc/%d/fdinfo/%d" % (pid, fd))
            flags = text.partition(b"flags:")[2].split()
            return bool(flags) and int(flags[0], 8) & os.O_ACCMODE in modes
    return False


def _is_socket_from_elsewhere(pid: int, fd: int, tree: Collection[int], servers: bool) -> bool:
    try:
        copy = socket.socket(fileno=_copy(pid, fd))
    except OSError:
        return True
    with copy:
        if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return servers
        if copy.family != socket.AF_UNIX:
            return True
        peer = copy.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return struct.unpack("3i", peer)[0] not in tree


def _copy(pid: int, fd: int) -> int:
    """Returns a descriptor for a file that a process of the tree has open."""
    if pid == os.getpid():
        return os.dup(fd)
    assert _libc is not None
    process = os.pidfd_open(pid)
    try:
        copy: int = _libc.syscall(_GET_FILE_OF_PROCESS, process, fd, 0)
    finally:
        os.close(process)
    if copy < 0:
        raise OSError(f"process {pid} does not show its file {fd}")
    return copy
