"""What do strategies cost on NVIDIA GPUs, and what do they hide?

Sections, see `--sections`; each measures its peers in turns:

    step      A step of `strategy.run` on one device, next to the same step written by hand in JAX.
    fit       A step of Keras' `fit` under `MirroredStrategy` on one device, next to Keras' own JAX
              fit and to a loop written by hand.
    prefetch  A step whose batches take 80 % of its time to load: read ahead, and not.
    packs     A step with 64 MB of gradients on all devices: in one all-reduce, and in packs that
              are sent while the backward pass goes on (`CommunicationOptions.bytes_per_pack`).
              Needs two devices.
    workers   A step and an all-reduce of two processes, on a GPU each. With one GPU they share it,
              which needs NCCL 2.30 or newer; if it refuses, the report says so.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --platform cpu --quick     # the same paths on logical CPU devices
"""

import contextlib
import os
import subprocess
from argparse import Namespace
from collections.abc import Iterator
from importlib import metadata

import _clusters
import _harness
import fit_time
import step_time
from _harness import NVIDIA_DRIVER, Request, Row, pair
from _peers import Peer, stepping

SECTIONS = ("step", "fit", "prefetch", "packs", "workers")
STEPPED = ("mlp32", "mlp256", "transformer32", "wide256")
FITTED = ("mlp32", "mlp256", "transformer32", "cnn64")
NUM_WORKERS = 2
ALL_REDUCE_BYTES = (4, 1_000_000, 40_000_000)
STEP_BAR = 1.05
PEERS = {
    "step": ("handwritten", "distributary", "control"),
    "fit": ("keras", "distributary", "handwritten", "control"),
}

_NUM_CPU_DEVICES = 2
_PACKAGES = ("jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-nccl-cu13", "nvidia-nccl-cu12")
# Two NCCL ranks on one GPU: allowed, without multicast, and with room for each other's kernels.
_SHARED_GPU = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "1",
}


def requests(arguments: Namespace) -> Iterator[Request]:
    """Yields the devices that there are, then the sections, two of them for every workload."""
    if arguments.platform == "gpu" and not NVIDIA_DRIVER.exists():
        raise SystemExit(
            "gpu.py: there is no NVIDIA driver here. On a machine with an NVIDIA GPU, install"
            " jax[cuda13]; --platform cpu runs the same paths on logical CPU devices."
        )
    common = {"devices": _NUM_CPU_DEVICES, "replicas": 1}
    yield {**common, "section": "devices"}
    for section in arguments.sections:
        for workload in {"step": STEPPED, "fit": FITTED}.get(section, ("",)):
            if not workload or workload in arguments.only:
                peers = PEERS.get(section, ())
                yield {**common, "section": section, "workload": workload, "peers": peers}


def measure(request: Request) -> list[Row]:
    """Measures one section, or one workload of it."""
    import jax

    devices = jax.devices(request["platform"])
    section = request["section"]
    if section == "devices":
        found = f"{len(devices)} x {devices[0].device_kind}, {', '.join(_versions())}"
        return [_harness.row(found, len(devices), "", {})]
    if section == "step":
        return step_time.measure({**request, "bar": STEP_BAR})
    if section == "fit":
        return [fit_time.measure_step(request)]
    if section == "prefetch":
        return [_measure_prefetch(request)]
    if section == "packs":
        return [_measure_packs(request, len(devices))]
    return list(_measure_workers(request, len(devices)))


def _versions() -> Iterator[str]:
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            yield f"{package} {metadata.version(package)}"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        driver = subprocess.run(command, capture_output=True, text=True, check=True)
        yield f"NVIDIA driver {driver.stdout.splitlines()[0]}"


def _measure_prefetch(request: Request) -> Row:
    import _distributary
    import _overlap

    # As much arithmetic as takes longer than bringing the batch to the device.
    size = (1024, 4096, 32) if request["platform"] == "gpu" else (128, 1024, 4)
    return _overlap.measure(request, _distributary.mirrored(1), size)


