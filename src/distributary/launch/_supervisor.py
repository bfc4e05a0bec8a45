"""Runs the workers of one host, following the commands of the job."""

import collections
import sched
import secrets
import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import final

from distributary.errors import LaunchError, WorkerLostError
from distributary.launch._environment import Task, free_addresses, worker_environ
from distributary.launch._job import (
    Command,
    Exit,
    Failed,
    Finished,
    Interrupted,
    Prepare,
    Ready,
    Restart,
    Start,
    Tasks,
    TaskState,
)
from distributary.launch._link import Link
from distributary.launch._options import LaunchOptions
from distributary.launch._output import Output
from distributary.launch._overview import RUNNING, count_running
from distributary.launch._signals import Signals
from distributary.launch._status import StatusReader
from distributary.launch._worker import Ending, Worker

__all__ = ["Supervisor"]

# Time for the last lines of an ended worker to arrive. Processes that it has left behind may hold
# its stderr open.
_LAST_LINES_SECONDS = 0.3
# Time for a lost worker to end, after a worker that has ended because of it.
_LOST_WORKER_SECONDS = 1.0
# Time for the chief to end, after a worker or server that may end because the chief is about to.
_CHIEF_ENDS_SECONDS = 3.0
_SECONDS_BETWEEN_TASKS = 1.0


