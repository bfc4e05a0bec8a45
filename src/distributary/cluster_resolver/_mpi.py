"""Finds the processes of jobs that `mpirun` starts. MPI itself is not used."""

import os
from collections.abc import Mapping, Sequence
from typing import final

from distributary.cluster_resolver._cluster_spec import checked_strs
from distributary.cluster_resolver._resolver import RankClusterResolver, int_variable
from distributary.errors import ClusterError

_WHO = "OpenMPIClusterResolver"
_CURE = "mpirun sets it for each process that it starts: start the program with mpirun."
_VARIABLES = (  # rank, number of processes, and both on this host
    [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")],
    ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"],  # MPICH and Intel MPI
)


@final
class OpenMPIClusterResolver(RankClusterResolver):
    """The processes that `mpirun` of Open MPI, MPICH or Intel MPI has started.

    The variables are read when you create the resolver: `OMPI_COMM_WORLD_RANK`, `_SIZE`,
    `_LOCAL_RANK` and `_LOCAL_SIZE`, or `PMI_RANK`, `PMI_SIZE`, `MPI_LOCALRANKID` and
    `MPI_LOCALNRANKS`. `mpirun` does not tell its processes the names of the hosts. If there are
    several hosts, pass their names; each must run the same number of processes, with consecutive
    ranks.

    Args:
        hosts: Names of the hosts in the order of their ranks; None for this host alone.
        port_base: Port of the first process on each host; the others count up from it.
        jobs: Number of tasks of each type. Types take the ranks in alphabetical order. None means
            workers only.
        rpc_layer: Protocol to put in front of addresses.

    Raises:
        ClusterError: if a variable is missing, wrong or contradicts the hosts.
        InvalidTypeError, InvalidValueError: if an argument has the wrong type or value.

    Source: `mpirun(1)` of Open MPI 5, section "Environment variables". tf.distribute has no such
    resolver.
    """

    def __init__(
        self,
        hosts: Sequence[str] | None = None,
        port_base: int = 8888,
        jobs: Mapping[str, int] | None = None,
        rpc_layer: str = "grpc",
    ) -> None:
        names = next((names for names in _VARIABLES if names[0] in os.environ), None)
        if names is None:
            raise ClusterError(
                f"Neither of the environment variables {_VARIABLES[0][0]} (Open MPI) and"
                f" {_VARIABLES[1][0]} (MPICH, Intel MPI) is set: mpirun has not started this"
                " process. Start the program with mpirun, or describe the cluster with TF_CONFIG."
            )
        size = int_variable(names[1], _CURE)
        rank = int_variable(names[0], _CURE, size - 1)
        local_size = int_variable(names[3], _CURE, size)
        local_rank = int_variable(names[2], _CURE, local_size - 1)
        expected = 'a list of names of hosts, such as ["node1", "node2"]'
        hosts = checked_strs(hosts or ["localhost"], f"{_WHO}: hosts", expected)
        if len(hosts) * local_size != size or local_rank != rank % local_size:
            raise ClusterError(
                f"{_WHO}: {names[0]} is {rank}, {names[1]} is {size}, {names[2]} is {local_rank}"
                f" and {names[3]} is {local_size}, but hosts has {len(hosts)}: {hosts}. Pass"
                " the names of all hosts in the order of their ranks, and start the same number of"
                " processes on each, with consecutive ranks. Describe any other cluster with"
                " TF_CONFIG."
            )
        places = [(host.strip("[]"), number) for host in hosts for number in range(local_size)]
        super().__init__(places, rank, jobs, port_base, rpc_layer)