def _measure_packs(request: Request, num_devices: int) -> Row:
    import _distributary
    import jax
    import jax.numpy as jnp
    import numpy as np

    import distributary as dist

    what = "gradients in packs"
    if num_devices < 2:
        return _harness.row(f"{what}: needs two devices, and there is one", 1, "", {})
    width, layers = (1024, 16) if request["platform"] == "gpu" else (256, 8)
    strategy = _distributary.mirrored(num_devices)
    rows = np.random.default_rng(0).standard_normal((num_devices, 4 * width, width), np.float32)
    x = _distributary.on_every_replica(strategy, rows)

    def peer(name: str, bytes_per_pack: int) -> Peer:
        options = dist.experimental.CommunicationOptions(bytes_per_pack=bytes_per_pack)
        with strategy.scope():
            weights = [dist.Variable(0.5 * np.eye(width, dtype=np.float32)) for _ in range(layers)]

        def step(x: jax.Array) -> jax.Array:
            def loss_of() -> jax.Array:
                y = x
                for w in weights:
                    y = jnp.tanh(y @ w)
                return jnp.mean((y - 0.1) ** 2)

            loss, gradients = dist.value_and_grad(loss_of, weights)()
            context = dist.get_replica_context()
            loss, gradients = context.all_reduce("MEAN", (loss, gradients), options)
            for w, gradient in zip(weights, gradients, strict=True):
                w.assign_sub(gradient)
            return loss

        return stepping(
            name,
            lambda _: strategy.run(step, (x,)),
            jax.block_until_ready,
            lambda loss: float(strategy.experimental_local_results(loss)[0]),
        )

    pack_bytes = 4 << 20 if request["platform"] == "gpu" else width * width * 4
    peers = [peer("one all-reduce", 0), peer("packs", pack_bytes), peer("control", 0)]
    pairs = [pair(name, "one all-reduce") for name in ("packs", "control")]
    return _harness.compare(request, what, peers, pairs, replicas=num_devices)


def _measure_workers(request: Request, num_devices: int) -> Iterator[Row]:
    platform, replicas = request["platform"], f"{NUM_WORKERS} workers"
    is_shared = platform == "gpu" and num_devices < NUM_WORKERS
    variables: list[dict[str, str]] = [{} for _ in range(NUM_WORKERS)]
    if platform == "gpu":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(num_devices))))
        gpus = visible.split(",")
        for worker, own in enumerate(variables):
            own["CUDA_VISIBLE_DEVICES"] = gpus[worker % num_devices]
            own.update(_SHARED_GPU if is_shared else {})
    names = ("handwritten", "distributary", "control")
    try:
        job = _clusters.jax_workers(NUM_WORKERS, platform, variables, workload="mlp32", names=names)
        with contextlib.closing(job):
            peers = [job.peer(name) for name in names]
            pairs = [pair("distributary", "handwritten", STEP_BAR)]
            what = "`strategy.run`, mlp32"
            yield _harness.compare(request, what, peers, pairs, replicas=replicas)
        job = _clusters.jax_workers(NUM_WORKERS, platform, variables, num_bytes=ALL_REDUCE_BYTES)
        with contextlib.closing(job):
            for size in ALL_REDUCE_BYTES:
                peers = [
                    job.peer(name, f"{name}_{size}", num_checked=2)
                    for name in ("psum", "run", "control")
                ]
                yield _harness.compare(
                    request,
                    f"all-reduce of {size} B",
                    peers,
                    [pair("run", "psum"), pair("control", "psum")],
                    unit="ms",
                    replicas=replicas,
                    must_fall=False,
                )
    except RuntimeError as error:
        if not is_shared:
            raise
        yield _harness.row(f"two workers cannot share this GPU: {error}", replicas, "", {})


if __name__ == "__main__":
    _harness.run(
        requests,
        measure,
        rounds=(15, 3),
        options={
            "--platform": {"default": "gpu", "help": "gpu or cpu"},
            "--sections": {"choices": SECTIONS},
            "--only": {"choices": tuple(dict.fromkeys((*STEPPED, *FITTED)))},
        },
    )
