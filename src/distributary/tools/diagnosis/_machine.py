"""This machine and process: checks of them, and which devices each strategy would use."""

import contextlib
import importlib.util
import os
import platform
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, final

import numpy as np

from distributary._threads import num_cores
from distributary.cluster_resolver import (
    MultiWorker,
    TFConfigClusterResolver,
    is_loopback,
    place_of,
)
from distributary.devices import (
    cpu_thread_pool_size,
    cpu_threads_suffice,
    local_devices_of,
    short_name,
)
from distributary.errors import ClusterError, DistributaryError, pip_install
from distributary.job import package_versions
from distributary.launch import ALLOCATOR_SETTINGS, free_addresses
from distributary.strategies import (
    MirroredStrategy,
    OneDeviceStrategy,
    Strategy,
    accept_any_strategy,
)
from distributary.variables import default_cross_device_ops

Json: TypeAlias = Any
Status: TypeAlias = Literal["ok", "warning", "problem", "skipped"]


@final
@dataclass(frozen=True)
class Check:
    """The result of one check.

    Args:
        name: Name of the check, `"all-reduce"` for example.
        status: `"problem"` if training would fail, `"warning"` if it would be slow or surprising.
        detail: The finding.
        fix: A way to get rid of the warning or problem.
        numbers: The measurements.
    """

    name: str
    status: Status
    detail: str
    fix: str | None = None
    numbers: dict[str, Json] = field(default_factory=dict)


_GIB = 2**30
# A process with JAX takes about 0.4 GiB before it has any data.
_LITTLE_MEMORY: Final = 2**30
_NUM_PORTS = 16  # a job on one machine rarely needs more


def versions() -> Check:
    """Reports the versions of Python and of the packages that take part in training."""
    by_name = {"python": platform.python_version(), **package_versions(), "numpy": np.__version__}
    detail = ", ".join(f"{name} {version}" for name, version in by_name.items())
    fix = None
    if by_name.get("jax") != by_name.get("jaxlib"):
        fix = f"jax and jaxlib differ: pip install 'jaxlib=={by_name.get('jax')}'"
    return Check("versions", "warning" if fix else "ok", detail, fix, by_name)


def keras(environ: Mapping[str, str]) -> Check:
    """Checks that Keras, if it is installed, runs on JAX where distributary is imported first."""
    if importlib.util.find_spec("keras") is None:
        return Check("keras", "ok", "not installed; only Keras models need it")
    backend = environ.get("KERAS_BACKEND", "jax")
    if backend == "jax":
        return Check(
            "keras", "ok", "its backend is 'jax', if distributary is imported before keras"
        )
    detail = f"its backend is {backend!r} (KERAS_BACKEND), and strategies need Keras on JAX"
    fix = "export KERAS_BACKEND=jax, or unset it and import distributary before keras"
    return Check("keras", "warning", detail, fix)


def cluster(place: MultiWorker | None) -> Check:
    """Reports the cluster in TF_CONFIG."""
    if place is None:
        return Check("cluster", "ok", "no TF_CONFIG: this process trains alone")
    tasks = ", ".join(map(str, place.peers))
    return Check("cluster", "ok", f"this process is {place.name} of {tasks}")


def ports(place: MultiWorker | None) -> Check:
    """Checks that this machine has free ports for the tasks of a job."""
    try:
        free = free_addresses("127.0.0.1", _NUM_PORTS)
    except ClusterError as error:
        fix = "End the programs that listen there: `ss -ltnp`"
        return Check("ports", "problem", str(error), fix)
    detail = f"{free[0].rpartition(':')[2]} and others are free for local jobs"
    if place is not None and place.address is not None:
        detail = f"{place.address} is for this process; {detail}"
    return Check("ports", "ok", detail)


def host_name(place: MultiWorker | None) -> Check:
    """Checks that other hosts could reach this one at the address of its own name.

    gloo, which all-reduces between CPUs of several processes, listens there, regardless of the
    cluster.
    """
    name, gloo = socket.gethostname(), "gloo, which all-reduces between CPUs of several processes,"
    try:
        address = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        detail = f"{name} has no address: {error.strerror}; {gloo} needs one"
        fix = f"Add a line with this machine's address and {name} to /etc/hosts"
        return Check("host name", "problem" if _has_other_hosts(place) else "warning", detail, fix)
    if is_loopback(str(address)) and _has_other_hosts(place):
        detail = f"{name} is {address}, which other machines cannot reach; {gloo} listens there"
        fix = f"Give {name} in /etc/hosts the address at which the other hosts reach this one"
        return Check("host name", "problem", detail, fix)
    return Check("host name", "ok", f"{name} is {address}")


