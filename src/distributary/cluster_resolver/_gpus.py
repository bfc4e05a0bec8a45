"""Shares the GPUs of a node between the tasks that Slurm runs on it."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from typing import final

from distributary.cluster_resolver._ranks import checked_count, int_variable
from distributary.errors import ClusterError

__all__ = ["GpuShare", "share", "visible_gpus"]

_NVIDIA_SMI_SECONDS = 60.0
_CURE = "Pass gpus_per_node to SlurmClusterResolver, or 0 to compute on the CPU."


@final
@dataclass(frozen=True)
class GpuShare:
    """The GPUs of one task.

    Args:
        per_task: Number of GPUs that the task has.
        to_show: Value of `CUDA_VISIBLE_DEVICES` with which JAX sees only these GPUs; None to leave
            the variable alone.
    """

    per_task: int
    to_show: str | None


def share(
    gpus_per_node: int | None,
    gpus_per_task: int | None,
    *,
    max_tasks_per_node: int,
    local_rank: int,
    show: bool,
) -> GpuShare:
    """Returns this task's share of the GPUs of its node.

    Args:
        gpus_per_node: Like the argument of `SlurmClusterResolver`.
        gpus_per_task: Like the argument of `SlurmClusterResolver`.
        max_tasks_per_node: Number of tasks on the fullest node.
        local_rank: Position of this task on its node.
        show: Whether to compute `to_show`; otherwise it is None.

    Raises:
        InvalidTypeError, InvalidValueError: if a number is not an int, or is negative.
        ClusterError: if the tasks need more GPUs than there are, or the number of GPUs is unknown.
    """
    who = "SlurmClusterResolver"
    for field, value in (("gpus_per_node", gpus_per_node), ("gpus_per_task", gpus_per_task)):
        if value is not None:
            checked_count(value, f"{who}: {field}", minimum=0)
    visible = _visible()
    if gpus_per_node is None and _bound_by_slurm(visible, max_tasks_per_node):
        assert visible is not None
        if gpus_per_task is None or gpus_per_task == len(visible):
            return GpuShare(len(visible), None)
    asked_for_none = gpus_per_node == 0 or gpus_per_task == 0
    if gpus_per_node is None:
        gpus_per_node = _num_gpus(visible)
    if gpus_per_task is None:
        gpus_per_task = gpus_per_node // max_tasks_per_node
        if gpus_per_task == 0 and not asked_for_none:  # too few to share
            return GpuShare(0, None)
    needed = gpus_per_task * max_tasks_per_node
    if needed > gpus_per_node:
        raise ClusterError(
            f"{who}: {max_tasks_per_node} tasks on a node with {gpus_per_task} GPUs each need"
            f" {needed} GPUs, but the node has {gpus_per_node}. Lower gpus_per_task, or run fewer"
            " tasks per node."
        )
    names = visible if visible is not None else [str(number) for number in range(gpus_per_node)]
    # In the second case this task is the only one with a share, or sees only its own already.
    if not show or (visible is not None and len(visible) == gpus_per_task):
        return GpuShare(gpus_per_task, None)
    start = local_rank * gpus_per_task
    if start + gpus_per_task > len(names):
        raise ClusterError(
            f"{who}: task {local_rank} of this node should get the GPUs {start} to"
            f" {start + gpus_per_task - 1}, but CUDA_VISIBLE_DEVICES lists only {len(names)}"
            f" ({','.join(names)}). Pass gpus_per_node={len(names)}, or auto_set_gpu=False and"
            " gpus_per_task if Slurm binds GPUs to tasks."
        )
    return GpuShare(gpus_per_task, ",".join(names[start : start + gpus_per_task]))


def visible_gpus() -> int:
    """Returns the number of GPUs that the processes of this node may use.

    Raises:
        ClusterError: if the number is unknown.
    """
    return _num_gpus(_visible())


def _visible() -> list[str] | None:
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    names = [name for name in text.replace(" ", "").split(",") if name]
    return names[: names.index("-1")] if "-1" in names else names  # CUDA ignores what follows


def _bound_by_slurm(visible: list[str] | None, max_tasks_per_node: int) -> bool:
    """Returns whether CUDA_VISIBLE_DEVICES lists only this task's GPUs, not all of the node's."""
    if not visible or max_tasks_per_node == 1:
        return False
    if os.environ.get("SLURM_GPUS_PER_TASK"):
        return True
    on_node = os.environ.get("SLURM_GPUS_ON_NODE", "")
    return on_node.isdecimal() and int(on_node) == len(visible) * max_tasks_per_node


def _num_gpus(visible: list[str] | None) -> int:
    if visible is not None:
        return len(visible)
    if "SLURM_GPUS_ON_NODE" in os.environ:
        return int_variable("SLURM_GPUS_ON_NODE", cure=_CURE)
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    try:
        output = subprocess.run(
            [program, "--list-gpus"],
            capture_output=True,
            check=True,
            text=True,
            timeout=_NVIDIA_SMI_SECONDS,
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        details = f"{getattr(error, 'stdout', '') or ''}{getattr(error, 'stderr', '') or ''}"
        raise ClusterError(
            f"The number of GPUs is not known: {program} --list-gpus failed with {error}"
            f" {details.strip()}. {_CURE}"
        ) from error
    return sum(line.startswith("GPU ") for line in output.splitlines())
