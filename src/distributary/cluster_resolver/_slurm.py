"""Finds the processes of jobs that Slurm starts with `srun`."""

import logging
import os
import warnings
from collections.abc import Mapping
from typing import final

from distributary.cluster_resolver._cluster_spec import ClusterSpec
from distributary.cluster_resolver._gpus import GpuShare, share
from distributary.cluster_resolver._host_lists import expand_hosts, expand_tasks_per_node
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
from distributary.errors import ClusterError, DistributaryWarning, InvalidTypeError
from distributary.topology import backends_started, local_devices_of

__all__ = ["SlurmClusterResolver"]

_log = logging.getLogger(__name__)

_CURE = (
    "srun sets it for each process that it starts: start the program with srun, even in a script"
    " for sbatch."
)


@final
class SlurmClusterResolver(TaskClusterResolver):
    """The processes of a Slurm job step, each with its own port on its node.

    The variables are read when you create the resolver: `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS`,
    `SLURM_STEP_NODELIST`, `SLURM_STEP_TASKS_PER_NODE` and, if set, `SLURM_DISTRIBUTION`,
    `SLURM_NODEID` and `SLURM_LOCALID`.

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
        who = type(self).__name__
        tasks_of = _tasks_per_node(tasks_per_node)
        placements = place(tasks_of, _chunk())
        self._jobs = checked_jobs_of_ranks(jobs, len(placements), who)
        self._addresses = addresses(placements, port_base, f"{who}: port_base")
        self._rank = int_variable("SLURM_PROCID", cure=_CURE, maximum=len(placements) - 1)
        _check_place(self._rank, placements[self._rank])
        self._gpus = share(
            gpus_per_node,
            gpus_per_task,
            max_tasks_per_node=max(tasks_of.values()),
            local_rank=placements[self._rank].local_rank,
            show=auto_set_gpu,
        )
        self.rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Returns the tasks of the job step; with `auto_set_gpu`, sets `CUDA_VISIBLE_DEVICES`."""
        if self._gpus.to_show is not None:
            _show_only(self._gpus)
        return ClusterSpec(jobs_of(self._addresses, self._jobs))

    def get_task_info(self) -> tuple[str | None, int | None]:
        """Returns the type and number of this task."""
        return self.task_type, self.task_id

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> dict[str, int]:
        """Returns `{"GPU": gpus_per_task}`, for every task."""
        del task_type, task_id, config_proto
        return {"GPU": self._gpus.per_task}

    def _found_task_type(self) -> str:
        return task_of(self._rank, self._jobs)[0]

    def _found_task_id(self) -> int:
        return task_of(self._rank, self._jobs)[1]


def _tasks_per_node(tasks_per_node: int | Mapping[str, int] | None) -> dict[str, int]:
    field = "SlurmClusterResolver: tasks_per_node"
    if isinstance(tasks_per_node, Mapping):
        for host, count in tasks_per_node.items():
            checked_count(count, f'{field}["{host}"]', minimum=1)
        if not tasks_per_node:
            raise InvalidTypeError(f"{field} is empty, expected the number of tasks of each node.")
        return _in_order_of_slurm(tasks_per_node)
    hosts = _hosts()
    if tasks_per_node is not None:
        return dict.fromkeys(hosts, checked_count(tasks_per_node, field, minimum=1))
    name = "SLURM_STEP_TASKS_PER_NODE"
    counts = expand_tasks_per_node(_variable(name), name)
    if len(counts) != len(hosts):
        raise ClusterError(
            f"{name} is {os.environ[name]!r}, which is {len(counts)} nodes, but"
            f" SLURM_STEP_NODELIST is {os.environ['SLURM_STEP_NODELIST']!r}, which is"
            f" {len(hosts)}. Unset the variables that another job step has left behind, or pass"
            " tasks_per_node as a dict from nodes to numbers."
        )
    if not all(counts):
        raise ClusterError(f"{name} is {os.environ[name]!r}, expected at least one task per node.")
    num_tasks = int_variable("SLURM_STEP_NUM_TASKS", cure=_CURE)
    if sum(counts) != num_tasks:
        raise ClusterError(
            f"{name} is {os.environ[name]!r}, which is {sum(counts)} tasks, but"
            f" SLURM_STEP_NUM_TASKS is {num_tasks}. Unset the variables that another job step has"
            " left behind, or pass tasks_per_node."
        )
    return dict(zip(hosts, counts, strict=True))


