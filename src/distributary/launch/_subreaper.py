"""The parent process of one worker: nothing that the worker starts outlives it.

The launcher runs this file with the standard library alone, without importing distributary:

    python -I -S _subreaper.py CONTROL_FD GRACE_SECONDS COMMAND [ARGUMENT ...]

`CONTROL_FD` is a stream socket with the messages of `job.Channel`. The launcher sends `T` (send
TERM, and KILL after the grace period) or `K` (send KILL). When the launcher ends, in whatever way,
the socket is closed. That means the same as `T`, so the workers get their grace period even if the
launcher was killed. The subreaper sends `started` with the process id and `ended` with the exit
code, where a signal has a negative number, and closes the socket when no process is left.

On Linux the subreaper is the subreaper of its descendants: those that lose their parent become its
children. So it finds them even in sessions of their own, and "no child left" means that all are
gone. If the subreaper itself is killed, the worker gets KILL. On other systems, only the worker's
process group is known.
"""

import contextlib
import os
import select
import signal
import sys
import time

_IS_LINUX = sys.platform == "linux"
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_PR_SET_CHILD_SUBREAPER = 36
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_POLL_SECONDS = 0.02  # while processes are being ended
_NOT_STARTED = 127  # exit code of shells for a command that does not exist


class _Subreaper:
    """A parent process that starts the worker, waits, and ends it with all its descendants.

    Args:
        control_fd: Stream socket to the launcher.
        grace_seconds: Seconds between TERM and KILL.
        command: Command line of the worker.
    """

    def __init__(self, control_fd: int, grace_seconds: float, command: list[str]) -> None:
        self._control_fd = control_fd
        self._grace_seconds = grace_seconds
        self._command = command
        self._has_launcher = True
        self._worker_is_alive = True
        self._kill_at: float | None = None  # set once the processes should end
        self._signalled: set[int] = set()  # process groups that have received TERM

    def run(self) -> None:
        """Runs until the worker and everything that it has started have ended."""
        os.set_inheritable(self._control_fd, False)
        wake_fd = self._install_handlers()
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._pid = self._start_worker()
        self._send("started", self._pid)
        while self._reap():
            if self._kill_at is not None:
                self._end_processes()
            watched = [wake_fd, *([self._control_fd] if self._has_launcher else [])]
            timeout = None if self._kill_at is None else _POLL_SECONDS
            ready, _, _ = select.select(watched, [], [], timeout)
            if wake_fd in ready and set(os.read(wake_fd, 4096)) & set(_STOP_SIGNALS):
                self._begin_to_end(self._grace_seconds)
            if self._control_fd in ready:
                told = os.read(self._control_fd, 4096)
                self._has_launcher = bool(told)
                self._begin_to_end(0 if b"K" in told else self._grace_seconds)

    def _install_handlers(self) -> int:
        """Returns a descriptor on which the numbers of received signals can be read."""
        read_fd, write_fd = os.pipe()
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        for number in (*_STOP_SIGNALS, signal.SIGCHLD):
            signal.signal(number, lambda number, frame: None)  # but not ignored
        return read_fd

    def _start_worker(self) -> int:
        parent_pid = os.getpid()
        # Without this, a signal between fork and exec would reach a handler that does nothing.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
        pid = os.fork()
        if pid == 0:
            try:
                os.setpgid(0, 0)
                _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != parent_pid:  # the subreaper ended before prctl
                    os._exit(_NOT_STARTED)
                # Python ignores SIGPIPE; programs expect the default at their start.
                for number in (*_STOP_SIGNALS, signal.SIGPIPE, signal.SIGXFSZ):
                    signal.signal(number, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                os.execvp(self._command[0], self._command)
            except OSError as error:
                message = f"cannot start {self._command[0]!r}: {error.strerror}\n"
                os.write(2, message.encode())
            finally:
                os._exit(_NOT_STARTED)
        with contextlib.suppress(OSError):  # the worker did it first, or has already ended
            os.setpgid(pid, pid)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return pid

    def _begin_to_end(self, grace_seconds: float) -> None:
        kill_at = time.monotonic() + grace_seconds
        self._kill_at = kill_at if self._kill_at is None else min(self._kill_at, kill_at)

    def _end_processes(self) -> None:
        assert self._kill_at is not None
        is_kill = time.monotonic() >= self._kill_at
        for group in self._groups():
            if is_kill:
                _signal_group(group, signal.SIGKILL)
            elif group not in self._signalled:
                self._signalled.add(group)
                _signal_group(group, signal.SIGTERM)
                _signal_group(group, signal.SIGCONT)  # a stopped process would not receive TERM

    def _groups(self) -> set[int]:
        """Returns the process groups that contain a child of the subreaper.

        A process that was not waited for keeps its number, and so does its group. So none of these
        numbers can belong to an unrelated process.
        """
        groups = {self._pid} if self._worker_is_alive or not _IS_LINUX else set()
        with contextlib.suppress(OSError):
            pid = os.getpid()
            with open(f"/proc/self/task/{pid}/children", encoding="ascii") as file:
                for child in file.read().split():
                    with contextlib.suppress(OSError):
                        groups.add(os.getpgid(int(child)))
        return groups - {os.getpgrp()}

    def _reap(self) -> bool:
        """Waits for ended children without blocking; returns False when no process is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return not _IS_LINUX and _signal_group(self._pid, 0)
            if pid == 0:
                return True
            if pid == self._pid:
                self._worker_is_alive = False
                self._send("ended", os.waitstatus_to_exitcode(status))
                self._begin_to_end(self._grace_seconds)  # the processes that it has left behind

    def _send(self, kind: str, number: int) -> None:
        with contextlib.suppress(OSError):  # the launcher has ended
            os.write(self._control_fd, f'["{kind}", {number}, 0]\n'.encode())


def _prctl(option: int, argument: int) -> None:
    """Makes the system call of that name; on other systems than Linux, it does nothing."""
    if _IS_LINUX:
        import ctypes

        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(argument), 0, 0, 0)


def _signal_group(group: int, number: int) -> bool:
    """Sends a signal to a process group; returns whether there is such a group of ours."""
    try:
        os.killpg(group, number)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    _Subreaper(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]).run()
