"""One worker of the job, as seen by the launcher: a process, its parent, and its output."""

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, final

from distributary.cluster_resolver import join_address
from distributary.errors import ClusterError
from distributary.job import Channel, ChannelClosedError
from distributary.launch._environment import Task
from distributary.launch._options import LaunchOptions
from distributary.launch._output import Output
from distributary.launch._status import STATUS_VARIABLE, ReportedNumbers

# Below the ports that systems give out on request, so that no other program gets one meanwhile.
_PORTS = range(10_000, 32_000)
# Other processes that run this start elsewhere. Candidates do not follow one another, because
# metrics are served at the ports after a given one.
_candidates = itertools.count(os.getpid() * 1009, 61)
_SUBREAPER = Path(__file__).with_name("_subreaper.py")


def free_addresses(host: str, count: int) -> list[str]:
    """Returns `HOST:PORT` of different ports that are free on an address of this machine.

    The ports are not reserved: until the workers bind them, another process can take one. The
    worker then fails, and a restart takes other ports.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    ports: list[int] = []
    for candidate in itertools.islice(_candidates, len(_PORTS)):
        if len(ports) == count:
            break
        port = _PORTS[candidate % len(_PORTS)]
        with socket.socket(family, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            ports.append(port)
    if len(ports) < count:
        raise ClusterError(
            f"{host} does not have {count} free ports between {_PORTS.start} and {_PORTS.stop}."
            " Check that it is an address of this machine, and end programs that listen there."
        )
    return [join_address(host, port) for port in ports]


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
    """One run of a task: its process, the subreaper process that is its parent, and its output.

    Args:
        options: The job.
        task: Task that the worker is.
        number: Number that determines the color of its output.
        environ: Environment of the worker, without the descriptor for `report`.
        num_restarts: Number of times that the job, or one of its tasks, was started again.
        output: Shows its output, and messages.

    Attributes:
        reported: The numbers that it has reported.
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
        self.reported = ReportedNumbers(
            lambda: output.say(
                f"{task} writes lines to {STATUS_VARIABLE} that are not JSON with numbers; they are"
                " ignored."
            )
        )
        log = _opened_log(options, task, num_restarts, output)
        status_read, status_fd = os.pipe()
        os.set_blocking(status_fd, False)
        control, subreaper_end = socket.socketpair()
        self._control = Channel(control, f"the subreaper of {task}")
        with subreaper_end:
            subreaper = [sys.executable, "-I", "-S", str(_SUBREAPER), str(subreaper_end.fileno())]
            self._subreaper = subprocess.Popen(
                [*subreaper, str(options.grace_seconds), *options.command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env={**environ, STATUS_VARIABLE: str(status_fd)},
                pass_fds=(subreaper_end.fileno(), status_fd),
                # Ctrl-C goes to the launcher alone, and the worker is not in the launcher's group.
                start_new_session=True,
            )
        os.close(status_fd)
        stdout, stderr = self._subreaper.stdout, self._subreaper.stderr
        assert stdout is not None
        assert stderr is not None
        streams = (stdout, stderr, os.fdopen(status_read, "rb", buffering=0))
        self.output = output.attach(str(task), number, streams, log, self.reported.read)

    def fileno(self) -> int:
        """Returns the descriptor that becomes readable when `receive` has something to do."""
        return self._control.fileno()

    def receive(self) -> None:
        """Reads and notes the messages of the subreaper."""
        try:
            for kind, number, _ in self._control.arrived():
                if kind == "started":
                    self._pid = number
                else:
                    self.ending = Ending(number)
        except ChannelClosedError:
            self._finish()

    def terminate(self) -> None:
        """Ends the worker: TERM now, KILL after the grace period."""
        self._send("T")

    def kill(self) -> None:
        """Ends the worker at once."""
        self._send("K")

    def close(self) -> None:
        """Ends the worker at once if it is still running, and waits for its end."""
        self.kill()
        self._control.close()
        self._subreaper.wait()

    def _finish(self) -> None:
        returncode = self._subreaper.wait()
        self.is_gone = True
        self._control.close()
        if self.ending is None:  # the subreaper was killed and, on Linux, the worker with it
            self.ending = Ending(returncode or 1)
            if self._pid is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._pid, signal.SIGKILL)

    def _send(self, command: str) -> None:
        if not self.is_gone:
            with contextlib.suppress(OSError):  # it has just ended
                self._control.send(command)


def _opened_log(
    options: LaunchOptions, task: Task, num_restarts: int, output: Output
) -> BinaryIO | None:
    """Opens the log of a run; None without `log_dir`, or if a job that has begun has no room."""
    if options.log_dir is None:
        return None
    path = options.log_dir / f"{task.task_type}-{task.task_id}.restart-{num_restarts}.log"
    try:
        return open(path, "wb", buffering=0)
    except OSError as error:
        if not num_restarts:
            raise
        output.say(f"{path} is not written: {error.strerror}.")
        return None