def _has_other_hosts(place: MultiWorker | None) -> bool:
    if place is None:
        return False
    hosts = {peer.host for peer in place.peers if peer.name == place.name}
    return any(peer.host not in hosts and not is_loopback(peer.host) for peer in place.peers)


def memory() -> Check:
    """Checks the memory that is left for this process."""
    total, available = _memory()
    if total is None or available is None:
        return Check("memory", "skipped", "this system does not say how much is free")
    detail = f"{available / _GIB:.1f} of {total / _GIB:.1f} GiB are free"
    numbers = {"total_bytes": total, "available_bytes": available}
    if available >= _LITTLE_MEMORY:
        return Check("memory", "ok", detail, numbers=numbers)
    fix = (
        "End other programs, or give the container more memory: a process takes 0.4 GiB before it"
        " has any data"
    )
    return Check("memory", "warning", detail, fix, numbers)


def _memory() -> tuple[int | None, int | None]:
    """Returns total and free bytes of the machine, or of the container if that has less."""
    total = available = None
    with contextlib.suppress(OSError, ValueError, KeyError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        sizes = {
            name: int(rest.split()[0]) * 1024 for name, _, rest in (x.partition(":") for x in lines)
        }
        total, available = sizes["MemTotal"], sizes["MemAvailable"]
    with contextlib.suppress(OSError, ValueError):  # "max" without a limit
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii"))
        used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii"))
        if total is None or limit < total:
            total, available = limit, min(available or limit, max(0, limit - used))
    return total, available


def allocator(environ: Mapping[str, str]) -> Check:
    """Checks that glibc keeps the memory that XLA's CPU programs free after every step."""
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return Check("allocator", "skipped", "only glibc has these settings")
    if local_devices_of("GPU") or local_devices_of("TPU"):
        return Check("allocator", "skipped", "it matters only for CPU devices")
    missing = {name: text for name, text in ALLOCATOR_SETTINGS.items() if name not in environ}
    if not missing:
        return Check("allocator", "ok", "glibc keeps freed memory for the next step")
    settings = " ".join(f"{name}={value}" for name, value in missing.items())
    detail = "glibc returns the memory that a step frees, so every step has to request it again"
    fix = f"Start with `distributary launch`, or export {settings}"
    return Check("allocator", "warning", detail, fix)


def devices(num_wanted: int) -> Check:
    """Reports the devices of JAX.

    Args:
        num_wanted: Number of CPU devices that this process has without those made for the checks.
    """
    numbers = described_devices()
    texts = []
    for one in numbers:
        if one["kind"] != "cpu":
            size = one["memory_bytes"]
            memory = "" if size is None else f" ({size / _GIB:.0f} GiB for JAX)"
            texts.append(f"{one['name']} {one['kind']}{memory}")
    unused = None if texts else _unused_accelerator()
    num_cpus = len(local_devices_of("CPU"))
    extra = f", {num_cpus} for the checks below" if num_cpus != num_wanted else ""
    detail = ", ".join([*texts, f"{num_wanted} CPU on {num_cores()} cores{extra}"])
    if unused is None:
        return Check("devices", "ok", detail, numbers={"devices": numbers})
    problem, fix = unused
    return Check("devices", "warning", f"{detail}; {problem}", fix, {"devices": numbers})


def described_devices() -> list[dict[str, Json]]:
    """Returns name, kind and memory of every device of this process."""
    return [
        {
            "name": short_name(device),
            "kind": device.device_kind,
            "memory_bytes": (device.memory_stats() or {}).get("bytes_limit"),
        }
        for kind in ("GPU", "TPU", "CPU")
        for device in local_devices_of(kind)
    ]


def _unused_accelerator() -> tuple[str, str] | None:
    """Returns an accelerator that JAX does not use, and the fix; None if there is none."""
    if Path("/proc/driver/nvidia/version").exists() and any(Path("/dev").glob("nvidia[0-9]*")):
        what, extra = "this machine has an NVIDIA GPU", "cuda"
    elif any(Path("/dev").glob("accel[0-9]*")):
        what, extra = "this machine has a TPU", "tpu"
    else:
        return None
    fix = pip_install(extra)
    if platforms := os.environ.get("JAX_PLATFORMS"):
        fix = f"Unset JAX_PLATFORMS, which is {platforms!r}"
    return f"{what}, but JAX does not use it", fix


def thread_pool() -> Check:
    """Checks that XLA's CPU devices cannot wait for each other forever."""
    num_devices, size = len(local_devices_of("CPU")), cpu_thread_pool_size()
    detail = f"XLA has {size} threads on {num_cores()} cores for {num_devices} CPU devices"
    if cpu_threads_suffice(num_devices):
        return Check("thread pool", "ok", detail)
    detail += "; with so few, devices can wait for each other forever"
    return Check("thread pool", "problem", detail, f"export PJRT_NPROC={2 * num_devices}")


# What the command `distributary devices` finds.


def find_devices() -> dict[str, Json]:
    """Returns versions, devices and strategies; starts JAX."""
    accept_any_strategy()
    mirrored = MirroredStrategy()  # starts JAX in the same way as a program that uses it
    devices = mirrored.extended.mesh.devices.flat
    num_cpu_devices = len(local_devices_of("CPU"))
    return {
        "versions": {"python": platform.python_version(), **package_versions()},
        "devices": described_devices(),
        "cpu": {
            "cores": num_cores(),
            "devices": num_cpu_devices,
            "threads": cpu_thread_pool_size(),
            "threads_suffice": cpu_threads_suffice(num_cpu_devices),
        },
        "strategies": {
            "MirroredStrategy": _strategy(mirrored),
            "OneDeviceStrategy": _strategy(OneDeviceStrategy(devices[0])),
            "MultiWorkerMirroredStrategy": _multi_worker(devices[0].platform, len(devices)),
        },
    }


def _strategy(strategy: Strategy) -> dict[str, Json]:
    return {
        "replicas": strategy.num_replicas_in_sync,
        "devices": [name.rpartition("device:")[2] for name in strategy.extended.worker_devices],
        "description": strategy.extended.describe(),
    }


def _multi_worker(device_platform: str, num_devices: int) -> dict[str, Json]:
    """Describes the cluster of TF_CONFIG without connecting to it."""
    try:
        place = place_of(TFConfigClusterResolver())
    except DistributaryError as error:
        return {"error": str(error)}
    if place is None:
        return {"description": "TF_CONFIG does not name a cluster: the same as MirroredStrategy"}
    workers = {worker.name: worker.address for worker in place.workers}
    facts: dict[str, Json] = {"task": place.name, "workers": workers}
    if "ps" in place.cluster_spec.jobs:
        text = "the cluster has parameter servers: use ParameterServerStrategy"
    elif not place.in_collective_group:
        text = f"this process is {place.name}, which does not train with the workers"
    else:
        reduction = default_cross_device_ops(device_platform, place.num_workers)
        facts["replicas"] = num_devices * place.num_workers
        text = (
            f"this process is {place.name} of the {place.num_workers} workers"
            f" {', '.join(map(str, place.workers))}; {facts['replicas']} replicas if every worker"
            f" has {num_devices} {device_platform.upper()} devices;"
            f" {reduction.describe(device_platform, place.num_workers)}"
        )
    return {**facts, "description": text}


def devices_as_text(facts: dict[str, Json]) -> str:
    """Returns what `find_devices` has found, for people."""
    lines = [", ".join(f"{name} {version}" for name, version in facts["versions"].items()), ""]
    for device in facts["devices"]:
        memory = device["memory_bytes"]
        size = "" if memory is None else f", {memory / _GIB:.1f} GiB for JAX"
        lines.append(f"{device['name']:<8}{device['kind']}{size}")
    cpu = facts["cpu"]
    pool = f"XLA's pool for CPU devices has {cpu['threads']} threads on {cpu['cores']} cores"
    verdict = "enough" if cpu["threads_suffice"] else "too few, see the performance guide"
    lines += ["", f"{pool}: {verdict}", ""]
    for name, use in facts["strategies"].items():
        lines += [name, f"  {use.get('error') or use['description']}"]
    return "\n".join(lines)
