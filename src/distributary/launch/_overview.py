"""The content of the dashboard: the tasks of this host or, on host 0, of all hosts."""

import collections
import platform
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from distributary.launch._job import Tasks, TaskState
from distributary.launch._options import LaunchOptions

__all__ = ["RUNNING", "count_running", "describe", "numbers_of"]

RUNNING: Final = "running"
_NOUNS: Final = {"chief": "chiefs", "worker": "workers", "ps": "ps"}


def count_running(states: Sequence[TaskState]) -> str:
    """Returns `"3 of 4 running"`, or `"1 of 1 chiefs, 2 of 2 workers, 1 of 1 ps running"`.

    Returns `""` if there are no tasks.
    """
    all_tasks = collections.Counter(_type_of(state) for state in states)
    running = collections.Counter(_type_of(state) for state in states if state["state"] == RUNNING)
    if not all_tasks:
        return ""
    parts = [f"{running.total()} of {all_tasks.total()}"]
    if "ps" in all_tasks:
        parts = [f"{running[type_]} of {all_tasks[type_]} {noun}" for type_, noun in _NOUNS.items()]
    return f"{', '.join(parts)} running"


def _type_of(state: TaskState) -> str:
    return state["name"].partition(" ")[0]


def numbers_of(hosts: Mapping[int, Tasks]) -> dict[str, dict[str, float]]:
    """Returns the numbers that tasks have reported, by the tasks' names.

    Args:
        hosts: The tasks of this host and of others, as far as known here, by rank.
    """
    return {name: numbers for tasks in hosts.values() for name, numbers in tasks.numbers.items()}


def describe(options: LaunchOptions, by_host: Mapping[int, Tasks]) -> dict[str, Any]:
    """Returns the job and the state of its tasks, for the page.

    Args:
        options: The job.
        by_host: The tasks of this host and of others, as far as known here, by rank.
    """
    hosts = options.hosts
    states = [(rank, state) for rank, tasks in sorted(by_host.items()) for state in tasks.states]
    program, *arguments = options.command
    command = shlex.join([Path(program).name, *arguments])
    where = platform.node()
    if hosts is not None and options.is_first_host:
        where = f"{hosts.num_hosts} hosts"
    elif hosts is not None:
        where += f", host {hosts.host_rank} of {hosts.num_hosts}"
    return {
        "title": count_running([state for _, state in states]) or "Nothing runs yet",
        "subtitle": f"{command} on {where}",
        "tasks": [state if hosts is None else {**state, "host": rank} for rank, state in states],
    }
