"""The GPUs of a host, found without starting JAX, and how tasks of Slurm share them."""

import itertools
import os
import shutil
import subprocess

from distributary.cluster_resolver._cluster_spec import number_in
from distributary.errors import ClusterError, checked_int

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
