"""Finds the processes of jobs that Slurm starts with `srun`."""

import collections
import logging
import os
import re
import warnings
from collections.abc import Mapping
from typing import final

from distributary.cluster_resolver._checks import checked_counts, checked_int, number_in
from distributary.cluster_resolver._cluster_spec import ClusterSpec
from distributary.cluster_resolver._gpus import share
from distributary.cluster_resolver._ranks import Launcher, RankClusterResolver, place, variable
from distributary.errors import ClusterError, DistributaryWarning, InvalidValueError
from distributary.topology import backends_started, local_devices_of

_NODES = "SLURM_STEP_NODELIST"

_log = logging.getLogger(__name__)

_SLURM = Launcher(
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    {"SLURM_NODEID": "host_number", "SLURM_LOCALID": "local_rank"},
    "srun sets it for each process that it starts: start the program with srun, even in a script"
    " for sbatch.",
    "Start the step with srun --distribution=block or cyclic; if you pass tasks_per_node, it must"
    " match Slurm's.",
)
_MAX_HOSTS = 1_000_000  # a range such as [1-99999999999] is a typo
_COMMA_BETWEEN_HOSTS = re.compile(r",(?![^\[]*\])")  # unlike those in brackets
_PART = re.compile(r"(?:[^\[\],\s]|\[[^\[\]\s]+\])+")
_PIECE = re.compile(r"\[([^\]]+)\]|([^\[\]]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)
_REPEATED = re.compile(r"(\d+)(?:\(x(\d+)\))?", re.ASCII)


@final
class SlurmClusterResolver(RankClusterResolver):
    """The processes of a Slurm job step, each with its own port on its node.

    The variables are read when you create the resolver: `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS`,
    `SLURM_STEP_NODELIST`, `SLURM_STEP_TASKS_PER_NODE` and, if set, `SLURM_DISTRIBUTION`,
    `SLURM_NODEID` and `SLURM_LOCALID`. `num_accelerators()` is `{"GPU": gpus_per_task}` for every
    task.

    Args:
        jobs: Number of tasks of each type. Types take the ranks in alphabetical order. None means
            workers only.
        port_base: Port of the first task on each node; the others count up from it.
        gpus_per_node: GPUs of each node. None takes those in `CUDA_VISIBLE_DEVICES`, or else
            `SLURM_GPUS_ON_NODE`, or else those that `nvidia-smi` lists; 0 without nvidia-smi.
        gpus_per_task: GPUs of each task; None shares those of the node evenly.
        tasks_per_node: Tasks of each node, or a dict from nodes to their numbers of tasks. None
            asks Slurm.
        auto_set_gpu: Whether `cluster_spec()` sets `CUDA_VISIBLE_DEVICES`, so that this process
            sees only its own GPUs. You must then call it before JAX starts. The log says when the
            variable is set. It is left alone if there are too few GPUs to share, or if Slurm has
            bound GPUs to tasks already.
        rpc_layer: Protocol to put in front of addresses.

    Raises:
        ClusterError: if a variable is missing, wrong or contradicts another one, if the numbers of
            tasks differ, or if the tasks need more GPUs than a node has.
        InvalidTypeError, InvalidValueError: if an argument has the wrong type or value.

    Source: `tf.distribute.cluster_resolver.SlurmClusterResolver`. That one sorts nodes by name,
    even where Slurm numbers processes in another order, and knows its task only after
    `cluster_spec()`.
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Mapping[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str = "grpc",
    ) -> None:
        tasks_of = _tasks_per_node(tasks_per_node)
        reported = {name: of for name, of in _SLURM.reported.items() if name in os.environ}
        launcher = _SLURM._replace(reported=reported)
        super().__init__(launcher, place(tasks_of, _chunk()), jobs, port_base, rpc_layer)
        self._num_gpus, self._gpus_to_show = share(
            gpus_per_node,
            gpus_per_task,
            max_tasks_per_node=max(tasks_of.values()),
            local_rank=self._here.local_rank,
            show=auto_set_gpu,
        )

    def cluster_spec(self) -> ClusterSpec:
        """Returns the tasks of the job step; with `auto_set_gpu`, sets `CUDA_VISIBLE_DEVICES`."""
        if self._gpus_to_show is not None:
            _show_only(self._gpus_to_show, self._num_gpus)
        return super().cluster_spec()

    def get_task_info(self) -> tuple[str | None, int | None]:
        """Returns the type and number of this task."""
        return self.task_type, self.task_id

    def _accelerators_of_any_task(self) -> dict[str, int]:
        return {"GPU": self._num_gpus}


def _tasks_per_node(tasks_per_node: int | Mapping[str, int] | None) -> dict[str, int]:
    field = "SlurmClusterResolver: tasks_per_node"
    if isinstance(tasks_per_node, Mapping):
        example = 'from nodes to numbers of tasks, such as {"node1": 2}'
        return _in_order_of_slurm(checked_counts(tasks_per_node, field, example, minimum=1))
    hosts = _hosts()
    if tasks_per_node is not None:
        return dict.fromkeys(hosts, checked_int(tasks_per_node, field, minimum=1))
    name = "SLURM_STEP_TASKS_PER_NODE"
    text = variable(name, _SLURM.cure)
    counts = expand_tasks_per_node(text, name)
    if not all(counts):
        raise ClusterError(f"{name} is {text!r}, expected at least one task per node.")
    for found, what, other, expected in (
        (len(counts), "nodes", _NODES, len(hosts)),
        (sum(counts), "tasks", _SLURM.size, _SLURM.number(_SLURM.size)),
    ):
        if found != expected:
            raise ClusterError(
                f"{name} is {text!r}, which is {found} {what}, but {other} is"
                f" {os.environ[other]!r}, which is {expected}. Unset the variables that another job"
                " step has left behind, or pass tasks_per_node as a dict from nodes to numbers."
            )
    return dict(zip(hosts, counts, strict=True))


def _in_order_of_slurm(tasks_per_node: Mapping[str, int]) -> dict[str, int]:
    """Sorts nodes in Slurm's order if it lists all of them, and by name otherwise."""
    hosts = _hosts() if _NODES in os.environ else []
    if set(tasks_per_node) - set(hosts):
        hosts = sorted(tasks_per_node)
    return {host: tasks_per_node[host] for host in hosts if host in tasks_per_node}


def _hosts() -> list[str]:
    text = variable(_NODES, _SLURM.cure)
    hosts = expand_hosts(text, _NODES)
    repeated = [host for host, count in collections.Counter(hosts).items() if count > 1]
    if repeated:
        raise ClusterError(
            f"{_NODES} is {text!r}, which has {repeated[0]!r} twice, expected each node once."
        )
    return hosts


def _chunk() -> int | None:
    """Returns how many consecutive ranks Slurm gives a node at a time; None for all of them."""
    text = os.environ.get("SLURM_DISTRIBUTION", "block")
    over_nodes = text.lower().split(",")[0].split(":")[0]
    if over_nodes == "cyclic":
        return 1
    if not over_nodes.startswith("plane"):
        return None
    size = over_nodes.partition("=")[2] or os.environ.get("SLURM_DIST_PLANESIZE", "")
    number = number_in(size)
    if not number:
        raise ClusterError(
            f"SLURM_DISTRIBUTION is {text!r} and SLURM_DIST_PLANESIZE is {size!r}, expected the"
            " size of a plane, as in srun --distribution=plane=4."
        )
    return number


def _show_only(gpus: str, num_gpus: int) -> None:
    name = "CUDA_VISIBLE_DEVICES"
    if os.environ.get(name) == gpus:
        return
    if backends_started() and len(local_devices_of("GPU")) > num_gpus:
        warnings.warn(
            f"SlurmClusterResolver sets {name} to {gpus!r}, but JAX has started and keeps"
            " all of the GPUs that it has found. Ask for the cluster at the top of the program,"
            " before anything uses JAX.",
            DistributaryWarning,
            stacklevel=3,
        )
    _log.info("SlurmClusterResolver(auto_set_gpu=True) sets %s to %r", name, gpus)
    os.environ[name] = gpus


def expand_hosts(text: str, field: str) -> list[str]:
    """Returns the hosts of a list such as `"node[001-003,7],gpu-a"`, in its order.

    Numbers keep their leading zeros. A name may contain several ranges, and text after them.

    Args:
        text: The list.
        field: Where it comes from, for messages.

    Raises:
        InvalidValueError: if it cannot be parsed.

    Source: Slurm's host list expressions, as `scontrol show hostnames` prints them.
    """
    hosts: list[str] = []
    for part in _COMMA_BETWEEN_HOSTS.split(text):
        if not _PART.fullmatch(part):
            raise _no_host_list(text, field, f"{part!r} is not a host or a range of hosts")
        names = [""]
        for ranges, literal in _PIECE.findall(part):
            ends = _numbers(ranges, text, field) if ranges else [literal]
            if len(names) * len(ends) > _MAX_HOSTS:
                raise _no_host_list(text, field, f"it stands for more than {_MAX_HOSTS} hosts")
            names = [name + end for name in names for end in ends]
        hosts += names
    return hosts


def expand_tasks_per_node(text: str, field: str) -> list[int]:
    """Returns the numbers of a list such as `"4(x2),3"`, here 4, 4, 3.

    Args:
        text: The list.
        field: Where it comes from, for messages.

    Raises:
        InvalidValueError: if it cannot be parsed.

    Source: `SLURM_TASKS_PER_NODE` in the manual of `srun`.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _REPEATED.fullmatch(part)
        repetitions = int(match[2] or 1) if match else 0
        if match is None or repetitions > _MAX_HOSTS:
            raise InvalidValueError(
                f"{field} is {text!r}: {part!r} is not a number of tasks. Expected numbers"
                " separated by commas, repeated ones as 4(x2), such as '4(x2),3'."
            )
        counts += [int(match[1])] * repetitions
    return counts


def _numbers(ranges: str, text: str, field: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise _no_host_list(text, field, f"{part!r} is neither a number nor a range of numbers")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise _no_host_list(text, field, f"the range {part!r} runs backwards")
        if int(last) - int(first) >= _MAX_HOSTS:
            raise _no_host_list(text, field, f"it stands for more than {_MAX_HOSTS} hosts")
        width = len(first)
        numbers += [str(number).zfill(width) for number in range(int(first), int(last) + 1)]
    return numbers


def _no_host_list(text: str, field: str, reason: str) -> InvalidValueError:
    return InvalidValueError(
        f"{field} is {text!r}: {reason}. Expected host names separated by commas, with ranges"
        " of numbers in brackets, such as 'node[001-003,7],gpu-a'."
    )