@final
class Supervisor:
    """A supervisor, which starts, watches and ends the workers of one host.

    Args:
        options: The job.
        environ: Environment of the launcher.
        link: Source of the commands.
        output: Shows the output of workers, and messages.
        signals: The signals that the launcher gets.
    """

    def __init__(
        self,
        options: LaunchOptions,
        environ: Mapping[str, str],
        link: Link,
        output: Output,
        signals: Signals,
    ) -> None:
        self._options = options
        self._environ = environ
        self._link = link
        self._output = output
        self._signals = signals
        self._selector = selectors.DefaultSelector()
        self._timers = sched.scheduler(time.monotonic)
        self._workers: list[Worker] = []  # of the current attempt
        self._generation = 0
        self._num_restarts = 0
        self._token = secrets.token_hex(32) if options.num_servers else None
        self._cluster: dict[str, Sequence[str]] = {}
        # The job ends when all tasks of this type have ended.
        self._main_type = "chief" if options.num_servers else "worker"
        # The command because of which all workers end: for a start, or for good.
        self._ending: Prepare | Exit | None = None
        self._started_at = time.monotonic()
        self._num_starts: collections.Counter[str] = collections.Counter()  # by task

    def run(self) -> int:
        """Runs until no process of the job is left on this host; returns the job's exit code."""
        self._watch(self._signals, self._on_signal)
        if self._link.fileno() >= 0:
            self._watch(self._link, self._on_command)
        if self._link.wants_tasks:
            self._send_tasks()
        seconds: float | None = 0.0  # until the next timer
        try:
            while True:
                self._on_command()
                if self._ending is not None and all(worker.is_gone for worker in self._workers):
                    self._wait_for_output()
                    if isinstance(self._ending, Exit):
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
        if self._options.max_restarts:
            parts.append(f"restart {self._num_restarts} of {self._options.max_restarts}")
        parts.append(f"{time.monotonic() - self._started_at:.0f} s")
        for worker in workers:
            state = str(worker.ending or worker.status)
            if state:
                parts.append(f"{worker.task}: {state}")
        return " · ".join(parts)

    def tasks(self) -> Tasks:
        """Returns the tasks of this host. For any thread."""
        workers = self._workers
        numbers = {str(worker.task): worker.status.numbers() for worker in workers}
        return Tasks(self._states(workers), numbers)

    def _states(self, workers: Sequence[Worker]) -> list[TaskState]:
        return [
            TaskState(
                name=str(worker.task),
                state=str(worker.ending or RUNNING),
                has_failed=worker.ending is not None and bool(worker.ending.returncode),
                num_restarts=self._num_starts[str(worker.task)] - 1,
            )
            for worker in workers
        ]

    def _watch(
        self, source: Signals | Link | Worker | StatusReader, act: Callable[[], None]
    ) -> None:
        self._selector.register(source, selectors.EVENT_READ, act)

    def _send_tasks(self) -> None:
        self._link.send(self.tasks())
        self._timers.enter(_SECONDS_BETWEEN_TASKS, 0, self._send_tasks)

    # Commands of the job

    def _on_command(self) -> None:
        try:
            for command in self._link.receive():
                self._obey(command)
        except LaunchError as error:
            if not isinstance(self._ending, Exit):
                self._end_workers(Exit(1, str(error)))
            self._selector.unregister(self._link)
            self._link.close()

    def _obey(self, command: Command) -> None:
        if isinstance(self._ending, Exit):
            return
        match command:
            case Start():
                self._start(command)
            case Restart(num_restarts, task, text):
                self._num_restarts = num_restarts
                self._output.say(
                    f"{text}; starting it again, restart {num_restarts} of"
                    f" {self._options.max_restarts}."
                )
                for worker in self._workers:
                    if str(worker.task) == task:
                        worker.is_to_restart = True
                        self._restart_if_gone(worker)
            case Prepare(generation):
                what = f"ending all workers for restart {generation} of"
                self._end_workers(command, f"{what} {self._options.max_restarts}")
            case Exit():
                self._end_workers(command)

    def _end_workers(self, command: Prepare | Exit, what: str = "ending all workers") -> None:
        self._ending = command
        if command.text:
            self._output.say(f"{self._where(command)}{command.text}; {what}.")
        for worker in self._workers:
            worker.terminate()

    def _where(self, command: Prepare | Exit) -> str:
        """Returns a prefix that names the host that caused a command, if it is another one."""
        hosts, origin = self._options.hosts, command.origin
        return "" if hosts is None or origin in (-1, hosts.host_rank) else f"host {origin}: "

    def _get_ready(self, command: Prepare) -> None:
        self._workers = []
        self._ending = None
        num_servers = self._options.num_servers
        num_tasks = self._options.num_workers + (num_servers and 1 + num_servers)
        addresses = free_addresses(self._link.address, num_tasks)
        self._link.send(Ready(command.generation, addresses))

    def _start(self, command: Start) -> None:
        options = self._options
        # The job may have asked for addresses again while our `Ready` was on its way.
        self._ending = None
        self._generation = self._num_restarts = command.generation
        self._cluster = {"worker": command.workers}
        tasks = [Task("worker", command.first + i) for i in range(options.num_workers)]
        if options.num_servers:
            chief, *others = command.workers
            workers, servers = others[: options.num_workers], others[options.num_workers :]
            self._cluster = {"chief": [chief], "worker": workers, "ps": servers}
            tasks = [Task("chief", 0), *tasks, *(Task("ps", i) for i in range(len(servers)))]
        for number, task in enumerate(tasks, command.first):
            self._workers.append(self._start_task(task, number))
        if options.evaluator and options.is_first_host:
            self._workers.append(self._start_task(Task("evaluator", 0), len(command.workers)))

    def _start_task(self, task: Task, number: int) -> Worker:
        environ = worker_environ(
            self._environ, self._options, task, self._cluster, self._num_restarts, self._token
        )
        worker = Worker(self._options, task, number, environ, self._num_restarts, self._output)
        self._num_starts[str(task)] += 1
        self._watch(worker, partial(self._on_worker, worker))
        self._watch(worker.status, partial(self._on_status, worker.status))
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
        if ending.returncode:
            worker.output.ended.wait(_LAST_LINES_SECONDS)
            text = f"{task} {ending} after {time.monotonic() - worker.started_at:.1f} s"
            code, lines = ending.exit_code, worker.output.last_lines()
            failed = Failed(self._generation, code, text, lines)
            if self._options.num_servers and task.task_type != self._main_type:
                self._link.send(failed._replace(task=str(task)))
            elif code != WorkerLostError.exit_code:
                self._link.send(failed)
            else:
                # If the worker that was lost ends meanwhile, its report comes first and counts.
                text = ": ".join(filter(None, [text, worker.output.reason]))
                report = partial(self._link.send, failed._replace(text=text))
                self._timers.enter(_LOST_WORKER_SECONDS, 0, report)
        elif task.task_type in ("worker", "ps") and self._options.num_servers:
            warn = partial(self._warn_of_early_end, task, self._generation)
            self._timers.enter(_CHIEF_ENDS_SECONDS, 0, warn)
        elif all(
            other.ending is not None and not other.ending.returncode
            for other in self._workers
            if other.task.task_type == self._main_type
        ):
            self._link.send(Finished(self._generation))

    def _warn_of_early_end(self, task: Task, generation: int) -> None:
        if self._ending is None and self._generation == generation:
            self._output.say(
                f"{task} ended before the chief. Workers and servers must call"
                " distributary.Server(...).join()."
            )

    def _on_status(self, status: StatusReader) -> None:
        if not status.receive():
            self._forget(status)

    def _forget(self, status: StatusReader) -> None:
        self._selector.unregister(status)
        status.close()

    def _on_signal(self) -> None:
        for number, is_first in self._signals.take():
            name = signal.Signals(number).name
            if is_first:
                text = f"the launcher received {name}"
                self._end_workers(Exit(128 + number, text))
                self._link.send(Interrupted(128 + number, text))
            else:
                self._output.say(f"received {name} again; ending all workers at once.")
                for worker in self._workers:
                    worker.kill()

    def _wait_for_output(self) -> None:
        for worker in self._workers:
            self._output.wait(worker.output)
            if worker.status.fileno() >= 0:  # a process that the launcher does not know has it
                self._forget(worker.status)

    def _finish(self, command: Exit) -> int:
        if command.last_lines:
            lines = "\n".join(f"    {line}" for line in command.last_lines)
            where = self._where(command)
            self._output.say(f"{where}{command.text}. Its last lines on stderr:\n{lines}")
        return command.code
