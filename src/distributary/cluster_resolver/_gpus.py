"""Shares the GPUs of a node between the tasks that Slurm runs on it."""

import os
import shutil
import subprocess

from distributary.cluster_resolver._checks import checked_int, number_in
from distributary.cluster_resolver._ranks import int_variable
from distributary.errors import ClusterError

_WHO = "SlurmClusterResolver"
_NVIDIA_SMI_SECONDS = 60.0
_CURE = f"Pass gpus_per_node to {_WHO}, or 0 to compute on the CPU."


def share(
    gpus_per_node: int | None,
    gpus_per_task: int | None,
    *,
    max_tasks_per_node: int,
    local_rank: int,
    show: bool,
) -> tuple[int, str | None]:
    """Returns this task's share of the GPUs of its node.

    Args:
        gpus_per_node: Like the argument of `SlurmClusterResolver`.
        gpus_per_task: Like the argument of `SlurmClusterResolver`.
        max_tasks_per_node: Number of tasks on the fullest node.
        local_rank: Position of this task on its node.
        show: Whether to choose the GPUs that this task sees.

    Returns:
        The number of GPUs of each task, and the value of `CUDA_VISIBLE_DEVICES` with which JAX sees
        only those of this task; None to leave the variable alone.

    Raises:
        InvalidTypeError, InvalidValueError: if a number is not an int, or is negative.
        ClusterError: if the tasks need more GPUs than there are, or the number of GPUs is unknown.
    """
    for field, value in (("gpus_per_node", gpus_per_node), ("gpus_per_task", gpus_per_task)):
        if value is not None:
            checked_int(value, f"{_WHO}: {field}", minimum=0)
    visible = _visible()
    is_bound = visible and _bound_by_slurm(len(visible), max_tasks_per_node)
    if visible and is_bound and gpus_per_node is None and gpus_per_task in (None, len(visible)):
        return len(visible), None
    num_gpus = _num_gpus(visible) if gpus_per_node is None else gpus_per_node
    per_task = num_gpus // max_tasks_per_node if gpus_per_task is None else gpus_per_task
    needed = per_task * max_tasks_per_node
    if needed > num_gpus:
        raise ClusterError(
            f"{_WHO}: {max_tasks_per_node} tasks on a node with {per_task} GPUs each need"
            f" {needed} GPUs, but the node has {num_gpus}. Lower gpus_per_task, or run fewer"
            " tasks per node."
        )
    too_few = per_task == 0 and 0 not in (gpus_per_node, gpus_per_task)
    sees_only_its_own = visible is not None and len(visible) == per_task
    if not show or too_few or sees_only_its_own:
        return per_task, None
    return per_task, ",".join(_share_of(local_rank, per_task, visible, num_gpus))


def _share_of(
    local_rank: int, per_task: int, visible: list[str] | None, num_gpus: int
) -> list[str]:
    names = [str(number) for number in range(num_gpus)] if visible is None else visible
    start, stop = local_rank * per_task, (local_rank + 1) * per_task
    if stop > len(names):
        raise ClusterError(
            f"{_WHO}: task {local_rank} of this node should get the GPUs {start} to"
            f" {stop - 1}, but CUDA_VISIBLE_DEVICES lists only {len(names)}"
            f" ({','.join(names)}). Pass gpus_per_node={len(names)}, or auto_set_gpu=False and"
            " gpus_per_task if Slurm binds GPUs to tasks."
        )
    return names[start:stop]


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


def _bound_by_slurm(num_visible: int, max_tasks_per_node: int) -> bool:
    """Returns whether CUDA_VISIBLE_DEVICES lists only this task's GPUs, not all of the node's."""
    on_node = number_in(os.environ.get("SLURM_GPUS_ON_NODE"))
    is_share = on_node == num_visible * max_tasks_per_node
    return max_tasks_per_node > 1 and (bool(os.environ.get("SLURM_GPUS_PER_TASK")) or is_share)


def _num_gpus(visible: list[str] | None) -> int:
    if visible is not None:
        return len(visible)
    if "SLURM_GPUS_ON_NODE" in os.environ:
        return int_variable("SLURM_GPUS_ON_NODE", _CURE)
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
