"""Turns the ranks that a launcher gives to processes on hosts into tasks with addresses."""

import os
from collections.abc import Mapping, Sequence

from distributary.cluster_resolver._addresses import join_address
from distributary.cluster_resolver._checks import checked_counts, number_in
from distributary.cluster_resolver._cluster_spec import ClusterSpec
from distributary.cluster_resolver._resolver import ClusterResolver
from distributary.errors import ClusterError, checked_int


class RankClusterResolver(ClusterResolver):
    """Base class of resolvers for launchers that number the processes of a job.

    Args:
        places: For each rank, the host of the process and its number on that host.
        rank: Rank of this process.
        jobs: Number of tasks of each type, as the user passed it; None for workers only. Types take
            the ranks in alphabetical order.
        port_base: Port of the first process on each host; the others count up from it.
        rpc_layer: Protocol to put in front of addresses.

    Raises:
        InvalidTypeError: if `jobs` is not a dict to ints, or `port_base` is not an int.
        InvalidValueError: if a number in `jobs` is negative, or a port is out of range.
        ClusterError: if the numbers in `jobs` do not add up to the number of processes.
    """

    def __init__(
        self,
        places: Sequence[tuple[str, int]],
        rank: int,
        jobs: Mapping[str, int] | None,
        port_base: int,
        rpc_layer: str,
    ) -> None:
        checked_int(self._field("port_base"), port_base, minimum=1)
        field = self._field("jobs")
        expected = 'from task types to numbers of tasks, such as {"chief": 1, "worker": 3}'
        jobs = checked_counts({"worker": len(places)} if jobs is None else jobs, field, expected)
        tasks = [(job, number) for job in sorted(jobs) for number in range(jobs[job])]
        if len(tasks) != len(places):
            raise ClusterError(
                f"{field} is {jobs!r}, which is {len(tasks)} tasks, but the launcher has started"
                f" {len(places)} processes. Make the numbers add up to {len(places)}, or start as"
                " many processes as there are tasks."
            )
        cluster: dict[str, list[str]] = {}
        for (job, _), (host, local_rank) in zip(tasks, places, strict=True):
            cluster.setdefault(job, []).append(join_address(host, port_base + local_rank))
        self._cluster_spec = ClusterSpec(cluster)
        self.task_type, self.task_id = tasks[rank]
        self.rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Returns the processes that the launcher has started."""
        return self._cluster_spec


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
