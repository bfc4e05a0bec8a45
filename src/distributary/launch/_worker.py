"""One worker of the job, as seen by the launcher: environment, numbers, process, output."""

import contextlib
import difflib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, TypeAlias, final

from distributary._threads import SHARE_VARIABLE, num_cores, threads_needed
from distributary.cluster_resolver import TOKEN_VARIABLE, join_address
from distributary.errors import ClusterError
from distributary.job import Channel, ChannelClosedError
from distributary.launch._options import LaunchOptions
from distributary.launch._output import Output

# What the launcher sets in the environment, and what nobody reads there.

RESTART_VARIABLE: Final = "DISTRIBUTARY_RESTART"

# glibc gives large freed blocks back to the system, so XLA's temporary buffers cause page faults
# again in every step. With these settings, a transformer step takes 0.76x and a 40 MB all-reduce
# over gloo 0.54x the time.
ALLOCATOR_SETTINGS: Final = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "2147483647",
    "MALLOC_TOP_PAD_": "67108864",
}
_THREAD_VARIABLES = ("PJRT_NPROC", "NPROC")
_SETTINGS = "CERTS CONNECT_SECONDS CPU_REWRITES METRICS_PORT NPROC RESTART STATUS_FD TOKEN"
_VARIABLES = [f"DISTRIBUTARY_{name}" for name in _SETTINGS.split()]


@final
@dataclass(frozen=True)
class Task:
    """A task of the job: its type, and its number among the tasks of that type."""

    task_type: str
    task_id: int

    def __str__(self) -> str:
        return f"{self.task_type} {self.task_id}"


def worker_environ(
    environ: Mapping[str, str],
    options: LaunchOptions,
    task: Task,
    cluster: Mapping[str, Sequence[str]],
    num_restarts: int,
    token: str | None = None,
) -> dict[str, str]:
    """Returns the environment of one worker, without its descriptor for `report`.

    Sets `TF_CONFIG`, `DISTRIBUTARY_RESTART` and, with `devices_per_worker`, `JAX_NUM_CPU_DEVICES`.
    Variables that the user has not set are added:
    `PYTHONUNBUFFERED=1`, so that output appears as soon as it is written, and
    `GRPC_VERBOSITY=ERROR` in jobs with servers. With `tune`, also the allocator settings of glibc,
    and the size of XLA's thread pool: the worker's share of the cores, or more if its devices need
    more. Removes the token of the hosts; in a job with servers, chief, workers and servers get
    another one.

    Args:
        environ: Environment of the launcher.
        options: The job.
        task: The task that the worker is.
        cluster: Addresses of the job's tasks by type, in the order of their numbers.
        num_restarts: Number of times that the job, or one of its tasks, was started again.
        token: Secret that the tasks of a job with servers share; None without servers.
    """
    result = dict(environ)
    result.pop(TOKEN_VARIABLE, None)
    if token is not None and task.task_type in cluster:  # an evaluator gets none
        result[TOKEN_VARIABLE] = token
    jobs = {task_type: list(addresses) for task_type, addresses in cluster.items()}
    own = {"type": task.task_type, "index": task.task_id}
    result["TF_CONFIG"] = json.dumps({"cluster": jobs, "task": own})
    result[RESTART_VARIABLE] = str(num_restarts)
    result.setdefault("PYTHONUNBUFFERED", "1")
    if options.num_servers:
        # Otherwise gRPC logs that the servers have ended when the job ends.
        result.setdefault("GRPC_VERBOSITY", "ERROR")
    if options.devices_per_worker is not None:
        result["JAX_NUM_CPU_DEVICES"] = str(options.devices_per_worker)
    if options.tune:
        if sys.platform == "linux":
            for name, value in ALLOCATOR_SETTINGS.items():
                result.setdefault(name, value)
        # More threads than its share would only take cores from other workers.
        share = num_cores() // options.num_workers
        num_threads = max(1, share, threads_needed(options.devices_per_worker or 1))
        if num_threads != num_cores() and not any(v in environ for v in _THREAD_VARIABLES):
            result[_THREAD_VARIABLES[0]] = result[SHARE_VARIABLE] = str(num_threads)
    return result


def replaced_settings(environ: Mapping[str, str], options: LaunchOptions) -> list[str]:
    """Returns one sentence for each setting of the user that workers get differently."""
    sentences = []
    if "TF_CONFIG" in environ:
        sentences.append("TF_CONFIG is set here; workers get one of their own instead.")
    devices = options.devices_per_worker
    if devices is not None:
        value = environ.get("JAX_NUM_CPU_DEVICES", str(devices))
        if value != str(devices):
            sentences.append(
                f"JAX_NUM_CPU_DEVICES={value} is set here; workers get {devices} instead, from"
                " --devices-per-worker."
            )
        if "xla_force_host_platform_device_count" in environ.get("XLA_FLAGS", ""):
            sentences.append(
                "XLA_FLAGS sets xla_force_host_platform_device_count, and --devices-per-worker sets"
                f" JAX_NUM_CPU_DEVICES={devices}. Remove one of the two."
            )
    return sentences


def misspelled(environ: Mapping[str, str] | None = None) -> Iterator[str]:
    """Yields what to say of variables with names that are almost those of distributary.

    Args:
        environ: Environment to read; `os.environ` by default.
    """
    for name in os.environ if environ is None else environ:
        close = difflib.get_close_matches(name, _VARIABLES, 1, 0.92)
        if name.startswith("DISTRIBUTARY_") and close and name != close[0]:
            yield f"distributary does not read {name} of the environment. Did you mean {close[0]}?"


# What the worker reports

STATUS_VARIABLE: Final = "DISTRIBUTARY_STATUS_FD"
#: Numbers of a run by name: the same on the page, in files and on the way to a launcher. Names have
#: the form of TensorBoard's tags, `"step/compute_seconds"` for example.
Numbers: TypeAlias = dict[str, float]


@final
class ReportedNumbers:
    """The numbers that one worker has reported.

    Args:
        warn: Called at the first line that `report` would not write.
    """

    def __init__(self, warn: Callable[[], None]) -> None:
        self._warn: Callable[[], None] | None = warn
        self._last: Numbers = {}

    def read(self, line: bytes) -> None:
        """Takes the numbers from a line."""
        try:
            values = {str(name): float(value) for name, value in json.loads(line).items()}
        except (AttributeError, TypeError, ValueError, OverflowError, RecursionError):
            if self._warn is not None:
                self._warn()
            self._warn = None
        else:
            self._last = {**self._last, **values}  # a new dict, because other threads read it

    def numbers(self) -> Numbers:
        """Returns all numbers that the worker has reported, the latest of each. For any thread."""
        numbers = dict(self._last)
        if "step" in numbers:
            numbers.setdefault("num_steps", numbers["step"])
        return numbers

    def __str__(self) -> str:
        """Returns the worker's latest progress, `""` if there is none."""
        formats = {"step": "step {:.0f}", "examples_per_second": "{:.0f} examples/s"}
        last = self._last
        return ", ".join(text.format(last[name]) for name, text in formats.items() if name in last)


# Its process

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
