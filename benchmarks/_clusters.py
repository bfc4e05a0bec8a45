"""Jobs of several processes on this machine, with the environment that their launchers would give.

Imported by processes that have this checkout's package on their path.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

import _harness
from _peers import Job, Json, command

from distributary.launch import LaunchOptions, free_addresses
from distributary.launch._environment import Task, worker_environ

__all__ = ["SERVER", "Cluster", "jax_workers", "tensorflow_workers", "torch_workers"]

SERVER = (sys.executable, str(_harness.FOLDER / "_ps_tasks.py"))
"""Command line of a worker or parameter server of distributary."""

_SECONDS = 120.0


def jax_workers(
    num_workers: int,
    platform: str = "cpu",
    variables: Sequence[Mapping[str, str]] | None = None,
    source: Path | None = None,
    **arguments: Json,
) -> Job:
    """Starts workers that serve `_multi_worker.peers`, as `distributary launch` would start them.

    Args:
        num_workers: How many there are.
        platform: `"cpu"` or `"gpu"`.
        variables: More of the environment, per worker.
        source: Folder of the package if not that of this checkout.
        arguments: Of `_multi_worker.peers`.
    """
    served = command("_multi_worker", **arguments)
    options = LaunchOptions(tuple(served), num_workers, devices_per_worker=1)
    cluster = {"worker": free_addresses("127.0.0.1", num_workers)}
    own = _harness.environment(1, platform)
    del own["PJRT_NPROC"]  # the launcher chooses it
    if source is not None:
        own["PYTHONPATH"] = str(source)
    environs = []
    for worker in range(num_workers):
        environ = worker_environ(own, options, Task("worker", worker), cluster, 0)
        environs.append({**environ, **(variables[worker] if variables else {})})
    return Job("jax", [served] * num_workers, environs)


def tensorflow_workers(python: str, num_workers: int, **arguments: Json) -> Job:
    """Starts workers of `tf.distribute.MultiWorkerMirroredStrategy`."""
    cluster = Cluster([], _harness.foreign_environment(), worker=num_workers)
    environs = [cluster.environ("worker", index) for index in range(num_workers)]
    served = command("_tensorflow", python, **arguments)
    return Job("tensorflow", [served] * num_workers, environs)


def torch_workers(python: str, num_workers: int, **arguments: Json) -> Job:
    """Starts workers of `DistributedDataParallel`, with what `torchrun` would set."""
    host, port = free_addresses("127.0.0.1", 1)[0].split(":")
    common = {
        "OMP_NUM_THREADS": "1",
        **_harness.foreign_environment(),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(num_workers)),
    }
    environs = [
        {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_workers)
    ]
    return Job("torch", [command("_torch", python, **arguments)] * num_workers, environs)


@final
class Cluster:
    """Addresses of the tasks of a cluster, and processes of some of them.

    Args:
        command: What the processes run.
        environ: Their environment, without `TF_CONFIG`.
        num_tasks: How many there are of every type.
    """

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], **num_tasks: int
    ) -> None:
        addresses = iter(free_addresses("127.0.0.1", sum(num_tasks.values())))
        self.spec = {kind: [next(addresses) for _ in range(n)] for kind, n in num_tasks.items()}
        self.processes: dict[tuple[str, int], subprocess.Popen[bytes]] = {}
        self._command = command
        self._environ = environ

    def environ(self, task_type: str, index: int) -> dict[str, str]:
        """Returns the environment of a task."""
        config = {"cluster": self.spec, "task": {"type": task_type, "index": index}}
        return {**self._environ, "TF_CONFIG": json.dumps(config)}

    def start(self, *task_types: str) -> None:
        """Starts all tasks of some types."""
        for task_type in task_types:
            for index in range(len(self.spec[task_type])):
                self.start_task(task_type, index)

    def start_task(self, task_type: str, index: int) -> None:
        """Starts one task."""
        environ = self.environ(task_type, index)
        self.processes[task_type, index] = subprocess.Popen(
            self._command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def pids(self, task_type: str) -> list[int]:
        """Returns the numbers of the processes of a type."""
        return [process.pid for (kind, _), process in self.processes.items() if kind == task_type]

    def kill(self, task_type: str, index: int) -> None:
        """Ends one task at once."""
        process = self.processes[task_type, index]
        process.kill()
        process.wait(_SECONDS)

    def close(self) -> None:
        """Ends all tasks."""
        for task in self.processes:
            self.kill(*task)
