"""Runs the workers of one host, following the commands of the job."""

import collections
import secrets
import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
    Stop,
    Stopped,
    Tasks,
    TaskState,
)
from distributary.launch._link import Link
from distributary.launch._options import LaunchOptions
from distributary.launch._output import Output, TaskOutput
from distributary.launch._overview import RUNNING, count_running
from distributary.launch._signals import Signals
from distributary.launch._status import StatusReader
from distributary.launch._worker import Worker

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
@dataclass
class _Running:
    """A worker of the current attempt, with its output and its status."""

    worker: Worker
    output: TaskOutput
    status: StatusReader
    number: int  # determines the color
    has_reported_nonsense: bool = False
    is_to_restart: bool = False


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
        self._running: list[_Running] = []
        self._generation = 0
        self._num_restarts = 0
        self._token = secrets.token_hex(32) if options.num_servers else None
        self._cluster: dict[str, Sequence[str]] = {}
        # The job ends when all tasks of this type have ended.
        self._main_type = "chief" if options.num_servers else "worker"
        self._stop: Stop | None = None  # set while workers end for a restart
        self._exit: Exit | None = None  # set while workers end for good
        self._has_finished = False  # whether the job was told that all workers have finished
        # The report to send, and when, unless another worker turns out to have failed first.
        self._follower: tuple[float, Failed] | None = None
        # Tasks that ended before the chief, and when to say so if the chief is still running.
        self._ended_early: list[tuple[float, Task]] = []
        self._started_at = time.monotonic()
        # When to send the state of the tasks, if anybody wants it.
        self._tasks_at = self._started_at if link.wants_tasks else None
        self._num_starts: collections.Counter[str] = collections.Counter()  # by task

    def run(self) -> int:
        """Runs until no process of the job is left on this host; returns the job's exit code."""
        self._watch(self._signals, self._on_signal)
        if self._link.fileno() >= 0:
            self._watch(self._link, self._on_command)
        try:
            while True:
                self._on_command()
                if self._none_left():
                    if self._exit is not None:
                        return self._finish(self._exit)
                    if self._stop is not None:
                        self._wait_for_output()
                        report = Stopped(self._stop.generation)
                        self._stop = None
                        self._running = []
                        self._link.send(report)
                        continue
                self._wait()
        finally:
            for running in self._running:
                running.worker.close()
            self._selector.close()

    def status(self) -> str:
        """Returns the state in one line, `""` while there is nothing to say. For any thread."""
        running = self._running
        if not running:
            return ""
        parts = [count_running(self._states(running))]
        if self._stop is not None or self._exit is not None:
            parts[0] += ", ending"
        if self._options.max_restarts:
            parts.append(f"restart {self._num_restarts} of {self._options.max_restarts}")
        parts.append(f"{time.monotonic() - self._started_at:.0f} s")
        for r in running:
            state = str(r.status) if r.worker.ending is None else str(r.worker.ending)
            if state:
                parts.append(f"{r.worker.task}: {state}")
        return " · ".join(parts)

    def tasks(self) -> Tasks:
        """Returns the tasks of this host. For any thread."""
        running = self._running
        numbers = {str(r.worker.task): r.status.numbers() for r in running}
        return Tasks(self._states(running), numbers)

    def _states(self, running: Sequence[_Running]) -> list[TaskState]:
        return [
            TaskState(
                name=str(r.worker.task),
                state=RUNNING if r.worker.ending is None else str(r.worker.ending),
                has_failed=r.worker.ending is not None and bool(r.worker.ending.returncode),
                num_restarts=self._num_starts[str(r.worker.task)] - 1,
            )
            for r in running
        ]

    def _wait(self) -> None:
        times = [at for at, _ in self._ended_early]
        if self._follower is not None:
            times.append(self._follower[0])
        if self._tasks_at is not None:
            times.append(self._tasks_at)
        timeout = max(0.0, min(times) - time.monotonic()) if times else None
        for key, _ in self._selector.select(timeout):
            key.data()
        now = time.monotonic()
        if self._tasks_at is not None and now >= self._tasks_at:
            self._tasks_at = now + _SECONDS_BETWEEN_TASKS
            self._link.send(self.tasks())
        if self._follower is not None and now >= self._follower[0]:
            self._fail(self._follower[1])
        while self._ended_early and now >= self._ended_early[0][0]:
            _, task = self._ended_early.pop(0)
            if self._stop is None and self._exit is None:
                self._output.say(
                    f"{task} ended before the chief. Workers and servers must call"
                    " distributary.Server(...).join()."
                )

    def _watch(self, source: Signals | Link | Worker | StatusReader, act: Callable) -> None:
        self._selector.register(source, selectors.EVENT_READ, act)

    def _on_command(self) -> None:
        try:
            while commands := self._link.receive():  # following them may cause more
                for command in commands:
                    self._obey(command)
        except LaunchError as error:
            if self._exit is None:
                self._begin_exit(Exit(1, str(error)))
            if self._link.fileno() >= 0:
                self._selector.unregister(self._link)
                self._link.close()

    def _obey(self, command: Command) -> None:
        if self._exit is not None:
            return
        match command:
            case Prepare(generation):
                num_servers = self._options.num_servers
                num_tasks = self._options.num_workers + (num_servers and 1 + num_servers)
                self._link.send(Ready(generation, free_addresses(self._link.address, num_tasks)))
            case Start():
                self._start(command)
            case Restart(num_restarts, task, text):
                self._num_restarts = num_restarts
                self._output.say(
                    f"{text}; starting it again, restart {num_restarts} of"
                    f" {self._options.max_restarts}."
                )
                for running in self._running:
                    if str(running.worker.task) == task:
                        running.is_to_restart = True
                        self._restart_if_gone(running)
            case Stop(generation, text, origin):
                self._stop = command
                self._output.say(
                    f"{self._where(origin)}{text}; ending all workers for restart {generation} of"
                    f" {self._options.max_restarts}."
                )
                self._terminate()
            case Exit():
                self._begin_exit(command)
                self._link.end()

    def _start(self, command: Start) -> None:
        options = self._options
        self._generation = self._num_restarts = command.generation
        self._has_finished = False
        self._follower = None
        self._ended_early = []
        self._cluster = {"worker": command.workers}
        tasks = [Task("worker", command.first + i) for i in range(options.num_workers)]
        if options.num_servers:
            chief, *others = command.workers
            workers, servers = others[: options.num_workers], others[options.num_workers :]
            self._cluster = {"chief": [chief], "worker": workers, "ps": servers}
            tasks = [Task("chief", 0), *tasks, *(Task("ps", i) for i in range(len(servers)))]
        for number, task in enumerate(tasks, command.first):
            self._running.append(self._start_task(task, number))
        if options.evaluator and options.is_first_host:
            self._running.append(self._start_task(Task("evaluator", 0), len(command.workers)))

    def _start_task(self, task: Task, number: int) -> _Running:
        options = self._options
        status = StatusReader()
        worker = Worker(
            task,
            options.command,
            worker_environ(
                self._environ,
                options,
                task,
                self._cluster,
                self._num_restarts,
                status.write_fd,
                self._token,
            ),
            options.grace_seconds,
            status.write_fd,
        )
        status.close_write_end()
        self._num_starts[str(task)] += 1
        log_path = None
        if options.log_dir is not None:
            log_path = options.log_dir / f"{task.file_stem}.restart-{self._num_restarts}.log"
        output = self._output.attach(str(task), number, *worker.take_output(), log_path)
        running = _Running(worker, output, status, number)
        self._watch(worker, lambda: self._on_worker(running))
        self._watch(status, lambda: self._on_status(running))
        return running

    def _restart_if_gone(self, running: _Running) -> None:
        """Starts a task again once all processes of its previous run have ended."""
        is_ending = self._exit is not None or self._stop is not None
        if running.is_to_restart and running.worker.is_gone and not is_ending:
            new = self._start_task(running.worker.task, running.number)
            self._running[self._running.index(running)] = new

    def _on_worker(self, running: _Running) -> None:
        worker = running.worker
        had_ended = worker.ending is not None
        worker.receive()
        if worker.is_gone:
            self._selector.unregister(worker)
            self._restart_if_gone(running)
        if worker.ending is None or had_ended:
            return
        if self._stop is not None or self._exit is not None:
            return
        if worker.ending.returncode:
            running.output.ended.wait(_LAST_LINES_SECONDS)
            now = time.monotonic()
            text = f"{worker.task} {worker.ending} after {now - worker.started_at:.1f} s"
            code, lines = worker.ending.exit_code, running.output.last_lines()
            if self._options.num_servers and worker.task.task_type != self._main_type:
                failed = Failed(self._generation, code, text, lines, str(worker.task))
                self._link.send(failed)
            elif code != WorkerLostError.exit_code:
                self._fail(Failed(self._generation, code, text, lines))
            elif self._follower is None:
                text = ": ".join(filter(None, [text, running.output.reason]))
                failed = Failed(self._generation, code, text, lines)
                self._follower = now + _LOST_WORKER_SECONDS, failed
        elif worker.task.task_type in ("worker", "ps") and self._options.num_servers:
            self._ended_early.append((time.monotonic() + _CHIEF_ENDS_SECONDS, worker.task))
        elif not self._has_finished and all(
            r.worker.ending is not None and not r.worker.ending.returncode
            for r in self._running
            if r.worker.task.task_type == self._main_type
        ):
            self._has_finished = True
            self._link.send(Finished(self._generation))

    def _fail(self, failed: Failed) -> None:
        self._follower = None
        self._link.send(failed)

    def _on_status(self, running: _Running) -> None:
        if not running.status.receive():
            self._selector.unregister(running.status)
            running.status.close()
        elif running.status.num_unreadable and not running.has_reported_nonsense:
            running.has_reported_nonsense = True
            self._output.say(
                f"{running.worker.task} writes lines to DISTRIBUTARY_STATUS_FD that are not JSON"
                " with numbers; they are ignored."
            )

    def _on_signal(self) -> None:
        for number in self._signals.take():
            name = signal.Signals(number).name
            if len(self._signals.received) == 1:
                text = f"the launcher received {name}"
                self._begin_exit(Exit(128 + number, text))
                self._link.send(Interrupted(128 + number, text))
                self._link.end()
            else:
                self._output.say(f"received {name} again; ending all workers at once.")
                for running in self._running:
                    running.worker.kill()

    def _begin_exit(self, command: Exit) -> None:
        self._exit = command
        if command.text:
            where = "" if command.origin < 0 else self._where(command.origin)
            self._output.say(f"{where}{command.text}; ending all workers.")
        self._terminate()

    def _where(self, origin: int) -> str:
        hosts = self._options.hosts
        return "" if hosts is None or origin == hosts.host_rank else f"host {origin}: "

    def _terminate(self) -> None:
        for running in self._running:
            running.worker.terminate()

    def _none_left(self) -> bool:
        return all(running.worker.is_gone for running in self._running)

    def _wait_for_output(self) -> None:
        for running in self._running:
            self._output.wait(running.output, self.should_not_wait)
            if running.status.fileno() in self._selector.get_map():
                self._selector.unregister(running.status)
                running.status.close()

    def should_not_wait(self) -> bool:
        """Returns whether the user wants the launcher to end even with output left to write."""
        return self._signals.wants_end_now(self._options.grace_seconds + 1)

    def _finish(self, command: Exit) -> int:
        self._wait_for_output()
        if command.last_lines:
            lines = "\n".join(f"    {line}" for line in command.last_lines)
            where = self._where(command.origin)
            self._output.say(f"{where}{command.text}. Its last lines on stderr:\n{lines}")
        return command.code
