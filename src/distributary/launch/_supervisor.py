"""Runs the workers of one host, following the commands of the job, from beginning to end."""

import collections
import contextlib
import os
import sched
import secrets
import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, Final, final

from distributary.errors import InvalidValueError, LaunchError, WorkerLostError
from distributary.launch import _restarts as restarts
from distributary.launch._hosts import Link, LocalLink, Master, RemoteLink
from distributary.launch._options import LaunchOptions
from distributary.launch._output import REFUSED_EXIT_CODE, Output
from distributary.launch._worker import (
    Ending,
    Task,
    Worker,
    free_addresses,
    replaced_settings,
    worker_environ,
)

# Time for the last lines of an ended worker to arrive. Processes that it has left behind may hold
# its stderr open.
_LAST_LINES_SECONDS = 0.3
# Time for a lost worker to end, after a worker that has ended because of it.
_LOST_WORKER_SECONDS = 1.0
# Time for the chief to end, after a worker or server that may end because the chief is about to.
_CHIEF_ENDS_SECONDS = 3.0
_SECONDS_BETWEEN_TASKS = 1.0
RUNNING: Final = "running"
_NOUNS: Final = {"chief": "chiefs", "worker": "workers", "ps": "ps"}


def run(
    options: LaunchOptions,
    *,
    serve: Callable[..., Any] | None = None,
    environ: Mapping[str, str] | None = None,
    stdout_fd: int = 1,
    stderr_fd: int = 2,
) -> int:
    """Runs a job on this host, and returns its exit code when none of its processes is left.

    Call it in the main thread, because it handles signals: SIGINT, SIGTERM and SIGHUP end the job.

    Args:
        options: The job.
        serve: Serves the page at `options.dashboard_port`: `distributary.tools.monitoring.serve`.
            It gets the options, a function that returns the tasks of this host and, on host 0, of
            all, by rank, and one that returns what the launcher has said, and when.
        environ: Environment of the workers; `os.environ` by default.
        stdout_fd: Descriptor for the workers' stdout.
        stderr_fd: Descriptor for the workers' stderr and for messages.

    Returns:
        0 if all workers have ended with exit code 0, or else the exit code of the worker that
        failed first. If a signal ended that worker or the launcher, 128 + the signal's number.

    Raises:
        InvalidValueError: for a `dashboard_port` without `serve`.
        LaunchError: if the hosts do not find each other.
        OSError: if a worker cannot be started, or a log file cannot be opened.
    """
    if options.dashboard_port is not None and serve is None:
        raise InvalidValueError(
            f"launch: dashboard_port is {options.dashboard_port}, but nothing serves the page. Pass"
            " serve=distributary.tools.monitoring.serve."
        )
    environ = dict(os.environ if environ is None else environ)
    if options.log_dir is not None:
        try:
            options.log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(
                f"launch: --log-dir {options.log_dir} cannot be made: {error.strerror}. Name"
                " another folder."
            ) from error
    signals = Signals(options.grace_seconds + 1)
    output = Output(stdout_fd, stderr_fd, environ, signals.want_end_now)
    with contextlib.ExitStack() as stack:
        stack.callback(output.close)
        for sentence in replaced_settings(environ, options):
            output.say(sentence)
        master: Master | None = None
        # Until the first worker starts, signals have their usual effect.
        if options.hosts is None:
            link: Link = LocalLink(options.max_restarts)
        else:
            if options.is_first_host:
                master = Master(options, output.say)
                stack.callback(master.close)
            link = RemoteLink(options.hosts, options.devices_per_worker)
        stack.callback(link.close)
        stack.enter_context(signals)
        supervisor = Supervisor(options, environ, link, output, signals)
        output.status = supervisor.status
        if serve is not None and options.dashboard_port is not None:
            others = dict if master is None else master.tasks
            tasks = lambda: {options.host_rank: supervisor.tasks(), **others()}
            page = stack.enter_context(serve(options, tasks, lambda: list(output.messages)))
            output.say(f"The dashboard is at {page.url}")
        return supervisor.run()


