"""What the launcher sets in the environment of a worker, and what nobody reads there."""

import difflib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

from distributary._threads import SHARE_VARIABLE, num_cores, threads_needed
from distributary.cluster_resolver import TOKEN_VARIABLE
from distributary.launch._options import LaunchOptions

RESTART_VARIABLE: Final = "DISTRIBUTARY_RESTART"

# glibc gives large freed blocks back to the system, so XLA's temporary buffers cause page faults
# again in every step. With these settings, a transformer step takes 0.76x and a 40 MB all-reduce
# over gloo 0.54x the time.
ALLOCATOR_SETTINGS: Final = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "2147483647",
    "MALLOC_TOP_PAD_": "67108864",
}
_THREAD_VARIABLES = ("PJRT_NPROC", "NPROC")
_SETTINGS = "CERTS CONNECT_SECONDS CPU_REWRITES METRICS_PORT NPROC RESTART STATUS_FD TOKEN"
_VARIABLES = [f"DISTRIBUTARY_{name}" for name in _SETTINGS.split()]


@final
@dataclass(frozen=True)
class Task:
    """A task of the job: its type, and its number among the tasks of that type."""

    task_type: str
    task_id: int

    def __str__(self) -> str:
        return f"{self.task_type} {self.task_id}"


def worker_environ(
    environ: Mapping[str, str],
    options: LaunchOptions,
    task: Task,
    cluster: Mapping[str, Sequence[str]],
    num_restarts: int,
    token: str | None = None,
) -> dict[str, str]:
    """Returns the environment of one worker, without its descriptor for `report`.

    Sets `TF_CONFIG`, `DISTRIBUTARY_RESTART` and, with `devices_per_worker`, `JAX_NUM_CPU_DEVICES`.
    Variables that the user has not set are added:
    `PYTHONUNBUFFERED=1`, so that output appears as soon as it is written, and
    `GRPC_VERBOSITY=ERROR` in jobs with servers. With `tune`, also the allocator settings of glibc,
    and the size of XLA's thread pool: the worker's share of the cores, or more if its devices need
    more. Removes the token of the hosts; in a job with servers, chief, workers and servers get
    another one.

    Args:
        environ: Environment of the launcher.
        options: The job.
        task: The task that the worker is.
        cluster: Addresses of the job's tasks by type, in the order of their numbers.
        num_restarts: Number of times that the job, or one of its tasks, was started again.
        token: Secret that the tasks of a job with servers share; None without servers.
    """
    result = dict(environ)
    result.pop(TOKEN_VARIABLE, None)
    if token is not None and task.task_type in cluster:  # an evaluator gets none
        result[TOKEN_VARIABLE] = token
    result["TF_CONFIG"] = json.dumps(
        {
            "cluster": {task_type: list(addresses) for task_type, addresses in cluster.items()},
            "task": {"type": task.task_type, "index": task.task_id},
        }
    )
    result[RESTART_VARIABLE] = str(num_restarts)
    result.setdefault("PYTHONUNBUFFERED", "1")
    if options.num_servers:
        # Otherwise gRPC logs that the servers have ended when the job ends.
        result.setdefault("GRPC_VERBOSITY", "ERROR")
    if options.devices_per_worker is not None:
        result["JAX_NUM_CPU_DEVICES"] = str(options.devices_per_worker)
    if options.tune:
        if sys.platform == "linux":
            for name, value in ALLOCATOR_SETTINGS.items():
                result.setdefault(name, value)
        # More threads than its share would only take cores from other workers.
        share = num_cores() // options.num_workers
        num_threads = max(1, share, threads_needed(options.devices_per_worker or 1))
        if num_threads != num_cores() and not any(v in environ for v in _THREAD_VARIABLES):
            result[_THREAD_VARIABLES[0]] = result[SHARE_VARIABLE] = str(num_threads)
    return result


def replaced_settings(environ: Mapping[str, str], options: LaunchOptions) -> list[str]:
    """Returns one sentence for each setting of the user that workers get differently."""
    sentences = []
    if "TF_CONFIG" in environ:
        sentences.append("TF_CONFIG is set here; workers get one of their own instead.")
    devices = options.devices_per_worker
    if devices is not None:
        value = environ.get("JAX_NUM_CPU_DEVICES", str(devices))
        if value != str(devices):
            sentences.append(
                f"JAX_NUM_CPU_DEVICES={value} is set here; workers get {devices} instead, from"
                " --devices-per-worker."
            )
        if "xla_force_host_platform_device_count" in environ.get("XLA_FLAGS", ""):
            sentences.append(
                "XLA_FLAGS sets xla_force_host_platform_device_count, and --devices-per-worker sets"
                f" JAX_NUM_CPU_DEVICES={devices}. Remove one of the two."
            )
    return sentences


def misspelled(environ: Mapping[str, str] | None = None) -> Iterator[str]:
    """Yields what to say of variables with names that are almost those of distributary.

    Args:
        environ: Environment to read; `os.environ` by default.
    """
    for name in os.environ if environ is None else environ:
        close = difflib.get_close_matches(name, _VARIABLES, 1, 0.92)
        if name.startswith("DISTRIBUTARY_") and close and name != close[0]:
            yield f"distributary does not read {name} of the environment. Did you mean {close[0]}?"
