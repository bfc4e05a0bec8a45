"""One worker of the job, as seen by the launcher."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

from distributary.launch._environment import STATUS_VARIABLE, Task
from distributary.launch._options import LaunchOptions
from distributary.launch._output import Output
from distributary.launch._status import StatusReader

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
    """One run of a task: its process, the keeper process that is its parent, output and status.

    Args:
        options: The job.
        task: Task that the worker is.
        number: Number that determines the color of its output.
        environ: Environment of the worker, without the descriptor for `report`.
        num_restarts: Number of times that the job, or one of its tasks, was started again.
        output: Shows its output, and messages.

    Attributes:
        ending: How the process has ended; None while it is running.
        is_gone: True once its descendants have ended, too.
        is_to_restart: True if the task starts again once this run is gone.
    """

    def __init__(
        self,
        options: LaunchOptions,
        task: Task,
        number: int,
        environ: Mapping[str, str],
        num_restarts: int,
        output: Output,
    ) -> None:
        self.task = task
        self.number = number
        self.ending: Ending | None = None
        self.is_gone = False
        self.is_to_restart = False
        self.started_at = time.monotonic()
        self._pid: int | None = None
        self._received = b""
        self.status = StatusReader(
            lambda: output.say(
                f"{task} writes lines to {STATUS_VARIABLE} that are not JSON with numbers; they are"
                " ignored."
            )
        )
        status_fd = self.status.write_fd
        self._control, keeper_end = socket.socketpair()
        with keeper_end:
            keeper = [sys.executable, "-I", "-S", str(_KEEPER), str(keeper_end.fileno())]
            self._keeper = subprocess.Popen(
                [*keeper, str(options.grace_seconds), *options.command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env={**environ, STATUS_VARIABLE: str(status_fd)},
                pass_fds=(keeper_end.fileno(), status_fd),
                # Ctrl-C goes to the launcher alone, and the worker is not in the launcher's group.
                start_new_session=True,
            )
        os.close(status_fd)
        self._control.setblocking(False)
        log_path = None
        if options.log_dir is not None:
            log_path = (
                options.log_dir / f"{task.task_type}-{task.task_id}.restart-{num_restarts}.log"
            )
        stdout, stderr = self._keeper.stdout, self._keeper.stderr
        assert stdout is not None
        assert stderr is not None
        self.output = output.attach(str(task), number, (stdout, stderr), log_path)

    def fileno(self) -> int:
        """Returns the descriptor that becomes readable when `receive` has something to do."""
        return self._control.fileno()

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
                self.ending = Ending(int(number))
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
