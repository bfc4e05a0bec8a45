"""Finds the processes of jobs that Slurm starts with `srun`, and the GPUs of a host."""

import itertools
import logging
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from typing import final

from distributary.cluster_resolver._cluster_spec import ClusterSpec, checked_counts, number_in
from distributary.cluster_resolver._resolver import RankClusterResolver, int_variable, variable
from distributary.errors import ClusterError, InvalidValueError, checked_int

_WHO = "SlurmClusterResolver"
_NODES = "SLURM_STEP_NODELIST"
_COUNTS = "SLURM_STEP_TASKS_PER_NODE"
_CURE = (
    "srun sets it for each process that it starts: start the program with srun, even in a script"
    " for sbatch."
)
_MAX_NODES = 1 << 16  # that Slurm takes in one range
_NODE = re.compile(r"([^\[\],\s]|\[\d+(-\d+)?(,\d+(-\d+)?)*\])+", re.ASCII)  # node[001-003,7]

_log = logging.getLogger(__name__)


@final
class SlurmClusterResolver(RankClusterResolver):
    """The processes of a Slurm job step, each with its own port on its node.

    The variables are read when you create the resolver: `SLURM_PROCID`, `SLURM_STEP_NODELIST`,
    `SLURM_STEP_TASKS_PER_NODE` and, if set, `SLURMD_NODENAME` and `SLURM_LOCALID`. Slurm must
    number the processes node by node, as in `srun --distribution=block`. `num_accelerators()` is
    `{"GPU": gpus_per_task}` for every task.

    Args:
        jobs: Number of tasks of each type. Types take the ranks in alphabetical order. None means
            workers only.
        port_base: Port of the first task on each node; the others count up from it.
        gpus_per_node: GPUs of each node. None takes those in `CUDA_VISIBLE_DEVICES`, or else those
            that `nvidia-smi` lists; 0 without nvidia-smi.
        gpus_per_task: GPUs of each task; None shares those of the node evenly.
        tasks_per_node: Tasks of each node, or a dict from nodes, in Slurm's order, to their numbers
            of tasks. None asks Slurm.
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
    even where Slurm numbers them in another order, and knows its task only after `cluster_spec()`.
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
        places = [(node, number) for node, count in tasks_of.items() for number in range(count)]
        rank = int_variable("SLURM_PROCID", _CURE, len(places) - 1)
        node, local_rank = places[rank]
        for name, expected in (("SLURMD_NODENAME", node), ("SLURM_LOCALID", str(local_rank))):
            if os.environ.get(name, expected) != expected:
                raise ClusterError(
                    f"{name} is {os.environ[name]!r}, but process {rank} of the nodes with their"
                    f" numbers of tasks, {tasks_of}, has {expected!r}. Start the step with srun"
                    " --distribution=block; if you pass tasks_per_node, it must match Slurm's."
                )
        super().__init__(places, rank, jobs, port_base, rpc_layer)
        self._num_gpus, gpus = share_gpus(
            gpus_per_node, gpus_per_task, max(tasks_of.values()), local_rank, auto_set_gpu
        )
        is_certain = bool(gpus) or 0 in (gpus_per_node, gpus_per_task)
        self._gpus_to_show = ",".join(gpus) if auto_set_gpu and is_certain else None

    def cluster_spec(self) -> ClusterSpec:
        """Returns the tasks of the job step; with `auto_set_gpu`, sets `CUDA_VISIBLE_DEVICES`."""
        gpus = self._gpus_to_show
        if gpus not in (None, os.environ.get(GPUS)):
            _log.info("%s(auto_set_gpu=True) sets %s to %r", _WHO, GPUS, gpus)
            os.environ[GPUS] = gpus
        return super().cluster_spec()

    def get_task_info(self) -> tuple[str | None, int | None]:
        """Returns the type and number of this task."""
        return self.task_type, self.task_id

    def _accelerators_of_any_task(self) -> dict[str, int]:
        return {"GPU": self._num_gpus}


def _tasks_per_node(tasks_per_node: int | Mapping[str, int] | None) -> dict[str, int]:
    field = f"{_WHO}: tasks_per_node"
    if isinstance(tasks_per_node, Mapping):
        return checked_counts(tasks_per_node, field, "from nodes to numbers of tasks")
    nodes = _nodes(variable(_NODES, _CURE))
    if tasks_per_node is not None:
        return dict.fromkeys(nodes, checked_int(field, tasks_per_node, minimum=1))
    text = variable(_COUNTS, _CURE)
    # "4(x2),3" stands for 4, 4, 3.
    repeated = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    each = (int(count) for count, times in repeated for _ in range(int(times or 1)))
    counts = [*itertools.islice(each, len(nodes) + 1)]
    if len(counts) != len(nodes):
        raise ClusterError(
            f"{_COUNTS} is {text!r}, expected a number such as '4(x2),3' for each of the"
            f" {len(nodes)} nodes in {_NODES} ({os.environ[_NODES]!r}). Unset the variables that"
            " another job step has left behind, or pass tasks_per_node."
        )
    return dict(zip(nodes, counts, strict=True))


def _nodes(text: str) -> list[str]:
    """Returns the nodes of a list such as `"node[001-003,7],gpu-a"`, in its order.

    Source: Slurm's host list expressions, as `scontrol show hostnames` prints them.
    """
    nodes: list[str] = []
    for part in re.split(r",(?![^\[]*\])", text):  # at commas outside of brackets
        if not _NODE.fullmatch(part):
            raise InvalidValueError(
                f"{_NODES} is {text!r}, in which {part!r} is not a node. Expected names of nodes"
                " separated by commas, with numbers in brackets, such as 'node[001-003,7],gpu-a'."
            )
        texts = re.split(r"[\[\]]", part)  # outside and inside of brackets in turn
        pieces = [_numbers(text) if at % 2 else [text] for at, text in enumerate(texts)]
        few = (itertools.islice(piece, _MAX_NODES + 1) for piece in pieces)
        nodes += itertools.islice(map("".join, itertools.product(*few)), _MAX_NODES + 1)
        if len(nodes) > _MAX_NODES:
            raise InvalidValueError(
                f"{_NODES} is {text!r}, which are more than {_MAX_NODES} nodes. Set it to the nodes"
                " of this job step."
            )
    return nodes


def _numbers(ranges: str) -> Iterator[str]:
    """Yields the numbers of `"001-003,7"`, with their leading zeros."""
    for first, _, last in (part.partition("-") for part in ranges.split(",")):
        for number in range(int(first), int(last or first) + 1):
            yield str(number).zfill(len(first))


# The GPUs of a host, found without starting JAX, and how the tasks of Slurm share them.

GPUS = "CUDA_VISIBLE_DEVICES"
_NVIDIA_SMI_SECONDS = 60.0


def visible_gpus() -> list[str]:
    """Returns the GPUs that the processes of this host may use, as `CUDA_VISIBLE_DEVICES` has them.

    They are those in `CUDA_VISIBLE_DEVICES`, or else those that `nvidia-smi` lists; none without
    nvidia-smi.

    Raises:
        ClusterError: if nvidia-smi fails.
    """
    text = os.environ.get(GPUS)
    if text is not None:
        names = (name.strip() for name in text.split(","))
        return list(itertools.takewhile(lambda name: name not in ("", "-1"), names))  # as CUDA does
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, "--list-gpus"]
    try:
        output = subprocess.check_output(command, text=True, timeout=_NVIDIA_SMI_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        raise ClusterError(
            f"nvidia-smi cannot list the GPUs of this host ({error}). Repair it, or set"
            " CUDA_VISIBLE_DEVICES to the GPUs that this process may use, such as 0,1."
        ) from error
    num_gpus = sum(line.startswith("GPU ") for line in output.splitlines())
    return [str(number) for number in range(num_gpus)]


def share_gpus(
    per_node: int | None,
    per_task: int | None,
    num_tasks: int,
    local_rank: int,
    must_be_visible: bool,
) -> tuple[int, list[str]]:
    """Returns the number of GPUs of each task of a Slurm node, and the GPUs of this task.

    Args:
        per_node: GPUs of the node; None for those that are visible.
        per_task: GPUs of each task; None shares those of the node evenly.
        num_tasks: Number of tasks on the node.
        local_rank: Number of this task on the node.
        must_be_visible: Whether the GPUs must be among those in `CUDA_VISIBLE_DEVICES`.

    Raises:
        ClusterError: if there are too few GPUs, or their number is not known.
        InvalidTypeError, InvalidValueError: if one of the first two is not a number >= 0.
    """
    for field, value in (("gpus_per_node", per_node), ("gpus_per_task", per_task)):
        if value is not None:
            checked_int(f"SlurmClusterResolver: {field}", value, minimum=0)
    is_listed = GPUS in os.environ
    if per_node is None or (is_listed and must_be_visible):
        gpus = visible_gpus()[:per_node]
    else:
        gpus = [str(number) for number in range(per_node)]
    num_on_node = number_in(os.environ.get("SLURM_GPUS_ON_NODE")) or 0
    is_bound = "SLURM_GPUS_PER_TASK" in os.environ or len(gpus) < num_on_node
    if per_node is None and is_listed and is_bound:  # by Slurm, to this task
        return len(gpus), gpus
    num_gpus = len(gpus) if per_node is None else per_node
    num = num_gpus // num_tasks if per_task is None else per_task
    if num * num_tasks > len(gpus):
        raise ClusterError(
            f"SlurmClusterResolver: {num_tasks} tasks on a node with {num} GPUs each need"
            f" {num * num_tasks} GPUs, but the node has {len(gpus)} ({', '.join(gpus)}). Lower"
            " gpus_per_task, run fewer tasks per node, or leave both numbers of GPUs out if Slurm"
            " binds GPUs to tasks."
        )
    return num, gpus[local_rank * num :][:num]
