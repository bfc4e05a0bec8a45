"""Finds the GPUs that the processes of this node may use."""

import itertools
import os
import shutil
import subprocess

from distributary.cluster_resolver._ranks import int_variable
from distributary.errors import ClusterError

_NVIDIA_SMI_SECONDS = 60.0
_CURE = "Pass gpus_per_node to SlurmClusterResolver, or 0 to compute on the CPU."


def visible_gpus() -> list[str]:
    """Returns the GPUs that the processes of this node may use, as `CUDA_VISIBLE_DEVICES` has them.

    They are those in `CUDA_VISIBLE_DEVICES`, or else those that `SLURM_GPUS_ON_NODE` counts, or
    else those that `nvidia-smi` lists; none without nvidia-smi.

    Raises:
        ClusterError: if the number is unknown.
    """
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is not None:
        names = [name for name in text.replace(" ", "").split(",") if name]
        return list(itertools.takewhile(lambda name: name != "-1", names))  # as CUDA does
    if "SLURM_GPUS_ON_NODE" in os.environ:
        num_gpus = int_variable("SLURM_GPUS_ON_NODE", _CURE)
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
            f" {details.strip()}. {_CURE}"
        ) from error
    return sum(line.startswith("GPU ") for line in output.splitlines())
