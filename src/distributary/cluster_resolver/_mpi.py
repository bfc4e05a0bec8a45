"""Finds the processes of jobs that `mpirun` starts. MPI itself is not used."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, final

from distributary.cluster_resolver._addresses import split_port
from distributary.cluster_resolver._checks import checked_counts, checked_str, number_in, wrong_type
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
        launcher = _launcher()
        _, local_size_name = launcher.reported
        size = launcher.number(launcher.size)
        local_size = launcher.number(local_size_name, size)
        slots_of = _slots_of(hosts, hostfile)
        if slots_of:
            slots = {host: slots or local_size for host, slots in slots_of.items()}
        elif local_size == size:
            slots = {"localhost": size}
        else:
            raise ClusterError(
                f"{_WHO}: {launcher.size} is {size} and {local_size_name} is {local_size}, so the"
                " job runs on several hosts, and mpirun does not say which. Pass the hosts or"
                " hostfile that you gave to mpirun; in a PBS job, pass"
                " hostfile=os.environ['PBS_NODEFILE']."
            )
        # Ranks that mpirun has not started are left out. The rest keep their places, because
        # mpirun fills the slots in this order.
        placements = place(slots, 1 if map_by == "node" else None, size)
        if len(placements) < size:
            raise ClusterError(
                f"{_WHO}: {launcher.size} is {size}, but the hosts have {len(placements)} slots:"
                f" {slots}. Name all hosts with their slots, such as 'node1:4'."
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


class _Entry(NamedTuple):
    """A host as the user wrote it, with its number of slots if there is one."""

    field: str
    text: str
    host: str
    slots: str | None


def _slots_of(
    hosts: Sequence[str] | Mapping[str, int] | None, hostfile: str | os.PathLike[str] | None
) -> dict[str, int | None]:
    """Returns the slots of each host; None where the user has not given the number."""
    field = f"{_WHO}: hosts"
    if hosts is None and hostfile is None:
        return {}
    if isinstance(hosts, Mapping):
        example = 'from hosts to slots, such as {"node1": 4}'
        counts = checked_counts(hosts, field, example, minimum=1) if hosts else {}
        slots_of: dict[str, int | None] = {**counts}
    else:
        slots_of = _added_up(_in_file(hostfile) if hostfile is not None else _in_list(hosts, field))
    if not slots_of and hostfile is not None:
        raise ClusterError(
            f"{_WHO}: hostfile {os.fspath(hostfile)!r} has no hosts, expected one per line."
        )
    if not slots_of:
        raise InvalidValueError(f"{field} is empty, expected the hosts that mpirun was given.")
    return slots_of


def _in_list(hosts: object, field: str) -> Iterator[_Entry]:
    if not isinstance(hosts, (list, tuple)):
        raise wrong_type(
            hosts,
            field,
            'a list of hosts, such as ["node1:4", "node2:4"], or a dict from hosts to slots',
        )
    for number, entry in enumerate(hosts):
        entry_field = f"{field}[{number}]"
        text = checked_str(entry, entry_field, 'the name of a host, such as "node1" or "node1:4"')
        yield _Entry(entry_field, text, *split_port(text))


def _in_file(hostfile: str | os.PathLike[str]) -> Iterator[_Entry]:
    path = Path(hostfile)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ClusterError(
            f"{_WHO}: hostfile {str(path)!r} cannot be read: {error.strerror}. Pass the file that"
            " mpirun --hostfile was given, or the hosts themselves."
        ) from error
    for number, line in enumerate(lines, start=1):
        host, *words = line.partition("#")[0].split() or [""]
        if host:
            slots = dict(word.partition("=")[::2] for word in words).get("slots")
            yield _Entry(f"{_WHO}: line {number} of hostfile {str(path)!r}", line, host, slots)


def _added_up(entries: Iterator[_Entry]) -> dict[str, int | None]:
    """Returns the slots of each host as mpirun counts them: a host may be there several times."""
    slots_of: dict[str, int | None] = {}
    for field, text, host, slots in entries:
        number = None if slots is None else number_in(slots)
        if not host or (slots is not None and not number):
            raise InvalidValueError(
                f'{field} is {text!r}, expected a host, such as "node1", or a host and its number'
                " of slots, such as \"node1:4\" in a list or 'node1 slots=4' in a file."
            )
        if host in slots_of:
            # Each line without a number is one slot more.
            number = (slots_of[host] or 1) + (number or 1)
        slots_of[host] = number
    return slots_of
