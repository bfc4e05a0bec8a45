"""Turns the ranks that a launcher gives to processes on hosts into tasks with addresses."""

import collections
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from distributary.cluster_resolver._addresses import MAX_PORT, checked_port, join_address
from distributary.cluster_resolver._checks import checked_counts, number_in
from distributary.cluster_resolver._cluster_spec import ClusterSpec
from distributary.cluster_resolver._resolver import ClusterResolver
from distributary.errors import ClusterError, InvalidValueError


class Launcher(NamedTuple):
    """The environment variables in which a launcher tells every process where it is.

    Args:
        rank: Variable with the number of the process.
        size: Variable with the number of processes.
        reported: Fields of `Placement`, by the variables that hold them.
        cure: Advice for when a variable is missing or wrong.
        cure_of_places: Advice for when the variables contradict the hosts.
    """

    rank: str
    size: str
    reported: Mapping[str, str]
    cure: str
    cure_of_places: str

    def number(self, name: str, maximum: int | None = None) -> int:
        """Returns the number in one of the variables; see `int_variable`."""
        return int_variable(name, self.cure, maximum)


class Placement(NamedTuple):
    """The place where the process with a certain rank runs.

    Args:
        host: Name of the host.
        host_number: Position of the host among the hosts.
        local_rank: Position of the process on its host.
        local_size: Number of processes on its host.
    """

    host: str
    host_number: int
    local_rank: int
    local_size: int


class RankClusterResolver(ClusterResolver):
    """Base class of resolvers for launchers that number the processes of a job.

    Args:
        launcher: Variables of the launcher.
        placements: Placement of each rank.
        jobs: Number of tasks of each type, as the user passed it; None for workers only. Types take
            the ranks in alphabetical order.
        port_base: Port of the first process on each host; the others count up from it.
        rpc_layer: Protocol to put in front of addresses.

    Raises:
        InvalidTypeError: if `jobs` is not a dict from strings to ints, or `port_base` is not an
            int.
        InvalidValueError: if a number in `jobs` is not positive, or a port is out of range.
        ClusterError: if the numbers in `jobs` do not add up to the number of processes, a variable
            is missing or wrong, or this process is not where `placements` say.
    """

    def __init__(
        self,
        launcher: Launcher,
        placements: Sequence[Placement],
        jobs: Mapping[str, int] | None,
        port_base: int,
        rpc_layer: str,
    ) -> None:
        rank = launcher.number(launcher.rank, len(placements) - 1)
        self._here = placements[rank]
        _check_place(launcher, rank, self._here)
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


def place(
    processes_of: Mapping[str, int], chunk: int | None, num_processes: int | None = None
) -> list[Placement]:
    """Returns the placement of each rank.

    Args:
        processes_of: Number of processes that each host has room for.
        chunk: Number of consecutive ranks that a host gets before it is the next host's turn, in
            rounds until all processes are placed. None fills one host after the other.
        num_processes: Number of processes. None fills all hosts.
    """
    most = max(processes_of.values())
    chunk = chunk or most or 1
    places = [
        (host, number, local_rank)
        for start in range(0, most, chunk)
        for number, (host, count) in enumerate(processes_of.items())
        for local_rank in range(start, min(count, start + chunk))
    ][:num_processes]
    sizes = collections.Counter(host for host, _, _ in places)
    return [Placement(*at, sizes[at[0]]) for at in places]


def _check_place(launcher: Launcher, rank: int, here: Placement) -> None:
    """Checks that a process runs where the launcher says: otherwise, addresses would be wrong."""
    found = {name: launcher.number(name) for name in launcher.reported}
    if found != {name: getattr(here, field) for name, field in launcher.reported.items()}:
        raise ClusterError(
            f"{' and '.join(f'{name} is {value}' for name, value in found.items())}, but with these"
            f" hosts and numbers of processes, process {rank} would be number {here.local_rank} of"
            f" {here.local_size} on host {here.host_number} ({here.host}), so addresses would be"
            f" wrong. {launcher.cure_of_places}"
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
    last_port = port_base + max(at.local_rank for at in placements)
    if last_port > MAX_PORT:
        raise InvalidValueError(
            f"{field} is {port_base}, so the processes of one host would use the ports up to"
            f" {last_port}, expected at most {MAX_PORT}. Choose a lower port_base."
        )
    return [
        join_address(placement.host, port_base + placement.local_rank) for placement in placements
    ]
