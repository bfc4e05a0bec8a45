"""Processes of peers, with the environment that the launcher of their library would give."""

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from _peers import Job, Json, command

__all__ = ["FOLDER", "Cluster", "Process", "environment", "start"]

FOLDER = Path(__file__).resolve().parent
SOURCE = FOLDER.parent / "src"
sys.path.insert(0, str(SOURCE))

_SECONDS = 120.0
_ONE_THREAD = {
    "TF_NUM_INTRAOP_THREADS": "1",
    "NPROC": "1",
    "PJRT_NPROC": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


@final
@dataclass(frozen=True, eq=False)
class Process:
    """A process that serves peers of a module, or connected workers that do.

    Attributes:
        module: What `_peers.command` takes.
        names: Which peers it has.
        arguments: More of `peers` of the module.
        library: `"jax"`, `"tensorflow"` or `"torch"`: whose Python and environment it gets.
        devices: Logical CPU devices.
        workers: How many there are, connected; 0 for one by itself.
        servers: Parameter servers. With these, the process is the chief; workers and servers run
            the module as a script. Each of them computes on one thread.
        source: Folder of the package.
        variables: More of the environment, per worker.
    """

    module: str
    names: Sequence[str]
    arguments: Mapping[str, Json] = field(default_factory=dict)
    library: str = "jax"
    devices: int = 1
    workers: int = 0
    servers: int = 0
    source: Path = SOURCE
    variables: Sequence[Mapping[str, str]] = ()


def start(process: Process, pythons: Mapping[str, str], platform: str = "cpu") -> Job:
    """Starts what `process` describes.

    Args:
        process: Of one library.
        pythons: Interpreters of other libraries than JAX.
        platform: `"cpu"` or `"gpu"`, of JAX.
    """
    python = pythons.get(process.library, sys.executable)
    served = command(process.module, python, names=list(process.names), **process.arguments)
    if process.servers:
        environ = foreign_environment()
        if process.library == "jax":
            environ = environment(source=process.source)
        tasks = (python, str(FOLDER / f"{process.module}.py"))
        cluster = Cluster(
            tasks, {**environ, **_ONE_THREAD}, chief=1, worker=process.workers, ps=process.servers
        )
        cluster.start("worker", "ps")
        helpers = list(cluster.processes.values())
        return Job(process.library, [served], [cluster.environ("chief", 0)], helpers)
    environs = _environs(process, served, platform)
    if process.variables:
        environs = [{**a, **b} for a, b in zip(environs, process.variables, strict=True)]
    return Job(process.library, [served] * len(environs), environs)


def environment(
    num_devices: int = 1, platform: str = "cpu", source: Path = SOURCE
) -> dict[str, str]:
    """Returns this process's environment, with the package of `source` first on the path.

    JAX gets logical CPU devices, and a thread pool in which their all-reduces cannot starve each
    other; on a GPU, as much memory as it uses, so that several processes fit.
    """
    # Parameter servers ask for it; the chief may be this process.
    os.environ.setdefault("DISTRIBUTARY_TOKEN", secrets.token_hex(16))
    environ = dict(os.environ)
    inherited = environ.get("PYTHONPATH")
    environ["PYTHONPATH"] = os.pathsep.join([str(source), *([inherited] if inherited else [])])
    environ["JAX_PLATFORMS"] = {"cpu": "cpu", "gpu": "cuda,cpu"}[platform]
    environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    environ["KERAS_BACKEND"] = "jax"
    environ["JAX_NUM_CPU_DEVICES"] = str(num_devices)
    # Every replica of a dispatched step holds a thread while it waits in a collective: with fewer
    # than two threads per replica, two steps in flight can wait for each other.
    environ["PJRT_NPROC"] = str(max(os.cpu_count() or 1, 2 * num_devices))
    return environ


def foreign_environment() -> dict[str, str]:
    """Returns the environment of a process of another library, on the CPU, without our package."""
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    environ.pop("PYTHONPATH", None)
    return {**environ, "KERAS_BACKEND": "tensorflow"}


def _environs(process: Process, served: Sequence[str], platform: str) -> list[dict[str, str]]:
    """Returns the environment of every process: for workers, what their launcher would set."""
    from distributary.launch import LaunchOptions, free_addresses
    from distributary.launch._worker import Task, worker_environ

    is_ours = process.library == "jax"
    own = foreign_environment()
    if is_ours:
        own = environment(process.devices, platform, process.source)
    if not process.workers:
        return [own]
    workers = range(process.workers)
    addresses = free_addresses("127.0.0.1", process.workers)
    if is_ours:
        del own["PJRT_NPROC"]  # the launcher chooses it
        options = LaunchOptions(tuple(served), process.workers, devices_per_worker=process.devices)
        tasks = [Task("worker", worker) for worker in workers]
        return [worker_environ(own, options, task, {"worker": addresses}, 0) for task in tasks]
    if process.library == "tensorflow":
        cluster = Cluster(served, own, worker=process.workers)
        return [cluster.environ("worker", worker) for worker in workers]
    host, port = addresses[0].split(":")
    own = {"OMP_NUM_THREADS": "1", **own, "MASTER_ADDR": host, "MASTER_PORT": port}
    own |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(process.workers))
    return [{**own, "RANK": str(worker), "LOCAL_RANK": str(worker)} for worker in workers]


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
        from distributary.launch import free_addresses

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

    def kill(self, task_type: str, index: int) -> None:
        """Ends one task at once."""
        process = self.processes[task_type, index]
        process.kill()
        process.wait(_SECONDS)

    def close(self) -> None:
        """Ends all tasks."""
        for task in self.processes:
            self.kill(*task)
