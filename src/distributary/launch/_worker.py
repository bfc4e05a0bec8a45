"""One worker of the job, as the launcher sees it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from distributary.launch._environment import Task

__all__ = ["Ending", "Worker"]

_KEEPER = Path(__file__).with_name("_keeper.py")


@final
@dataclass(frozen=True)
class Ending:
    """How a process has ended.

    Args:
        returncode: Its exit code, or the negative number of the signal that ended it.
    """

    returncode: int

    @property
    def exit_code(self) -> int:
        """The code that a shell reports: 128 + the number for a signal."""
        return 128 - self.returncode if self.returncode < 0 else self.returncode

    def __str__(self) -> str:
        if self.returncode >= 0:
            return f"ended with exit code {self.returncode}"
        try:
            name = signal.Signals(-self.returncode).name
        except ValueError:  # a real-time signal
            name = "signal"
        return f"was ended by {name} ({-self.returncode})"


@final
class Worker:
    """A running worker with the keeper that is its parent.

    Args:
        task: Which task it is.
        command: Its command line.
        environ: Its environment.
        grace_seconds: Seconds between TERM and KILL.
        inherited_fd: A descriptor that it gets besides stdin, stdout and stderr.
    """

    def __init__(
        self,
        task: Task,
        command: Sequence[str],
        environ: Mapping[str, str],
        grace_seconds: float,
        inherited_fd: int,
    ) -> None:
        self.task = task
        self.ending: Ending | None = None  # None while it runs
        self.is_gone = False  # whether its descendants have ended, too
        self.started_at = time.monotonic()
        self._pid: int | None = None
        self._received = b""
        self._control, keeper_end = socket.socketpair()
        with keeper_end:
            keeper = [sys.executable, "-I", "-S", str(_KEEPER), str(keeper_end.fileno())]
            self._keeper = subprocess.Popen(
                [*keeper, str(grace_seconds), *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env=dict(environ),
                pass_fds=(keeper_end.fileno(), inherited_fd),
                # Ctrl-C goes to the launcher alone, and the launcher's group is not ours.
                start_new_session=True,
            )
        self._control.setblocking(False)

    def fileno(self) -> int:
        """The descriptor that becomes readable when `receive` has something to do."""
        return self._control.fileno()

    def take_output(self) -> tuple[int, int]:
        """Descriptors of stdout and stderr, which belong to the caller from now on."""
        descriptors = []
        for stream in (self._keeper.stdout, self._keeper.stderr):
            assert stream is not None
            descriptors.append(os.dup(stream.fileno()))
            stream.close()
        return descriptors[0], descriptors[1]

    def receive(self) -> None:
        """Takes note of what the keeper has said."""
        try:
            data = self._control.recv(4096)
        except BlockingIOError:
            return
        except ConnectionResetError:  # the keeper was killed with something unread
            data = b""
        self._received += data
        *lines, self._received = self._received.split(b"\n")
        for line in lines:
            word, number = line.decode().split()
            if word == "started":
                self._pid = int(number)
            else:
                self.ending = Ending(int(number) if word == "exit" else -int(number))
        if not data:
            self._finish()

    def terminate(self) -> None:
        """Asks for the end: TERM now, KILL after the grace period."""
        self._send(b"T")

    def kill(self) -> None:
        """Ends it at once."""
        self._send(b"K")

    def close(self) -> None:
        """Ends it at once if it still runs, and waits for its end."""
        self.kill()
        self._control.close()
        self._keeper.wait()

    def _finish(self) -> None:
        returncode = self._keeper.wait()
        self.is_gone = True
        self._control.close()
        if self.ending is None:  # somebody has killed the keeper, and Linux thereby the worker
            self.ending = Ending(returncode or 1)
            if self._pid is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._pid, signal.SIGKILL)

    def _send(self, command: bytes) -> None:
        if not self.is_gone:
            with contextlib.suppress(OSError):  # it has just ended
                self._control.send(command)
