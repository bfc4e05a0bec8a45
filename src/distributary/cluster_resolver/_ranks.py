"""Turns the ranks that a launcher gives to processes on hosts into tasks with addresses."""

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from distributary.cluster_resolver._addresses import MAX_PORT, checked_port, join
from distributary.cluster_resolver._checks import checked_counts, number_in
from distributary.cluster_resolver._cluster_spec import ClusterSpec
from distributary.cluster_resolver._resolver import ClusterResolver
from distributary.errors import ClusterError, InvalidValueError

__all__ = [
    "Placement",
    "RankClusterResolver",
    "check_place",
    "int_variable",
    "place",
    "variable",
]


class Placement(NamedTuple):
    """The place where the process with a certain rank runs.

    Args:
        host: Name of the host.
        host_number: Position of the host among the hosts.
        local_rank: Position of the process on its host.
    """

    host: str
    host_number: int
    local_rank: int


class RankClusterResolver(ClusterResolver):
    """Base class of resolvers for launchers that number the processes of a job.

    Args:
        rank: Number of this process.
        placements: Placement of each rank.
        jobs: Number of tasks of each type, as the user passed it; None for workers only. Types take
            the ranks in alphabetical order.
        port_base: Port of the first process on each host; the others count up from it.
        rpc_layer: Protocol to put in front of addresses.

    Raises:
        InvalidTypeError: if `jobs` is not a dict from strings to ints, or `port_base` is not an
            int.
        InvalidValueError: if a number in `jobs` is not positive, or a port is out of range.
        ClusterError: if the numbers in `jobs` do not add up to the number of processes.
    """

    def __init__(
        self,
        rank: int,
        placements: Sequence[Placement],
        jobs: Mapping[str, int] | None,
        port_base: int,
        rpc_layer: str,
    ) -> None:
        tasks = _tasks(jobs, len(placements), self._field("jobs"))
        addresses = _addresses(placements, port_base, self._field("port_base"))
        self._cluster: dict[str, list[str]] = {}
        for (job, _), address in zip(tasks, addresses, strict=True):
            self._cluster.setdefault(job, []).append(address)
        self.task_type, self.task_id = tasks[rank]
        self.rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Returns the processes that the launcher has started."""
        return ClusterSpec(self._cluster)


def place(processes_of: Mapping[str, int], chunk: int | None) -> list[Placement]:
    """Returns the placement of each rank.

    Args:
        processes_of: Number of processes on each host.
        chunk: Number of consecutive ranks that a host gets before it is the next host's turn, in
            rounds until all processes are placed. None fills one host after the other.
    """
    most = max(processes_of.values())
    chunk = chunk or most or 1
    return [
        Placement(host, number, local_rank)
        for start in range(0, most, chunk)
        for number, (host, count) in enumerate(processes_of.items())
        for local_rank in range(start, min(count, start + chunk))
    ]


def check_place(
    rank: int, placements: Sequence[Placement], reported: Mapping[str, int], cure: str
) -> None:
    """Checks that a process runs where the launcher says: otherwise, addresses would be wrong.

    Args:
        rank: Number of the process.
        placements: Placement of each rank.
        reported: The right values of environment variables in which the launcher reports the place.
        cure: Advice for messages.

    Raises:
        ClusterError: if a variable is missing or has another value.
    """
    found = {name: int_variable(name, cure) for name in reported}
    if found != reported:
        host, host_number, local_rank = placements[rank]
        num_here = sum(placement.host == host for placement in placements)
        raise ClusterError(
            f"{' and '.join(f'{name} is {value}' for name, value in found.items())}, but with these"
            f" hosts and numbers of processes, process {rank} would be number {local_rank} of"
            f" {num_here} on host {host_number} ({host}), so addresses would be wrong. {cure}"
        )


def variable(name: str, cure: str) -> str:
    """Returns the text of an environment variable.

    Args:
        name: Name of the variable.
        cure: Advice for when it is not set, for messages.

    Raises:
        ClusterError: if the variable is not set.
    """
    text = os.environ.get(name)
    if text is None:
        raise ClusterError(f"The environment variable {name} is not set. {cure}")
    return text


def int_variable(name: str, cure: str, maximum: int | None = None) -> int:
    """Returns the number in an environment variable, from 0 to `maximum`.

    Raises:
        ClusterError: if the variable is not set or has another value.
    """
    text = variable(name, cure)
    number = number_in(text)
    if number is None or (maximum is not None and number > maximum):
        bounds = ">= 0" if maximum is None else f"from 0 to {maximum}"
        raise ClusterError(
            f"The environment variable {name} is {text!r}, expected a number {bounds}. {cure}"
        )
    return number


def _tasks(jobs: Mapping[str, int] | None, num_processes: int, field: str) -> list[tuple[str, int]]:
    """Returns the type and the number of the task of each rank."""
    jobs = checked_counts(
        {"worker": num_processes} if jobs is None else jobs,
        field,
        'from task types to numbers of tasks, such as {"chief": 1, "worker": 3}',
        minimum=1,
    )
    if sum(jobs.values()) != num_processes:
        raise ClusterError(
            f"{field} is {jobs!r}, which is {sum(jobs.values())} tasks, but the launcher"
            f" has started {num_processes} processes. Make the numbers add up to {num_processes},"
            " or start as many processes as there are tasks."
        )
    return [(job, number) for job in sorted(jobs) for number in range(jobs[job])]


def _addresses(placements: Sequence[Placement], port_base: int, field: str) -> list[str]:
    checked_port(port_base, field)
    last_port = port_base + max(placement.local_rank for placement in placements)
    if last_port > MAX_PORT:
        raise InvalidValueError(
            f"{field} is {port_base}, so the processes of one host would use the ports up to"
            f" {last_port}, expected at most {MAX_PORT}. Choose a lower port_base."
        )
    return [join(placement.host, port_base + placement.local_rank) for placement in placements]
