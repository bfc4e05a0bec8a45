"""What do strategies cost on NVIDIA GPUs, and what do they hide?

Sections, each of which measures its peers in turns:

    step      A step of `strategy.run` on one device, next to the same step written by hand in JAX.
    fit       A step of Keras' `fit` under `MirroredStrategy` on one device, next to Keras' own JAX
              fit and to a loop written by hand.
    prefetch  A step whose batches take 80 % of its time to load: read ahead, and not.
    packs     A step with 64 MB of gradients on all devices: in one all-reduce, and in packs that
              are sent while the backward pass goes on (`CommunicationOptions.bytes_per_pack`).
              Needs two devices.
    workers   A step and an all-reduce of two processes, on a GPU each. With one GPU they share it,
              which needs NCCL 2.30 or newer; if it refuses, the problem that is told has its words.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --platform cpu --quick --output FOLDER    # without a GPU
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import _cases
from _cases import TWO_WORKERS, Benchmark, served, step
from _harness import Case, Settings, pair
from _processes import Process, environment

__all__ = ["BENCHMARK", "NVIDIA_DRIVER", "versions"]

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
STEPPED = ("mlp32", "mlp256", "transformer32", "wide256")
FITTED = ("mlp32", "mlp256", "transformer32", "cnn64")
STEP_BAR = 1.05

_NUM_CPU_DEVICES = 2
_PACKAGES = ("jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-nccl-cu13", "nvidia-nccl-cu12")
# Two NCCL ranks on one GPU: allowed, without multicast, and with room for each other's kernels.
_SHARED_GPU = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "1",
}


def _yield_cases(settings: Settings) -> Iterator[Case]:
    """Yields the sections, for the devices that there are."""
    is_gpu = settings.platform == "gpu"
    count = len(_devices(settings.platform))
    for workload in STEPPED:
        yield replace(step(workload, 1, STEP_BAR), section="step")
    for workload in FITTED:
        yield _cases.fit(
            workload,
            1,
            {
                "keras": "keras",
                "distributary": "fit",
                "handwritten": "fit_handwritten",
                "control": "fit_handwritten",
            },
        )
    # As much arithmetic as takes longer than bringing the batch to the device.
    size = (1024, 4096, 32) if is_gpu else (128, 1024, 4)
    yield replace(_cases.overlap(1, size), section="prefetch")
    if count > 1:
        yield _packs(count)
    variables = _of_workers(count) if is_gpu else ()
    arguments = {"workload": "mlp32"}
    process = Process("_jax_peers", _cases.STEPS, arguments, workers=2, variables=variables)
    alike = step("mlp32", 1, STEP_BAR)
    yield replace(alike, replicas=TWO_WORKERS, peers=served(process), section="workers")
    for num_bytes in _cases.ALL_REDUCE_BYTES:
        case = _cases.all_reduce(num_bytes)
        process = replace(case.peers["psum"].process, variables=variables)
        yield replace(case, peers=served(process, num_checked=2), section="workers")


def _of_workers(count: int) -> Sequence[Mapping[str, str]]:
    """Returns the environment of two workers: a GPU each, or both the only one."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    shared = _SHARED_GPU if count < 2 else {}
    return [{"CUDA_VISIBLE_DEVICES": visible[worker % count], **shared} for worker in range(2)]


def _packs(count: int) -> Case:
    arguments = {"workload": "deep256", "num_replicas": count}
    process = Process("_jax_peers", ("distributary", "packs"), arguments, devices=count)
    return Case(
        "gradients in packs",
        str(count),
        served(process),
        [pair("packs", "distributary")],
        section="packs",
    )


def versions() -> dict[str, str]:
    """Returns the devices of JAX, and what drives them."""
    found = {"devices": ", ".join(_devices("gpu"))}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        driver = subprocess.run(command, capture_output=True, text=True, check=True)
        found["NVIDIA driver"] = driver.stdout.splitlines()[0]
    return found


def _devices(platform: str) -> list[str]:
    """Returns the kind of every device, as a process of its own sees them."""
    if platform == "gpu" and not NVIDIA_DRIVER.exists():
        raise SystemExit(
            "gpu.py: there is no NVIDIA driver here. On a machine with an NVIDIA GPU, install"
            " jax[cuda13]; --platform cpu runs the same paths on logical CPU devices."
        )
    question = f"import jax; print(*(d.device_kind for d in jax.devices('{platform}')), sep='\\n')"
    environ = environment(_NUM_CPU_DEVICES, platform)
    command = [sys.executable, "-c", question]
    answer = subprocess.run(command, env=environ, capture_output=True, text=True)
    if answer.returncode:
        raise SystemExit(f"gpu.py: JAX finds no device:\n{answer.stderr[-2000:]}")
    return answer.stdout.splitlines()


BENCHMARK: Benchmark = Benchmark(_yield_cases, (15, 3), platform="gpu")


if __name__ == "__main__":
    import run

    sys.exit(run.main(["gpu", *sys.argv[1:]]))
