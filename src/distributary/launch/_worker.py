"""One worker of the job, as seen by the launcher."""

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
    """The way in which a process has ended.

    Args:
        returncode: Exit code of the process, or minus the number of the signal that ended it.
    """

    returncode: int

    @property
    def exit_code(self) -> int:
        """Exit code as a shell reports it: 128 + the number for a signal."""
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
    """A running worker, together with the keeper process that is its parent.

    Args:
        task: Task that the worker is.
        command: Command line of the worker.
        environ: Environment of the worker.
        grace_seconds: Seconds between TERM and KILL.
        inherited_fd: Descriptor that it gets in addition to stdin, stdout and stderr.
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
        self.ending: Ending | None = None  # None while it is running
        self.is_gone = False  # true once its descendants have ended, too
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
                # Ctrl-C goes to the launcher alone, and the worker is not in the launcher's group.
                start_new_session=True,
            )
        self._control.setblocking(False)

    def fileno(self) -> int:
        """Returns the descriptor that becomes readable when `receive` has something to do."""
        return self._control.fileno()

    def take_output(self) -> tuple[int, int]:
        """Returns the descriptors of stdout and stderr, which then belong to the caller."""
        descriptors = []
        for stream in (self._keeper.stdout, self._keeper.stderr):
            assert stream is not None
            descriptors.append(os.dup(stream.fileno()))
            stream.close()
        return descriptors[0], descriptors[1]

    def receive(self) -> None:
        """Reads and notes the messages of the keeper."""
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
        """Ends the worker: TERM now, KILL after the grace period."""
        self._send(b"T")

    def kill(self) -> None:
        """Ends the worker at once."""
        self._send(b"K")

    def close(self) -> None:
        """Ends the worker at once if it is still running, and waits for its end."""
        self.kill()
        self._control.close()
        self._keeper.wait()

    def _finish(self) -> None:
        returncode = self._keeper.wait()
        self.is_gone = True
        self._control.close()
        if self.ending is None:  # the keeper was killed and, on Linux, the worker with it
            self.ending = Ending(returncode or 1)
            if self._pid is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._pid, signal.SIGKILL)

    def _send(self, command: bytes) -> None:
        if not self.is_gone:
            with contextlib.suppress(OSError):  # it has just ended
                self._control.send(command)
