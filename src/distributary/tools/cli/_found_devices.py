"""Finds the devices of this machine, and which of them each strategy would use."""

import platform

from distributary._threads import num_cores
from distributary.cluster_resolver import TFConfigClusterResolver, place_of
from distributary.devices import cpu_thread_pool_size, cpu_threads_suffice, local_devices_of
from distributary.errors import DistributaryError
from distributary.job import package_versions
from distributary.strategies import (
    MirroredStrategy,
    OneDeviceStrategy,
    Strategy,
    accept_any_strategy,
)
from distributary.tools.diagnosis import Json, described_devices
from distributary.variables import default_cross_device_ops

_GIB = 2**30


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


def as_text(facts: dict[str, Json]) -> str:
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
