"""Finds the processes of jobs that `mpirun` starts. MPI itself is not used."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, final

from distributary.cluster_resolver._cluster_spec import ClusterSpec
from distributary.cluster_resolver._ranks import (
    Placement,
    addresses,
    checked_count,
    checked_jobs_of_ranks,
    int_variable,
    jobs_of,
    place,
    task_of,
)
from distributary.cluster_resolver._resolver import TaskClusterResolver
from distributary.errors import ClusterError, InvalidTypeError, InvalidValueError

__all__ = ["OpenMPIClusterResolver"]

_WHO = "OpenMPIClusterResolver"
_CURE = "mpirun sets it for each process that it starts: start the program with mpirun."


class _Variables(NamedTuple):
    rank: str
    size: str
    local_rank: str
    local_size: str


_LAUNCHERS = (
    _Variables(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    # MPICH and Intel MPI, whose process manager is Hydra.
    _Variables("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


@final
class OpenMPIClusterResolver(TaskClusterResolver):
    """The processes that `mpirun` of Open MPI, MPICH or Intel MPI has started.

    The variables are read when you create the resolver: `OMPI_COMM_WORLD_RANK`, `_SIZE`,
    `_LOCAL_RANK` and `_LOCAL_SIZE`, or `PMI_RANK`, `PMI_SIZE`, `MPI_LOCALRANKID` and
    `MPI_LOCALNRANKS`. `mpirun` does not tell its processes the names of the hosts. If there are
    several hosts, pass the ones that you gave to `mpirun`.

    Args:
        hosts: Hosts in the order in which you gave them to `mpirun`, each as `"host"` or
            `"host:slots"`, or a dict from hosts to slots. Without slots, all hosts have the same
            number.
        hostfile: The file that you gave to `mpirun --hostfile`, or `os.environ["PBS_NODEFILE"]`. It
            has one host per line, optionally followed by `slots=4`. A host on several lines has one
            slot for each of them.
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
        hostfile: str | os.PathLike[str] | None = None,
        port_base: int = 8888,
        jobs: Mapping[str, int] | None = None,
        map_by: str = "slot",
        rpc_layer: str = "grpc",
    ) -> None:
        if map_by not in ("slot", "node"):
            raise InvalidValueError(f'{_WHO}: map_by is {map_by!r}, expected "slot" or "node".')
        if hosts is not None and hostfile is not None:
            raise InvalidValueError(
                f"{_WHO}: got both hosts ({hosts!r}) and hostfile ({os.fspath(hostfile)!r}),"
                " expected one of the two."
            )
        names = _variables()
        size = int_variable(names.size, cure=_CURE)
        self._rank = int_variable(names.rank, cure=_CURE, maximum=size - 1)
        local_size = int_variable(names.local_size, cure=_CURE, maximum=size)
        slots = _from_file(hostfile) if hostfile is not None else _from_argument(hosts)
        placements = place(_processes(slots, size, local_size, map_by, names), _chunk(map_by))
        _check_place(self._rank, placements, local_size, names)
        self._jobs = checked_jobs_of_ranks(jobs, size, _WHO)
        self._addresses = addresses(placements, port_base, f"{_WHO}: port_base")
        self.rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Returns the processes that `mpirun` has started."""
        return ClusterSpec(jobs_of(self._addresses, self._jobs))

    def _found_task_type(self) -> str:
        return task_of(self._rank, self._jobs)[0]

    def _found_task_id(self) -> int:
        return task_of(self._rank, self._jobs)[1]


def _variables() -> _Variables:
    for names in _LAUNCHERS:
        if names.rank in os.environ:
            return names
    raise ClusterError(
        f"Neither of the environment variables {_LAUNCHERS[0].rank} (Open MPI) and"
        f" {_LAUNCHERS[1].rank} (MPICH, Intel MPI) is set: mpirun has not started this process."
        " Start the program with mpirun, or describe the cluster with TF_CONFIG."
    )


# The number of slots is None where the user has not given it.
def _from_argument(hosts: Sequence[str] | Mapping[str, int] | None) -> dict[str, int | None]:
    field = f"{_WHO}: hosts"
    if hosts is None:
        return {}
    if isinstance(hosts, Mapping):
        slots_of: dict[str, int | None] = {
            host: checked_count(slots, f'{field}["{host}"]', minimum=1)
            for host, slots in hosts.items()
        }
    elif isinstance(hosts, (list, tuple)):
        slots_of = {}
        for number, entry in enumerate(hosts):
            if not isinstance(entry, str):
                raise InvalidTypeError(
                    f"{field}[{number}] is {entry!r} ({type(entry).__name__}), expected the name of"
                    ' a host, such as "node1" or "node1:4".'
                )
            host, slots = _host_and_slots(entry, f"{field}[{number}]")
            _add(slots_of, host, slots, f"{field}[{number}]")
    else:
        raise InvalidTypeError(
            f"{field} is {hosts!r} ({type(hosts).__name__}), expected a list of hosts, such as"
            ' ["node1:4", "node2:4"], or a dict from hosts to slots.'
        )
    if not slots_of:
        raise InvalidValueError(f"{field} is empty, expected the hosts that mpirun was given.")
    return slots_of


def _host_and_slots(entry: str, field: str) -> tuple[str, int | None]:
    """Splits `"node1:4"` into host and slots; an IPv6 address must be in brackets."""
    end_of_address = entry.rfind("]") + 1
    host, colon, slots = entry[end_of_address:].partition(":")
    host = entry[:end_of_address] + host
    is_number = slots.isascii() and slots.isdecimal() and int(slots) > 0
    if not host or (colon and not is_number):
        raise InvalidValueError(
            f'{field} is {entry!r}, expected a host, such as "node1", or a host and its number of'
            ' slots, such as "node1:4".'
        )
    return host.removeprefix("[").removesuffix("]"), int(slots) if colon else None


def _from_file(hostfile: str | os.PathLike[str]) -> dict[str, int | None]:
    path = Path(hostfile)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ClusterError(
            f"{_WHO}: hostfile {str(path)!r} cannot be read: {error.strerror}. Pass the file that"
            " mpirun --hostfile was given, or the hosts themselves."
        ) from error
    slots_of: dict[str, int | None] = {}
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if words:
            settings = dict(word.partition("=")[::2] for word in words[1:])
            slots = settings.get("slots")
            if slots is not None and not (slots.isascii() and slots.isdecimal() and int(slots)):
                raise InvalidValueError(
                    f"{_WHO}: line {number} of hostfile {str(path)!r} is {line!r}, expected a host"
                    " and its slots, such as 'node1 slots=4'."
                )
            _add(slots_of, words[0], None if slots is None else int(slots), f"line {number}")
    if not slots_of:
        raise ClusterError(f"{_WHO}: hostfile {str(path)!r} has no hosts, expected one per line.")
    return slots_of


def _add(slots_of: dict[str, int | None], host: str, slots: int | None, field: str) -> None:
    """Adds a host as mpirun does: a host that comes again gets one more slot each time."""
    if host not in slots_of:
        slots_of[host] = slots
    else:
        slots_of[host] = (slots_of[host] or 1) + (slots or 1)


def _processes(
    slots_of: dict[str, int | None],
    size: int,
    local_size: int,
    map_by: str,
    names: _Variables,
) -> dict[str, int]:
    """Returns how many processes each host runs."""
    if not slots_of:
        if local_size == size:
            return {"localhost": size}
        raise ClusterError(
            f"{_WHO}: {names.size} is {size} and {names.local_size} is {local_size}, so the job"
            " runs on several hosts, and mpirun does not say which. Pass the hosts or hostfile that"
            " you gave to mpirun; in a PBS job, pass hostfile=os.environ['PBS_NODEFILE']."
        )
    known = {host: slots if slots is not None else local_size for host, slots in slots_of.items()}
    if sum(known.values()) < size:
        raise ClusterError(
            f"{_WHO}: {names.size} is {size}, but the hosts have {sum(known.values())} slots:"
            f" {known}. Name all hosts with their slots, such as 'node1:4'."
        )
    processes = dict.fromkeys(known, 0)
    for placement in place(known, _chunk(map_by))[:size]:
        processes[placement.host] += 1
    return {host: count for host, count in processes.items() if count}


def _chunk(map_by: str) -> int | None:
    return 1 if map_by == "node" else None


def _check_place(
    rank: int, placements: Sequence[Placement], local_size: int, names: _Variables
) -> None:
    """Raises if the launcher counts other processes on this host: addresses would be wrong."""
    here = placements[rank]
    num_here = sum(placement.host == here.host for placement in placements)
    local_rank = int_variable(names.local_rank, cure=_CURE)
    if (local_rank, local_size) != (here.local_rank, num_here):
        raise ClusterError(
            f"{_WHO}: {names.local_rank} is {local_rank} and {names.local_size} is {local_size},"
            f" but with these hosts process {rank} would be number {here.local_rank} of {num_here}"
            f" on {here.host}, so addresses would be wrong. Pass hosts in the order and with the"
            " slots that mpirun has, and map_by as in mpirun --map-by."
        )
