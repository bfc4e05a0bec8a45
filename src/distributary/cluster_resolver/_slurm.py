"""Finds the processes of jobs that Slurm starts with `srun`."""

import itertools
import logging
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from typing import final

from distributary.cluster_resolver._checks import checked_counts, checked_int, number_in
from distributary.cluster_resolver._cluster_spec import ClusterSpec
from distributary.cluster_resolver._ranks import RankClusterResolver, int_variable, variable
from distributary.errors import ClusterError, InvalidValueError

_WHO = "SlurmClusterResolver"
_NODES = "SLURM_STEP_NODELIST"
_GPUS = "CUDA_VISIBLE_DEVICES"
_CURE = (
    "srun sets it for each process that it starts: start the program with srun, even in a script"
    " for sbatch."
)
_GPUS_CURE = "Pass gpus_per_node to SlurmClusterResolver, or 0 to compute on the CPU."
_NVIDIA_SMI_SECONDS = 60.0
_MAX_HOSTS = 1_000_000  # a range such as [1-99999999999] is a typo
_COMMA_BETWEEN_HOSTS = re.compile(r",(?![^\[]*\])")  # unlike those in brackets
_HOSTS = re.compile(r"([^\[\],\s]|\[\d+(-\d+)?(,\d+(-\d+)?)*\])+", re.ASCII)
_PIECE = re.compile(r"\[([^\]]+)\]|([^\[\]]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_REPEATED = re.compile(r"(\d+)(?:\(x(\d{1,6})\))?", re.ASCII)

_log = logging.getLogger(__name__)


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
        most = max(tasks_of.values())
        distribution = os.environ.get("SLURM_DISTRIBUTION", "").lower()
        if distribution.startswith("plane"):
            raise ClusterError(
                f"SLURM_DISTRIBUTION is {distribution!r}, expected block or cyclic. Start the step"
                " with srun --distribution=block."
            )
        is_cyclic = distribution.startswith("cyclic")
        # By round, node and number on the node: so Slurm assigns the ranks.
        places = sorted(
            (local_rank if is_cyclic else 0, node, local_rank, host)
            for node, (host, count) in enumerate(tasks_of.items())
            for local_rank in range(count)
        )
        rank = int_variable("SLURM_PROCID", _CURE, len(places) - 1)
        _, node, local_rank, host = places[rank]
        for name, expected in (("SLURM_NODEID", node), ("SLURM_LOCALID", local_rank)):
            if name in os.environ and int_variable(name, _CURE) != expected:
                raise ClusterError(
                    f"{name} is {os.environ[name]}, but with these nodes and numbers of tasks, it"
                    f" would be {expected} for process {rank} ({host}), so addresses would be"
                    " wrong. Start the step with srun --distribution=block or cyclic; if you pass"
                    " tasks_per_node, it must match Slurm's."
                )
        hosts = [(host, number) for _, _, number, host in places]
        super().__init__(hosts, rank, jobs, port_base, rpc_layer)
        self._num_gpus, shown = _share(gpus_per_node, gpus_per_task, most, local_rank, auto_set_gpu)
        self._gpus_to_show = None if shown is None else ",".join(shown)

    def cluster_spec(self) -> ClusterSpec:
        """Returns the tasks of the job step; with `auto_set_gpu`, sets `CUDA_VISIBLE_DEVICES`."""
        gpus = self._gpus_to_show
        if gpus not in (None, os.environ.get(_GPUS)):
            _log.info("%s(auto_set_gpu=True) sets %s to %r", _WHO, _GPUS, gpus)
            os.environ[_GPUS] = gpus
        return super().cluster_spec()

    def get_task_info(self) -> tuple[str | None, int | None]:
        """Returns the type and number of this task."""
        return self.task_type, self.task_id

    def _accelerators_of_any_task(self) -> dict[str, int]:
        return {"GPU": self._num_gpus}


def _tasks_per_node(tasks_per_node: int | Mapping[str, int] | None) -> dict[str, int]:
    field = f"{_WHO}: tasks_per_node"
    if isinstance(tasks_per_node, Mapping):
        example = 'from nodes to numbers of tasks, such as {"node1": 2}'
        counts_of = checked_counts(tasks_per_node, field, example, minimum=1)
        # In Slurm's order if it lists all of them, and by name otherwise.
        hosts = _hosts() if _NODES in os.environ else []
        ordered = hosts if set(counts_of) <= set(hosts) else sorted(counts_of)
        return {host: counts_of[host] for host in ordered if host in counts_of}
    hosts = _hosts()
    if tasks_per_node is not None:
        return dict.fromkeys(hosts, checked_int(tasks_per_node, field, minimum=1))
    name = "SLURM_STEP_TASKS_PER_NODE"
    text = variable(name, _CURE)
    # "4(x2),3" stands for 4, 4, 3.
    counts = []
    for part in text.split(","):
        match = _REPEATED.fullmatch(part)
        counts += [int(match[1])] * int(match[2] or 1) if match else [0]
    num_tasks = int_variable("SLURM_STEP_NUM_TASKS", _CURE)
    if not all(counts) or len(counts) != len(hosts) or sum(counts) != num_tasks:
        raise ClusterError(
            f"{name} is {text!r}, expected numbers such as '4(x2),3': at least one task for each of"
            f" the {len(hosts)} nodes in {_NODES} ({os.environ[_NODES]!r}), and {num_tasks} in all,"
            " as SLURM_STEP_NUM_TASKS says. Unset the variables that another job step has left"
            " behind, or pass tasks_per_node as a dict from nodes to numbers."
        )
    return dict(zip(hosts, counts, strict=True))


def _hosts() -> list[str]:
    """Returns the nodes of a list such as `"node[001-003,7],gpu-a"`, in its order.

    Numbers keep their leading zeros. A name may contain several ranges, and text after them.

    Source: Slurm's host list expressions, as `scontrol show hostnames` prints them.
    """
    text = variable(_NODES, _CURE)
    hosts: list[str] = []
    for part in _COMMA_BETWEEN_HOSTS.split(text):
        pieces = [_numbers(ranges) if ranges else [end] for ranges, end in _PIECE.findall(part)]
        if not _HOSTS.fullmatch(part) or not all(pieces):
            raise InvalidValueError(
                f"{_NODES} is {text!r}, in which {part!r} is not a host or a range of hosts."
                " Expected host names separated by commas, with ranges of numbers in brackets, such"
                " as 'node[001-003,7],gpu-a'."
            )
        hosts += map("".join, itertools.product(*pieces))
    if len(set(hosts)) < len(hosts):
        raise ClusterError(f"{_NODES} is {text!r}, which has a node twice, expected each once.")
    return hosts


def _numbers(ranges: str) -> list[str]:
    """Returns the numbers of `"001-003,7"`; none if a range has none or too many."""
    numbers: list[str] = []
    for first, last in _RANGE.findall(ranges):
        span = range(int(first), int(last or first) + 1)
        if not 0 < len(span) <= _MAX_HOSTS:
            return []
        numbers += [str(number).zfill(len(first)) for number in span]
    return numbers


def _share(
    per_node: int | None, per_task: int | None, num_tasks: int, local_rank: int, show: bool
) -> tuple[int, list[str] | None]:
    """Returns the number of GPUs of each task, and those of this one; None if all are its own."""
    for field, value in (("gpus_per_node", per_node), ("gpus_per_task", per_task)):
        if value is not None:
            checked_int(value, f"{_WHO}: {field}", minimum=0)
    is_listed = _GPUS in os.environ
    if is_listed or per_node is None:
        names = visible_gpus()
    else:
        names = [str(number) for number in range(per_node)]
    num_on_node = number_in(os.environ.get("SLURM_GPUS_ON_NODE")) or 0
    is_bound = "SLURM_GPUS_PER_TASK" in os.environ or len(names) < num_on_node
    if is_listed and per_node is None and is_bound:  # by Slurm, to this task
        num_tasks, local_rank = 1, 0
    num_gpus = len(names) if per_node is None else per_node
    num = num_gpus // num_tasks if per_task is None else per_task
    too_few = num == 0 and 0 not in (per_node, per_task)
    shown = None
    if show and not too_few and not (is_listed and len(names) == num):
        shown = names[local_rank * num :][:num]
    if num * num_tasks > num_gpus or (shown is not None and len(shown) < num):
        raise ClusterError(
            f"{_WHO}: {num_tasks} tasks on a node with {num} GPUs each need {num * num_tasks} GPUs,"
            f" but the node has {num_gpus}, of which this process can use {len(names)}"
            f" ({', '.join(names)}). Lower gpus_per_task, run fewer tasks per node, or pass"
            " auto_set_gpu=False and gpus_per_task if Slurm binds GPUs to tasks."
        )
    return num, shown


def visible_gpus() -> list[str]:
    """Returns the GPUs that the processes of this node may use, as `CUDA_VISIBLE_DEVICES` has them.

    They are those in `CUDA_VISIBLE_DEVICES`, or else those that `SLURM_GPUS_ON_NODE` counts, or
    else those that `nvidia-smi` lists; none without nvidia-smi.

    Raises:
        ClusterError: if the number is unknown.
    """
    text = os.environ.get(_GPUS)
    if text is not None:
        names = [name for name in text.replace(" ", "").split(",") if name]
        return list(itertools.takewhile(lambda name: name != "-1", names))  # as CUDA does
    if "SLURM_GPUS_ON_NODE" in os.environ:
        num_gpus = int_variable("SLURM_GPUS_ON_NODE", _GPUS_CURE)
    else:
        num_gpus = _num_listed()
    return [str(number) for number in range(num_gpus)]


def _num_listed() -> int:
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    try:
        output = subprocess.check_output(
            [program, "--list-gpus"],
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_NVIDIA_SMI_SECONDS,
        )
    except (OSError, subprocess.SubprocessError) as error:
        details = getattr(error, "output", None) or ""
        raise ClusterError(
            f"The number of GPUs is not known: {program} --list-gpus failed with {error}"
            f" {details.strip()}. {_GPUS_CURE}"
        ) from error
    return sum(line.startswith("GPU ") for line in output.splitlines())
