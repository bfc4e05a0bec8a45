"""The command `distributary devices`: the devices here, and what strategies would use."""

import argparse
import contextlib
import json
import platform
from importlib import metadata
from typing import Any, TypeAlias

import jax

from distributary.cluster_resolver import TFConfigClusterResolver, multi_worker
from distributary.collectives import default_cross_device_ops
from distributary.errors import DistributaryError
from distributary.strategies import MirroredStrategy, OneDeviceStrategy, Strategy
from distributary.topology import (
    cpu_thread_pool_size,
    cpu_threads_suffice,
    local_devices_of,
    num_cores,
    short_name,
)

__all__ = ["add_devices_command"]

Json: TypeAlias = Any

_GIB = 2**30


def add_devices_command(commands: Any) -> None:
    """Adds the command to the subparsers of `distributary`."""
    parser = commands.add_parser(
        "devices",
        help="print the devices of this machine and which of them each strategy would use",
        description="Prints the devices that JAX finds here, and which of them each strategy would"
        " use. Starts JAX, which takes most of the memory of free GPUs for a moment.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def _run(namespace: argparse.Namespace) -> int:
    found = _found()
    print(json.dumps(found, indent=2) if namespace.json else _text(found))
    return int("error" in found["strategies"]["MultiWorkerMirroredStrategy"])


def _found() -> dict[str, Json]:
    mirrored = MirroredStrategy()  # starts JAX in the same way as a program that uses it
    devices = mirrored.extended.mesh.devices.flat
    return {
        "versions": _versions(),
        "devices": [
            _device(device) for kind in ("GPU", "TPU", "CPU") for device in local_devices_of(kind)
        ],
        "cpu": _cpu(),
        "strategies": {
            "MirroredStrategy": _strategy(mirrored),
            "OneDeviceStrategy": _strategy(OneDeviceStrategy(devices[0])),
            "MultiWorkerMirroredStrategy": _multi_worker(devices[0].platform, len(devices)),
        },
    }


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("distributary", "jax", "jaxlib"):
        with contextlib.suppress(metadata.PackageNotFoundError):  # in a checkout
            found[package] = metadata.version(package)
    return found


def _device(device: jax.Device) -> dict[str, Json]:
    memory = device.memory_stats() or {}
    return {
        "name": short_name(device),
        "kind": device.device_kind,
        "memory_bytes": memory.get("bytes_limit"),
    }


def _cpu() -> dict[str, Json]:
    num_devices = len(local_devices_of("CPU"))
    return {
        "cores": num_cores(),
        "devices": num_devices,
        "threads": cpu_thread_pool_size(),
        "threads_suffice": cpu_threads_suffice(num_devices),
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
        resolver = TFConfigClusterResolver()
        spec = resolver.cluster_spec()
        if not spec:
            return {
                "description": "TF_CONFIG does not name a cluster: the same as MirroredStrategy"
            }
        place = multi_worker(spec, resolver.task_type, resolver.task_id)
    except DistributaryError as error:
        return {"error": str(error)}
    workers = {worker.name: worker.address for worker in place.workers}
    if "ps" in spec.jobs:
        text = "the cluster has parameter servers: use ParameterServerStrategy"
        return {"task": place.name, "workers": workers, "description": text}
    if not place.in_collective_group:
        text = f"this process is {place.name}, which does not train with the workers"
        return {"task": place.name, "workers": workers, "description": text}
    reduction = default_cross_device_ops(device_platform, place.num_workers)
    return {
        "task": place.name,
        "workers": workers,
        "replicas": num_devices * place.num_workers,
        "description": f"this process is {place.name} of the {place.num_workers} workers"
        f" {', '.join(map(str, place.workers))};"
        f" {num_devices * place.num_workers} replicas if every worker has {num_devices}"
        f" {device_platform.upper()} devices;"
        f" {reduction.describe(device_platform, place.num_workers)}",
    }


def _text(found: dict[str, Json]) -> str:
    lines = [", ".join(f"{name} {version}" for name, version in found["versions"].items()), ""]
    for device in found["devices"]:
        memory = device["memory_bytes"]
        size = "" if memory is None else f", {memory / _GIB:.1f} GiB for JAX"
        lines.append(f"{device['name']:<8}{device['kind']}{size}")
    cpu = found["cpu"]
    pool = f"XLA's pool for CPU devices has {cpu['threads']} threads on {cpu['cores']} cores"
    verdict = "enough" if cpu["threads_suffice"] else "too few, see the performance guide"
    lines += ["", f"{pool}: {verdict}", ""]
    for name, use in found["strategies"].items():
        lines += [name, f"  {use.get('error') or use['description']}"]
    return "\n".join(lines)
