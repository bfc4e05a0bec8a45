"""The content of the dashboard: the tasks of this host or, on host 0, of all hosts."""

import platform
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, final

from distributary.launch._job import Tasks, TaskState
from distributary.launch._options import LaunchOptions

__all__ = ["RUNNING", "Overview", "count_running"]

RUNNING: Final = "running"
_NOUNS: Final = {"chief": "chiefs", "worker": "workers", "ps": "ps"}


def count_running(states: Sequence[TaskState]) -> str:
    """Returns `"3 of 4 running"`, or `"1 of 1 chiefs, 2 of 2 workers, 1 of 1 ps running"`.

    Returns `""` if there are no tasks.
    """
    is_running: dict[str, list[bool]] = {}
    for state in states:
        task_type = state["name"].partition(" ")[0]
        is_running.setdefault(task_type, []).append(state["state"] == RUNNING)
    if "ps" in is_running:
        parts = [
            f"{sum(is_running[task_type])} of {len(is_running[task_type])} {noun}"
            for task_type, noun in _NOUNS.items()
        ]
    else:
        all_types = [value for values in is_running.values() for value in values]
        parts = [f"{sum(all_types)} of {len(all_types)}"] if all_types else []
    return f"{', '.join(parts)} running" if parts else ""


@final
class Overview:
    """A collection of the tasks of a job.

    Args:
        options: The job.
        own: Returns the tasks of this host.
        others: Returns the tasks of the other hosts, as far as known here, by rank.
    """

    def __init__(
        self,
        options: LaunchOptions,
        own: Callable[[], Tasks],
        others: Callable[[], Mapping[int, Tasks]],
    ) -> None:
        self._options = options
        self._own = own
        self._others = others

    def numbers(self) -> dict[str, dict[str, float]]:
        """Returns the numbers that tasks have reported, by the tasks' names. For any thread."""
        return {
            name: numbers
            for tasks in (self._own(), *self._others().values())
            for name, numbers in tasks.numbers.items()
        }

    def describe(self) -> dict[str, Any]:
        """Returns the job and the state of its tasks. For any thread."""
        hosts = self._options.hosts
        by_host = {0 if hosts is None else hosts.host_rank: self._own(), **self._others()}
        states = [
            (host, state) for host, tasks in sorted(by_host.items()) for state in tasks.states
        ]
        program, *arguments = self._options.command
        command = shlex.join([Path(program).name, *arguments])
        where = platform.node()
        if hosts is not None and self._options.is_first_host:
            where = f"{hosts.num_hosts} hosts"
        elif hosts is not None:
            where += f", host {hosts.host_rank} of {hosts.num_hosts}"
        return {
            "title": count_running([state for _, state in states]) or "Nothing runs yet",
            "subtitle": f"{command} on {where}",
            "tasks": [
                state if hosts is None else {**state, "host": host} for host, state in states
            ],
        }