def _in_order_of_slurm(tasks_per_node: Mapping[str, int]) -> dict[str, int]:
    """Sorts nodes in Slurm's order if it lists all of them, and by name otherwise."""
    text = os.environ.get("SLURM_STEP_NODELIST")
    hosts = sorted(tasks_per_node) if text is None else _hosts()
    if set(tasks_per_node) - set(hosts):
        hosts = sorted(tasks_per_node)
    return {host: tasks_per_node[host] for host in hosts if host in tasks_per_node}


def _hosts() -> list[str]:
    name = "SLURM_STEP_NODELIST"
    hosts = expand_hosts(_variable(name), name)
    seen: set[str] = set()
    for host in hosts:
        if host in seen:
            raise ClusterError(
                f"{name} is {os.environ[name]!r}, which has {host!r} twice, expected each node"
                " once."
            )
        seen.add(host)
    return hosts


def _variable(name: str) -> str:
    text = os.environ.get(name)
    if text is None:
        raise ClusterError(f"The environment variable {name} is not set. {_CURE}")
    return text


def _chunk() -> int | None:
    """Returns how many consecutive ranks Slurm gives a node at a time; None for all of them."""
    over_nodes = os.environ.get("SLURM_DISTRIBUTION", "block").lower().split(",")[0].split(":")[0]
    if over_nodes == "cyclic":
        return 1
    if over_nodes.startswith("plane"):
        size = over_nodes.partition("=")[2] or os.environ.get("SLURM_DIST_PLANESIZE", "")
        if not (size.isascii() and size.isdecimal() and int(size) > 0):
            raise ClusterError(
                f"SLURM_DISTRIBUTION is {os.environ['SLURM_DISTRIBUTION']!r} and"
                f" SLURM_DIST_PLANESIZE is {size!r}, expected the size of a plane, as in"
                " srun --distribution=plane=4."
            )
        return int(size)
    return None


def _check_place(rank: int, placement: Placement) -> None:
    """Raises if Slurm puts the process on another node or position: addresses would be wrong."""
    for name, found in (
        ("SLURM_NODEID", placement.host_number),
        ("SLURM_LOCALID", placement.local_rank),
    ):
        if name in os.environ and int_variable(name, cure=_CURE) != found:
            raise ClusterError(
                f"{name} is {os.environ[name]}, but with these numbers of tasks per node process"
                f" {rank} would be number {placement.local_rank} on node {placement.host_number}"
                f" ({placement.host}), so addresses would be wrong. Start the step with"
                " srun --distribution=block or cyclic; if you pass tasks_per_node, it must match"
                " Slurm's."
            )


def _show_only(gpus: GpuShare) -> None:
    name = "CUDA_VISIBLE_DEVICES"
    if gpus.to_show is None or os.environ.get(name) == gpus.to_show:
        return
    if backends_started() and len(local_devices_of("GPU")) > gpus.per_task:
        warnings.warn(
            f"SlurmClusterResolver sets {name} to {gpus.to_show!r}, but JAX has started and keeps"
            " all of the GPUs that it has found. Ask for the cluster at the top of the program,"
            " before anything uses JAX.",
            DistributaryWarning,
            stacklevel=3,
        )
    _log.info("SlurmClusterResolver(auto_set_gpu=True) sets %s to %r", name, gpus.to_show)
    os.environ[name] = gpus.to_show
