"""Jobs of several processes on this machine, with the environment that their launchers would give.

Imported by processes that have this checkout's package on their path.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import _processes
import _tensorflow
import _torch
from _served import ServedJob

from distributary.launch import LaunchOptions
from distributary.launch._environment import (
    STATUS_VARIABLE,
    Task,
    free_addresses,
    worker_environ,
)

__all__ = ["start_jax", "start_tensorflow", "start_torch"]

_FOLDER = Path(__file__).resolve().parent
_ANSWER_SECONDS = 240.0
_NO_DESCRIPTOR = -1


def start_jax(
    arguments: Sequence[str],
    num_workers: int,
    platform: str = "cpu",
    variables: Sequence[Mapping[str, str]] | None = None,
) -> ServedJob:
    """Workers that run `_multi_worker.py` as `distributary launch` would start them.

    Args:
        arguments: Of the script.
        num_workers: How many there are.
        platform: `"cpu"` or `"gpu"`.
        variables: More of the environment, per worker.
    """
    command = (sys.executable, str(_FOLDER / "_multi_worker.py"), *arguments)
    options = LaunchOptions(command, num_workers, devices_per_worker=1)
    addresses = free_addresses("127.0.0.1", num_workers)
    environs = []
    own = _processes.environment(1, platform)
    del own["PJRT_NPROC"]  # the launcher chooses it
    for worker in range(num_workers):
        environ = worker_environ(
            own,
            options,
            Task("worker", worker),
            {"worker": addresses},
            num_restarts=0,
            status_fd=_NO_DESCRIPTOR,
        )
        del environ[STATUS_VARIABLE]
        environs.append({**environ, **(variables[worker] if variables else {})})
    return ServedJob("jax", [command] * num_workers, environs, _ANSWER_SECONDS)


def start_tensorflow(python: str, workload: str, num_workers: int) -> ServedJob:
    """Workers of `tf.distribute.MultiWorkerMirroredStrategy`."""
    command = [python, str(_FOLDER / "_tensorflow.py"), workload, "--multi-worker"]
    workers = free_addresses("127.0.0.1", num_workers)
    environs = [
        {
            **_tensorflow.environment(),
            "TF_CONFIG": json.dumps(
                {"cluster": {"worker": workers}, "task": {"type": "worker", "index": worker}}
            ),
        }
        for worker in range(num_workers)
    ]
    return ServedJob("tensorflow", [command] * num_workers, environs, _ANSWER_SECONDS)


def start_torch(
    python: str, folder: Path | None, arguments: Sequence[str], num_workers: int
) -> ServedJob:
    """Workers of `DistributedDataParallel`."""
    command = [python, str(_FOLDER / "_torch.py"), *arguments]
    (address,) = free_addresses("127.0.0.1", 1)
    environs = _torch.environments(folder, address, num_workers)
    return ServedJob("torch", [command] * num_workers, environs, _ANSWER_SECONDS)
