"""Turns the ranks that a launcher gives to processes on hosts into tasks with addresses."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from distributary.cluster_resolver._addresses import MAX_PORT, checked_port, join
from distributary.errors import ClusterError, InvalidTypeError, InvalidValueError

__all__ = [
    "Placement",
    "addresses",
    "checked_count",
    "checked_jobs_of_ranks",
    "int_variable",
    "jobs_of",
    "place",
    "task_of",
]


@final
@dataclass(frozen=True)
class Placement:
    """The place where the process with a certain rank runs.

    Args:
        host: Name of the host.
        host_number: Position of the host among the hosts.
        local_rank: Position of the process on its host.
    """

    host: str
    host_number: int
    local_rank: int


def place(processes_of: Mapping[str, int], chunk: int | None) -> tuple[Placement, ...]:
    """Returns the placement of each rank.

    Args:
        processes_of: Number of processes on each host.
        chunk: Number of consecutive ranks that a host gets before it is the next host's turn, in
            rounds until all processes are placed. None fills one host after the other.
    """
    placements: list[Placement] = []
    placed = dict.fromkeys(processes_of, 0)
    while any(placed[host] < count for host, count in processes_of.items()):
        for number, (host, count) in enumerate(processes_of.items()):
            start = placed[host]
            placed[host] = count if chunk is None else min(count, start + chunk)
            placements += [Placement(host, number, i) for i in range(start, placed[host])]
    return tuple(placements)


def addresses(placements: Sequence[Placement], port_base: int, field: str) -> list[str]:
    """Returns the address of each rank; on each host, ports count up from `port_base`.

    Args:
        placements: Placement of each rank.
        port_base: Port of the first process on each host.
        field: Name of `port_base` in messages.

    Raises:
        InvalidTypeError: if `port_base` is not an int.
        InvalidValueError: if a port is out of range.
    """
    checked_port(port_base, field)
    last_port = port_base + max(placement.local_rank for placement in placements)
    if last_port > MAX_PORT:
        raise InvalidValueError(
            f"{field} is {port_base}, so the processes of one host would use the ports up to"
            f" {last_port}, expected at most {MAX_PORT}. Choose a lower {field.split()[-1]}."
        )
    return [join(placement.host, port_base + placement.local_rank) for placement in placements]


def checked_jobs_of_ranks(
    jobs: Mapping[str, int] | None, num_processes: int, who: str
) -> dict[str, int]:
    """Returns the number of processes of each type, sorted by name, the order of the ranks.

    Args:
        jobs: The dict that the user passed; None for workers only.
        num_processes: Number of processes.
        who: Name of the resolver, for messages.

    Raises:
        InvalidTypeError: if `jobs` is not a dict from strings to ints.
        InvalidValueError: if a number is not positive.
        ClusterError: if the numbers do not add up to `num_processes`.
    """
    if jobs is None:
        return {"worker": num_processes}
    if not isinstance(jobs, Mapping) or not jobs:
        raise InvalidTypeError(
            f"{who}: jobs is {jobs!r}, expected a dict from task types to numbers of tasks, such as"
            ' {"chief": 1, "worker": 3}.'
        )
    for job, count in jobs.items():
        if not isinstance(job, str):
            raise InvalidTypeError(
                f"{who}: jobs has the key {job!r}, expected a task type as a string."
            )
        checked_count(count, f'{who}: jobs["{job}"]', minimum=1)
    if sum(jobs.values()) != num_processes:
        raise ClusterError(
            f"{who}: jobs is {dict(jobs)!r}, which is {sum(jobs.values())} tasks, but the launcher"
            f" has started {num_processes} processes. Make the numbers add up to {num_processes},"
            " or start as many processes as there are tasks."
        )
    return dict(sorted(jobs.items()))


def jobs_of(all_addresses: Sequence[str], jobs: Mapping[str, int]) -> dict[str, list[str]]:
    """Returns the addresses of each type of task; types take the ranks one after the other."""
    result, start = {}, 0
    for job, count in jobs.items():
        result[job] = list(all_addresses[start : start + count])
        start += count
    return result


def task_of(rank: int, jobs: Mapping[str, int]) -> tuple[str, int]:
    """Returns the type and number of the task with a rank, which must be within the jobs."""
    start = 0
    for job, count in jobs.items():
        if rank < start + count:
            return job, rank - start
        start += count
    raise AssertionError(f"rank {rank} is beyond {dict(jobs)}")


def int_variable(name: str, *, cure: str, maximum: int | None = None) -> int:
    """Returns the number in an environment variable, 0 or more.

    Args:
        name: Name of the variable.
        cure: Advice for when it is not set, for messages.
        maximum: Largest value that is allowed.

    Raises:
        ClusterError: if the variable is not set or has another value.
    """
    text = os.environ.get(name)
    if text is None:
        raise ClusterError(f"The environment variable {name} is not set. {cure}")
    is_number = text.isascii() and text.isdecimal()
    if not is_number or (maximum is not None and int(text) > maximum):
        bounds = ">= 0" if maximum is None else f"from 0 to {maximum}"
        raise ClusterError(
            f"The environment variable {name} is {text!r}, expected a number {bounds}. {cure}"
        )
    return int(text)


def checked_count(count: object, field: str, *, minimum: int) -> int:
    """Returns a count, after checking it.

    Raises:
        InvalidTypeError: if it is not an int.
        InvalidValueError: if it is less than `minimum`.
    """
    if isinstance(count, bool) or not isinstance(count, int):
        raise InvalidTypeError(
            f"{field} is {count!r} ({type(count).__name__}), expected a number >= {minimum}."
        )
    if count < minimum:
        raise InvalidValueError(f"{field} is {count}, expected a number >= {minimum}.")
    return count
