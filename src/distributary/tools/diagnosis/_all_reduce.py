"""Measures how long all-reduces take, and compares with the speed of the hardware."""

import statistics
import time
from collections.abc import Sequence
from typing import Final

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from distributary.devices import REPLICA_AXIS, local_replicas, put_stacked
from distributary.engine import format_bytes
from distributary.tools.diagnosis._machine import Check, Json

_REPEATS: Final = {4: 40, 1 << 16: 40, 1 << 20: 20, 1 << 24: 6}  # by size in bytes
# Half of what is possible is normal. A twentieth means a wrong network, or a machine that cannot
# keep up.
_LOW_SHARE = 0.05

_COPY_BYTES = 1 << 26
_COPY_REPEATS = 5

# Bytes per second that one GPU of each model sends over NVLink.
_NVLINK: Final = {
    "NVIDIA A100-SXM4-40GB": 300e9,
    "NVIDIA A100-SXM4-80GB": 300e9,
    "NVIDIA H100 80GB HBM3": 450e9,
    "NVIDIA H200": 450e9,
}


def all_reduce(mesh: Mesh, network_bytes_per_second: float | None) -> Check:
    """All-reduces arrays of several sizes over all replicas, and compares with the hardware.

    All processes of the mesh must call it.

    Args:
        mesh: The replicas.
        network_bytes_per_second: Rate of the slowest link between processes; None if there is only
            one process.
    """
    if mesh.size == 1:
        return Check("all-reduce", "skipped", "there is only one replica")
    bound, basis = _bound(mesh, network_bytes_per_second)
    rows: list[dict[str, Json]] = []
    for size, repeats in _REPEATS.items():
        seconds, right = _timed(mesh, [size], repeats)
        if not right:
            detail = f"the sum of {format_bytes(size)} over {mesh.size} replicas is wrong"
            fix = (
                "Compare the versions of jax, the driver and NCCL with those that JAX supports;"
                " check the memory of the devices"
            )
            return Check("all-reduce", "problem", detail, fix)
        median = statistics.median(seconds)
        rows.append({"bytes": size, "seconds": median, "bytes_per_second": size / median})
    largest = rows[-1]
    share = None if bound is None else bound * largest["bytes_per_second"]
    times = ", ".join(f"{format_bytes(r['bytes'])} {_format_seconds(r['seconds'])}" for r in rows)
    speed = basis
    if share is not None:
        speed = (
            f"the largest takes {1 / share:.1f} times as long as {basis} (expected: below"
            f" {1 / _LOW_SHARE:.0f} times)"
        )
    detail = f"{mesh.size} replicas: {times}; {speed}"
    numbers = {"replicas": mesh.size, "sizes": rows, "share_of_hardware": share, "hardware": basis}
    if share is not None and share < _LOW_SHARE:
        fix = _fix_of_slow(mesh, between_processes=network_bytes_per_second is not None)
        return Check("all-reduce", "warning", detail, fix, numbers)
    return Check("all-reduce", "ok", detail, numbers=numbers)


def all_reduce_seconds(mesh: Mesh, sizes: Sequence[int], repeats: int) -> float:
    """Returns the median seconds of all-reduces of these sizes, in sequence in one program.

    Args:
        mesh: The replicas.
        sizes: Bytes of each array.
        repeats: Number of measurements.
    """
    return statistics.median(_timed(mesh, sizes, repeats)[0])


def copy_bytes_per_second() -> float:
    """Returns how fast one thread copies memory."""
    source = np.ones(_COPY_BYTES, np.uint8)
    target = np.zeros_like(source)
    seconds = []
    for _ in range(_COPY_REPEATS):
        start = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - start)
    return _COPY_BYTES / min(seconds)


def _timed(mesh: Mesh, sizes: Sequence[int], repeats: int) -> tuple[list[float], bool]:
    """Returns the seconds of every repetition, and whether the sums are right."""
    replicas = NamedSharding(mesh, P(REPLICA_AXIS))
    values = np.array(local_replicas(replicas), np.float32) + 1
    arrays = [
        put_stacked(np.repeat(values[:, None], max(1, size // 4), axis=1), replicas)
        for size in sizes
    ]

    def reduce(rows: list[jax.Array]) -> list[jax.Array]:
        return [jax.lax.psum(row, REPLICA_AXIS) for row in rows]

    call = jax.jit(
        jax.shard_map(reduce, mesh=mesh, in_specs=P(REPLICA_AXIS), out_specs=P(REPLICA_AXIS))
    )
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        sums = jax.block_until_ready(call(arrays))
        seconds.append(time.perf_counter() - start)
    expected = mesh.size * (mesh.size + 1) / 2
    right = all(
        bool((np.asarray(shard.data) == expected).all())
        for total in sums
        for shard in total.addressable_shards
    )
    return seconds[1:], right  # without the first run, which compiles


def _bound(mesh: Mesh, network_bytes_per_second: float | None) -> tuple[float | None, str]:
    """Returns the fewest seconds per byte that the hardware needs, and the reason."""
    device = mesh.devices.flat[0]
    if network_bytes_per_second is not None:
        num_processes = len({d.process_index for d in mesh.devices.flat})
        ring = 2 * (num_processes - 1) / num_processes
        rate = f"{network_bytes_per_second / 1e9:.2f} GB/s"
        return ring / network_bytes_per_second, f"a ring over the slowest link, {rate}"
    if device.platform == "cpu":
        rate_of_copy = copy_bytes_per_second()
        return mesh.size / rate_of_copy, f"copying the arrays at {rate_of_copy / 1e9:.1f} GB/s"
    if device.device_kind in _NVLINK:
        rate_of_link = _NVLINK[device.device_kind]
        ring = 2 * (mesh.size - 1) / mesh.size
        return ring / rate_of_link, f"a ring over NVLink, {rate_of_link / 1e9:.0f} GB/s"
    return None, f"the expected speed of {device.device_kind} is not known"


def _fix_of_slow(mesh: Mesh, *, between_processes: bool) -> str:
    if between_processes:
        return (
            "Look for other programs with `top` on every host; on GPUs, NCCL_DEBUG=INFO shows which"
            " network NCCL uses"
        )
    if mesh.devices.flat[0].platform == "cpu":
        return "Look for other programs with `top`, and use a machine that is not busy"
    return "Run `nvidia-smi topo -m` to see how the GPUs are connected, and set NCCL_DEBUG=INFO"


def _format_seconds(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"