@final
@dataclass(eq=False)
class Supervisor:
    """A supervisor, which starts, watches and ends the workers of one host.

    Args:
        options: The job.
        environ: Environment of the launcher.
        link: Source of the commands.
        output: Shows the output of workers, and messages.
        signals: The signals that the launcher gets.
    """

    options: LaunchOptions
    environ: Mapping[str, str]
    link: Link
    output: Output
    signals: "Signals"

    def __post_init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers = sched.scheduler(time.monotonic)
        self._workers: list[Worker] = []  # of the current attempt
        self._num_workers = self.options.num_workers  # that this attempt has
        self._generation = 0
        self._num_restarts = 0
        self._token = secrets.token_hex(32) if self.options.num_servers else None
        self._cluster: dict[str, Sequence[str]] = {}
        # The job ends when all tasks of this type have ended.
        self._main_type = "chief" if self.options.num_servers else "worker"
        # The command because of which all workers end: for a start, or for good.
        self._ending: restarts.Prepare | restarts.Exit | None = None
        self._started_at = time.monotonic()
        self._num_starts: collections.Counter[str] = collections.Counter()  # by task

    def run(self) -> int:
        """Runs until no process of the job is left on this host; returns the job's exit code."""
        self._selector.register(self.signals, selectors.EVENT_READ, self._on_signal)
        if self.link.fileno() >= 0:
            self._selector.register(self.link, selectors.EVENT_READ, self._on_command)
        if not self.options.is_first_host:
            self._send_tasks()
        seconds: float | None = 0.0  # until the next timer
        try:
            while True:
                self._on_command()
                if self._ending is not None and all(worker.is_gone for worker in self._workers):
                    for worker in self._workers:
                        self.output.wait(worker.output)
                    if isinstance(self._ending, restarts.Exit):
                        return self._finish(self._ending)
                    self._get_ready(self._ending)
                    continue
                for key, _ in self._selector.select(seconds):
                    key.data()
                seconds = self._timers.run(blocking=False)
        finally:
            for worker in self._workers:
                worker.close()
            self._selector.close()

    def status(self) -> str:
        """Returns the state in one line, `""` while there is nothing to say. For any thread."""
        workers = self._workers
        if not workers:
            return ""
        parts = [count_running(self._states(workers))]
        if self._ending is not None:
            parts[0] += ", ending"
        if self.options.max_restarts:
            parts.append(f"restart {self._num_restarts} of {self.options.max_restarts}")
        parts.append(f"{time.monotonic() - self._started_at:.0f} s")
        states = [(worker.task, str(worker.ending or worker.reported)) for worker in workers]
        return " · ".join([*parts, *(f"{task}: {state}" for task, state in states if state)])

    def tasks(self) -> restarts.Tasks:
        """Returns the tasks of this host. For any thread."""
        workers = self._workers
        numbers = {str(worker.task): worker.reported.numbers() for worker in workers}
        return restarts.Tasks(self._states(workers), numbers)

    def _states(self, workers: Sequence[Worker]) -> list[restarts.TaskState]:
        return [
            restarts.TaskState(
                name=str(worker.task),
                state=str(worker.ending or RUNNING),
                has_failed=worker.ending is not None and bool(worker.ending.returncode),
                num_restarts=self._num_starts[str(worker.task)] - 1,
            )
            for worker in workers
        ]

    def _send_tasks(self) -> None:
        self.link.send(self.tasks())
        self._timers.enter(_SECONDS_BETWEEN_TASKS, 0, self._send_tasks)

    # Commands of the job

    def _on_command(self) -> None:
        try:
            for command in self.link.receive():
                self._obey(command)
        except LaunchError as error:
            if not isinstance(self._ending, restarts.Exit):
                self._end_workers(restarts.Exit(1, str(error)))
            self._selector.unregister(self.link)
            self.link.close()

    def _obey(self, command: restarts.Command) -> None:
        if isinstance(self._ending, restarts.Exit):
            return
        match command:
            case restarts.Start():
                self._start(command)
            case restarts.Restart(num_restarts, task, text):
                self._num_restarts = num_restarts
                self.output.say(
                    f"{text}; starting it again, restart {num_restarts} of"
                    f" {self.options.max_restarts}."
                )
                for worker in self._workers:
                    if str(worker.task) == task:
                        worker.is_to_restart = True
                        self._restart_if_gone(worker)
            case restarts.Prepare(generation):
                hosts = self.options.hosts
                is_limited = hosts is None or hosts.min_hosts is None  # unless hosts come later
                limit = f" of {self.options.max_restarts}" if is_limited else ""
                self._end_workers(command, f"ending all workers for restart {generation}{limit}")
            case restarts.Exit():
                self._end_workers(command)

    def _end_workers(
        self, command: restarts.Prepare | restarts.Exit, what: str = "ending all workers"
    ) -> None:
        self._ending = command
        if command.text:
            self.output.say(f"{self._where(command)}{command.text}; {what}.")
        for worker in self._workers:
            worker.terminate()

    def _where(self, command: restarts.Prepare | restarts.Exit) -> str:
        """Returns a prefix that names the host that caused a command, if it is another one."""
        hosts, origin = self.options.hosts, command.origin
        return "" if hosts is None or origin in (-1, hosts.host_rank) else f"host {origin}: "

    def _get_ready(self, command: restarts.Prepare) -> None:
        options = self.options
        if options.min_workers is not None and self._workers:
            numbers = [worker.reported.numbers() for worker in self._workers]
            has_worked = any(of.get("num_runs") or of.get("num_steps") for of in numbers)
            fewer = max(options.min_workers, self._num_workers - 1)
            is_cause = command.origin == options.host_rank
            self._num_workers = fewer if is_cause and not has_worked else options.num_workers
            if self._num_workers < options.num_workers:
                self.output.say(
                    f"no worker has reported a step, so {self._num_workers} of"
                    f" {options.num_workers} workers start."
                )
        self._workers = []
        self._ending = None
        num_servers = options.num_servers
        num_tasks = self._num_workers + (num_servers and 1 + num_servers)
        addresses = free_addresses(self.link.address, num_tasks)
        self.link.send(restarts.Ready(command.generation, addresses))

    def _start(self, command: restarts.Start) -> None:
        options = self.options
        # The job may have asked for addresses again while our `Ready` was on its way.
        self._ending = None
        self._generation = self._num_restarts = command.generation
        self._cluster = {"worker": command.workers}
        tasks = [Task("worker", command.first + i) for i in range(self._num_workers)]
        if options.num_servers:
            chief, *others = command.workers
            workers, servers = others[: self._num_workers], others[self._num_workers :]
            self._cluster = {"chief": [chief], "worker": workers, "ps": servers}
            tasks = [Task("chief", 0), *tasks, *(Task("ps", i) for i in range(len(servers)))]
        for number, task in enumerate(tasks, command.first):
            self._workers.append(self._start_task(task, number))
        if options.evaluator and options.is_first_host:
            self._workers.append(self._start_task(Task("evaluator", 0), len(command.workers)))

    def _start_task(self, task: Task, number: int) -> Worker:
        environ = worker_environ(
            self.environ, self.options, task, self._cluster, self._num_restarts, self._token
        )
        worker = Worker(self.options, task, number, environ, self._num_restarts, self.output)
        self._num_starts[str(task)] += 1
        self._selector.register(worker, selectors.EVENT_READ, partial(self._on_worker, worker))
        return worker

    def _restart_if_gone(self, worker: Worker) -> None:
        """Starts a task again once all processes of its previous run have ended."""
        if worker.is_to_restart and worker.is_gone and self._ending is None:
            new = self._start_task(worker.task, worker.number)
            self._workers[self._workers.index(worker)] = new

    # Workers

    def _on_worker(self, worker: Worker) -> None:
        had_ended = worker.ending is not None
        worker.receive()
        if worker.is_gone:
            self._selector.unregister(worker)
            self._restart_if_gone(worker)
        if worker.ending is not None and not had_ended and self._ending is None:
            self._on_end(worker, worker.ending)

    def _on_end(self, worker: Worker, ending: Ending) -> None:
        """Reports that a task has ended, which may mean that the job has failed, or is done."""
        task = worker.task
        main = [one.ending for one in self._workers if one.task.task_type == self._main_type]
        if ending.returncode:
            worker.output.ended.wait(_LAST_LINES_SECONDS)
            text = f"{task} {ending} after {time.monotonic() - worker.started_at:.1f} s"
            code, lines = ending.exit_code, worker.output.last_lines()
            if code == REFUSED_EXIT_CODE and worker.output.reason:
                # All tasks say so, and no restart changes it.
                reason = worker.output.reason.rstrip(".")
                self._end_workers(restarts.Exit(code, reason))
                self.link.send(restarts.Interrupted(code, reason))
                return
            failed = restarts.Failed(self._generation, code, text, lines)
            if self.options.num_servers and task.task_type != self._main_type:
                self.link.send(failed._replace(task=str(task)))
            elif code != WorkerLostError.exit_code:
                self.link.send(failed)
            else:
                # If the worker that was lost ends meanwhile, its report comes first and counts.
                text = ": ".join(filter(None, [text, worker.output.reason]))
                report = partial(self.link.send, failed._replace(text=text))
                self._timers.enter(_LOST_WORKER_SECONDS, 0, report)
        elif task.task_type in ("worker", "ps") and self.options.num_servers:
            warn = partial(self._warn_of_early_end, task, self._generation)
            self._timers.enter(_CHIEF_ENDS_SECONDS, 0, warn)
        elif all(one is not None and not one.returncode for one in main):
            self.link.send(restarts.Finished(self._generation))

    def _warn_of_early_end(self, task: Task, generation: int) -> None:
        if self._ending is None and self._generation == generation:
            self.output.say(
                f"{task} ended before the chief. Workers and servers must call"
                " distributary.Server(...).join()."
            )

    def _on_signal(self) -> None:
        for number, is_first in self.signals.take():
            name = signal.Signals(number).name
            if is_first:
                text = f"the launcher received {name}"
                self._end_workers(restarts.Exit(128 + number, text))
                self.link.send(restarts.Interrupted(128 + number, text))
            else:
                self.output.say(f"received {name} again; ending all workers at once.")
                for worker in self._workers:
                    worker.kill()

    def _finish(self, command: restarts.Exit) -> int:
        if command.last_lines and command.last_lines != self.output.lines_at_the_end():
            lines = "\n".join(f"    {line}" for line in command.last_lines)
            where = self._where(command)
            what = command.text.partition(": ")[0]  # without the reason, which was said
            self.output.say(f"{where}{what}. Its last lines on stderr:\n{lines}")
        has_servers = self.options.num_servers
        is_alone = self.options.num_workers == 1 and not has_servers
        if not (command.code or is_alone or any(w.reported.numbers() for w in self._workers)):
            strategy = "ParameterServer" if has_servers else "MultiWorkerMirrored"
            self.output.say(
                "no worker has made a strategy. If the program does not connect its workers in"
                " another way, each of them has worked alone, and written the same files: create"
                f" {strategy}Strategy, or start one worker."
            )
        return command.code


