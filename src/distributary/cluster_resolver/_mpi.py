"""Finds the processes of jobs that `mpirun` starts. MPI itself is not used."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import final

from distributary.cluster_resolver._addresses import split_port
from distributary.cluster_resolver._checks import checked_counts, checked_str, wrong_type
from distributary.cluster_resolver._ranks import Launcher, RankClusterResolver, place
from distributary.errors import ClusterError, InvalidValueError

_WHO = "OpenMPIClusterResolver"
_CURES = (
    "mpirun sets it for each process that it starts: start the program with mpirun.",
    "Pass hosts in the order and with the slots that mpirun has, and map_by as in mpirun --map-by.",
)
_OPEN_MPI = Launcher(
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    {"OMPI_COMM_WORLD_LOCAL_RANK": "local_rank", "OMPI_COMM_WORLD_LOCAL_SIZE": "local_size"},
    *_CURES,
)
# MPICH and Intel MPI, whose process manager is Hydra.
_HYDRA = Launcher(
    "PMI_RANK",
    "PMI_SIZE",
    {"MPI_LOCALRANKID": "local_rank", "MPI_LOCALNRANKS": "local_size"},
    *_CURES,
)


@final
class OpenMPIClusterResolver(RankClusterResolver):
    """The processes that `mpirun` of Open MPI, MPICH or Intel MPI has started.

    The variables are read when you create the resolver: `OMPI_COMM_WORLD_RANK`, `_SIZE`,
    `_LOCAL_RANK` and `_LOCAL_SIZE`, or `PMI_RANK`, `PMI_SIZE`, `MPI_LOCALRANKID` and
    `MPI_LOCALNRANKS`. `mpirun` does not tell its processes the names of the hosts. If there are
    several hosts, pass the ones that you gave to `mpirun`.

    Args:
        hosts: Hosts in the order in which you gave them to `mpirun`, or a dict from hosts to slots.
            In a list, a host is there once for each of its slots, as in the lines of
            `PBS_NODEFILE`. If each is there once, all have the same number of slots.
        port_base: Port of the first process on each host; the others count up from it.
        jobs: Number of tasks of each type. Types take the ranks in alphabetical order. None means
            workers only.
        map_by: How `mpirun` assigns ranks: `"slot"` fills one host after the other, `"node"` gives
            each host one rank in turn.
        rpc_layer: Protocol to put in front of addresses.

    Raises:
        ClusterError: if a variable is missing, wrong or contradicts the hosts.
        InvalidTypeError, InvalidValueError: if an argument has the wrong type or value.

    Source: `mpirun(1)` of Open MPI 5, section "Environment variables". tf.distribute has no such
    resolver.
    """

    def __init__(
        self,
        hosts: Sequence[str] | Mapping[str, int] | None = None,
        port_base: int = 8888,
        jobs: Mapping[str, int] | None = None,
        map_by: str = "slot",
        rpc_layer: str = "grpc",
    ) -> None:
        if map_by not in ("slot", "node"):
            raise InvalidValueError(f'{_WHO}: map_by is {map_by!r}, expected "slot" or "node".')
        launcher = _launcher()
        _, local_size_name = launcher.reported
        size = launcher.number(launcher.size)
        local_size = launcher.number(local_size_name, size)
        slots: Mapping[str, int]
        if hosts is not None:
            slots = _slots_of(hosts, local_size)
        elif local_size == size:
            slots = {"localhost": size}
        else:
            raise ClusterError(
                f"{_WHO}: {launcher.size} is {size} and {local_size_name} is {local_size}, so the"
                " job runs on several hosts, and mpirun does not say which. Pass the hosts that you"
                " gave to mpirun; in a PBS job, pass"
                " hosts=open(os.environ['PBS_NODEFILE']).read().split()."
            )
        # Ranks that mpirun has not started are left out. The rest keep their places, because
        # mpirun fills the slots in this order.
        placements = place(slots, 1 if map_by == "node" else None, size)
        if len(placements) < size:
            raise ClusterError(
                f"{_WHO}: {launcher.size} is {size}, but the hosts have {len(placements)} slots:"
                f" {dict(slots)}. Name all hosts with their slots, such as {{'node1': 4}}."
            )
        super().__init__(launcher, placements, jobs, port_base, rpc_layer)


def _launcher() -> Launcher:
    for launcher in (_OPEN_MPI, _HYDRA):
        if launcher.rank in os.environ:
            return launcher
    raise ClusterError(
        f"Neither of the environment variables {_OPEN_MPI.rank} (Open MPI) and {_HYDRA.rank}"
        " (MPICH, Intel MPI) is set: mpirun has not started this process. Start the program with"
        " mpirun, or describe the cluster with TF_CONFIG."
    )


def _slots_of(hosts: Sequence[str] | Mapping[str, int], local_size: int) -> Mapping[str, int]:
    """Returns the slots of each host; `local_size` where the user has not given the number."""
    field = f"{_WHO}: hosts"
    if isinstance(hosts, Mapping):
        return checked_counts(hosts, field, 'from hosts to slots, such as {"node1": 4}', minimum=1)
    if not isinstance(hosts, (list, tuple)) or not hosts:
        raise wrong_type(
            hosts, field, 'a list of hosts, not empty, such as ["node1", "node2"], or a dict'
        )
    slots_of: Counter[str] = Counter()
    for number, host in enumerate(hosts):
        what = f"{field}[{number}]"
        name, slots = split_port(checked_str(host, what, 'the name of a host, such as "node1"'))
        if not name or slots is not None:
            raise InvalidValueError(
                f'{what} is {host!r}, expected the name of a host, such as "node1". Pass slots as'
                ' a dict, {"node1": 4, "node2": 4}.'
            )
        slots_of[name] += 1
    return slots_of if max(slots_of.values()) > 1 else dict.fromkeys(slots_of, local_size)
