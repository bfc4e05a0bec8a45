"""Checks of this machine and process."""

import contextlib
import importlib.metadata
import importlib.util
import ipaddress
import json
import os
import platform
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from distributary.cluster_resolver import MultiWorker
from distributary.diagnosis._check import Check
from distributary.errors import ClusterError
from distributary.launch import ALLOCATOR_SETTINGS, free_addresses
from distributary.topology import (
    cpu_thread_pool_size,
    cpu_threads_suffice,
    local_devices_of,
    num_cores,
    short_name,
)

__all__ = [
    "allocator",
    "cluster",
    "devices",
    "host_name",
    "keras",
    "memory",
    "ports",
    "thread_pool",
    "versions",
]

_PACKAGES = ("distributary", "jax", "jaxlib", "numpy", "keras")
_GIB = 2**30
# A process with JAX takes about 0.4 GiB before it has any data.
_LITTLE_MEMORY: Final = 2**30
_NUM_PORTS = 16  # a job on one machine rarely needs more


def versions() -> Check:
    """Reports the versions of Python and of the packages that take part in training."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    detail = ", ".join(f"{name} {version}" for name, version in found.items())
    if found.get("jax") != found.get("jaxlib"):
        return Check(
            "versions",
            "warning",
            detail,
            f"jax and jaxlib differ: pip install 'jaxlib=={found.get('jax')}'",
            found,
        )
    return Check("versions", "ok", detail, numbers=found)


def keras(environ: Mapping[str, str]) -> Check:
    """Checks that Keras, if it is installed, would run on JAX."""
    if importlib.util.find_spec("keras") is None:
        return Check("keras", "ok", "not installed; only Keras models need it")
    home = Path(environ.get("KERAS_HOME", "~/.keras")).expanduser() / "keras.json"
    backend, origin = "tensorflow", "the default"
    with contextlib.suppress(OSError, ValueError, KeyError):
        backend, origin = json.loads(home.read_text(encoding="utf-8"))["backend"], str(home)
    if "KERAS_BACKEND" in environ:
        backend, origin = environ["KERAS_BACKEND"], "KERAS_BACKEND"
    detail = f"its backend is {backend!r} ({origin})"
    if backend == "jax":
        return Check("keras", "ok", detail)
    return Check(
        "keras",
        "warning",
        f"{detail}, but strategies distribute Keras models only on JAX",
        "export KERAS_BACKEND=jax, or set it in os.environ before keras is imported",
    )


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
        return Check(
            "ports", "problem", str(error), "End the programs that listen there: `ss -ltnp`"
        )
    sentence = f"{free[0].rpartition(':')[2]} and others are free for local jobs"
    own = None if place is None else place.address
    return Check(
        "ports", "ok", sentence if own is None else f"{own} is for this process; {sentence}"
    )


def host_name(place: MultiWorker | None) -> Check:
    """Checks that other hosts could reach this one at the address of its own name.

    gloo, which all-reduces between CPUs of several processes, listens there, regardless of the
    cluster.
    """
    name = socket.gethostname()
    try:
        address = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        return Check(
            "host name",
            "problem" if _has_other_hosts(place) else "warning",
            f"{name} has no address: {error.strerror}; gloo, which all-reduces between CPUs"
            " of several processes, needs one",
            f"Add a line with this machine's address and {name} to /etc/hosts",
        )
    if _is_loopback(str(address)) and _has_other_hosts(place):
        return Check(
            "host name",
            "problem",
            f"{name} is {address}, which other machines cannot reach; gloo, which all-reduces"
            " between CPUs of several processes, listens there",
            f"Give {name} in /etc/hosts the address at which the other hosts reach this one",
        )
    return Check("host name", "ok", f"{name} is {address}")


def _has_other_hosts(place: MultiWorker | None) -> bool:
    if place is None:
        return False
    own = {peer.host for peer in place.peers if peer.name == place.name}
    return any(peer.host not in own and not _is_loopback(peer.host) for peer in place.peers)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def memory() -> Check:
    """Checks the memory that is left for this process."""
    total, available = _memory()
    if total is None or available is None:
        return Check("memory", "skipped", "this system does not say how much is free")
    detail = f"{available / _GIB:.1f} of {total / _GIB:.1f} GiB are free"
    numbers = {"total_bytes": total, "available_bytes": available}
    if available < _LITTLE_MEMORY:
        return Check(
            "memory",
            "warning",
            detail,
            "End other programs, or give the container more memory: a process takes 0.4 GiB"
            " before it has any data",
            numbers,
        )
    return Check("memory", "ok", detail, numbers=numbers)


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
    return Check(
        "allocator",
        "warning",
        "glibc returns the memory that a step frees to the system, so every step has to request it"
        " again",
        "Start with `distributary launch`, or export "
        + " ".join(f"{name}={value}" for name, value in missing.items()),
    )


def devices(num_wanted: int) -> Check:
    """Reports the devices of JAX.

    Args:
        num_wanted: Number of CPU devices that this process has without those made for the checks.
    """
    found = [device for kind in ("GPU", "TPU", "CPU") for device in local_devices_of(kind)]
    numbers = [
        {
            "name": short_name(device),
            "kind": device.device_kind,
            "memory_bytes": (device.memory_stats() or {}).get("bytes_limit"),
        }
        for device in found
    ]
    texts = [
        f"{one['name']} {one['kind']}"
        + (
            ""
            if one["memory_bytes"] is None
            else f" ({one['memory_bytes'] / _GIB:.0f} GiB for JAX)"
        )
        for one in numbers
        if one["kind"] != "cpu"
    ]
    num_cpus = len(local_devices_of("CPU"))
    made = f", {num_cpus} for the checks below" if num_cpus != num_wanted else ""
    texts.append(f"{num_wanted} CPU on {num_cores()} cores{made}")
    unused = None if len(texts) > 1 else _unused_accelerator()
    return Check(
        "devices",
        "ok" if unused is None else "warning",
        ", ".join(texts) + ("" if unused is None else f"; {unused[0]}"),
        None if unused is None else unused[1],
        {"devices": numbers},
    )


def _unused_accelerator() -> tuple[str, str] | None:
    """Returns an accelerator that JAX does not use, and the fix; None if there is none."""
    if Path("/proc/driver/nvidia/version").exists() and any(Path("/dev").glob("nvidia[0-9]*")):
        what, extra = "this machine has an NVIDIA GPU", "cuda"
    elif any(Path("/dev").glob("accel[0-9]*")):
        what, extra = "this machine has a TPU", "tpu"
    else:
        return None
    platforms = os.environ.get("JAX_PLATFORMS")
    fix = (
        f"Unset JAX_PLATFORMS, which is {platforms!r}"
        if platforms
        else f"pip install 'distributary[{extra}]'"
    )
    return f"{what}, but JAX does not use it", fix


def thread_pool() -> Check:
    """Checks that XLA's CPU devices cannot wait for each other forever."""
    num_devices, size = len(local_devices_of("CPU")), cpu_thread_pool_size()
    detail = f"XLA has {size} threads on {num_cores()} cores for {num_devices} CPU devices"
    if cpu_threads_suffice(num_devices):
        return Check("thread pool", "ok", detail)
    return Check(
        "thread pool",
        "problem",
        f"{detail}; with so few, devices can wait for each other forever",
        f"export PJRT_NPROC={2 * num_devices}",
    )