def count_running(states: Sequence[restarts.TaskState]) -> str:
    """Returns `"3 of 4 running"`, or `"1 of 1 chiefs, 2 of 2 workers, 1 of 1 ps running"`.

    Returns `""` if there are no tasks.
    """
    types = [(state["name"].partition(" ")[0], state["state"]) for state in states]
    all_tasks = collections.Counter(type_ for type_, _ in types)
    running = collections.Counter(type_ for type_, state in types if state == RUNNING)
    if not all_tasks:
        return ""
    parts = [f"{running.total()} of {all_tasks.total()}"]
    if "ps" in all_tasks:
        parts = [f"{running[type_]} of {all_tasks[type_]} {noun}" for type_, noun in _NOUNS.items()]
    return f"{', '.join(parts)} running"


# The signals that it gets

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@final
class Signals:
    """A receiver of SIGINT, SIGTERM and SIGHUP inside its `with` block, in the main thread.

    An ignored signal stays ignored, so `nohup distributary launch ...` survives its terminal.

    Args:
        patience_seconds: Seconds after the first signal in which the launcher may wait for others.

    Attributes:
        received: Numbers of all signals that have arrived, in this order.
    """

    def __init__(self, patience_seconds: float) -> None:
        self.received: list[int] = []
        self._patience_seconds = patience_seconds
        self._first_at = 0.0
        self._num_taken = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        self._read_end, self._write_end = socket.socketpair()
        self._read_end.setblocking(False)
        self._write_end.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._write_end.fileno())
        for number in _NUMBERS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd)
        self._read_end.close()
        self._write_end.close()

    def fileno(self) -> int:
        """Returns the descriptor that becomes readable when a signal has arrived."""
        return self._read_end.fileno()

    def take(self) -> list[tuple[int, bool]]:
        """Returns the signals that have arrived since the last call, and whether each is the first.

        Only one of all is the first.
        """
        with contextlib.suppress(BlockingIOError):
            self._read_end.recv(4096)
        first, self._num_taken = self._num_taken, len(self.received)
        return [(self.received[i], i == 0) for i in range(first, self._num_taken)]

    def want_end_now(self) -> bool:
        """Returns whether there was a second signal, or the first was too long ago."""
        is_late = time.monotonic() > self._first_at + self._patience_seconds
        return len(self.received) > 1 or (bool(self.received) and is_late)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if not self.received:
            self._first_at = time.monotonic()
        self.received.append(number)
