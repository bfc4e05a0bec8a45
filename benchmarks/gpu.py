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

import argparse
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias

import _command_line
import _processes
import _report
import _served
import _timing
import _workloads

Json: TypeAlias = Any

SECTIONS = ("step", "fit", "prefetch", "packs", "workers")
STEPPED = ("mlp32", "mlp256", "transformer32", "wide256")
FITTED = ("mlp32", "mlp256", "transformer32", "cnn64")
NUM_WORKERS = 2
ALL_REDUCE_BYTES = (4, 1_000_000, 40_000_000)
BARS = {
    ("step", "distributary"): 1.05,
    ("fit", "distributary"): 1.0,
    ("prefetch", "with loader"): 1.1,
    ("workers", "distributary"): 1.05,
}
"""Highest ratio of a peer's time to that of the first of its row."""

TOLERANCE = 1e-3
"""Largest relative difference of the loss; GPUs multiply float32 with fewer digits (TF32)."""

_FOLDER = Path(__file__).resolve().parent
_CHILD_TIMEOUT_SECONDS = 900.0
_CHECK_STEPS = 20
_CHECK_EPOCHS = 2
_NUM_CPU_DEVICES = 2
_PACKAGES = ("jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-nccl-cu13", "nvidia-nccl-cu12")
_PACK_BYTES = 4 << 20
# Two NCCL ranks on one GPU: allowed, without multicast, and with room for each other's kernels.
_SHARED_GPU = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "1",
}


def main(arguments: argparse.Namespace) -> int:
    """Measures, prints, writes; 1 if there is no GPU, a measurement failed or losses differ."""
    load_before = _report.load_average()

    def child(section: str, **more: Json) -> Json:
        request = {
            "section": section,
            "platform": arguments.platform,
            "rounds": arguments.rounds,
            "quick": arguments.quick,
            "block_seconds": 0.1 if arguments.quick else 0.4,
            **more,
        }
        return _processes.run_child(
            __file__, request, _NUM_CPU_DEVICES, _CHILD_TIMEOUT_SECONDS, arguments.platform
        )

    devices = child("devices")
    if not devices:
        print(
            "gpu.py: JAX finds no GPU here. On a machine with an NVIDIA GPU, install jax[cuda13];"
            " --platform cpu runs the same paths on logical CPU devices.",
            file=sys.stderr,
        )
        return 1
    print(f"{len(devices)} x {devices[0]}", flush=True)
    problems: list[str] = []
    rows: list[dict[str, Json]] = []
    for section in arguments.sections:
        names: Sequence[str | None] = {"step": STEPPED, "fit": FITTED}.get(section, (None,))
        if arguments.only:
            names = [name for name in names if name is None or name in arguments.only.split(",")]
        for name in names:
            print(f"{section} {name or ''} ...", file=sys.stderr, flush=True)
            try:
                rows += child(section, workload=name, num_devices=len(devices))
            except _processes.ChildFailedError as error:
                problems.append(str(error))
    for row in rows:
        problems.extend(_disagreements(row))
    _print(rows)
    if rows:
        _report.write(
            "gpu" if arguments.platform == "gpu" else "gpu_on_cpu",
            rows=rows,
            settings={
                "platform": arguments.platform,
                "devices": devices,
                "rounds": arguments.rounds,
                "quick": arguments.quick,
                "tolerance": TOLERANCE,
            },
            load_before=load_before,
            more_versions={**_versions(), "NVIDIA driver": _driver()},
            folder=arguments.output,
        )
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0


def measure(request: dict[str, Json]) -> Json:
    """The rows of one section, or of one workload of it; runs in the child."""
    return {
        "devices": _devices,
        "step": _measure_step,
        "fit": _measure_fit,
        "prefetch": _measure_prefetch,
        "packs": _measure_packs,
        "workers": _measure_workers,
    }[request["section"]](request)


def _devices(request: dict[str, Json]) -> list[str]:
    import jax

    # Without a GPU, JAX falls back to the CPU if its plugin is not installed, and fails if it is.
    try:
        devices = jax.devices(request["platform"])
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return []
    return [device.device_kind for device in devices]


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "none"
    return found.stdout.split("\n")[0]


# One device


def _measure_step(request: dict[str, Json]) -> list[dict[str, Json]]:
    import _distributary
    import _handwritten

    workload = _workloads.WORKLOADS[request["workload"]]
    replicas = _handwritten.LocalReplicas(1)
    peers = [
        _handwritten.build(workload, replicas, "handwritten"),
        _distributary.build(workload, _distributary.mirrored(1)),
        _handwritten.build(workload, replicas, "control"),
    ]
    return [_compare(request, peers, _CHECK_STEPS)]


def _measure_fit(request: dict[str, Json]) -> list[dict[str, Json]]:
    # Each way to use devices belongs to a whole process.
    environ = _processes.environment(1, request["platform"])
    num_steps = 32 if request["quick"] else 320
    numbers = [request["workload"], "1", str(num_steps)]
    scripts = {
        "keras": ["_keras.py", "keras", *numbers, "1"],
        "distributary": ["_keras.py", "distributary", *numbers, "1"],
        "control": ["_keras.py", "keras", *numbers, "1"],
    }
    if request["workload"] in STEPPED:
        scripts["handwritten"] = ["_fit_handwritten.py", "jax", *numbers]
    peers = [
        _served.start_peer(name, [sys.executable, str(_FOLDER / script), *more], environ)
        for name, (script, *more) in scripts.items()
    ]
    try:
        return [_compare(request, peers, _CHECK_EPOCHS, num_steps)]
    finally:
        for peer in peers:
            peer.close()


def _measure_prefetch(request: dict[str, Json]) -> list[dict[str, Json]]:
    import _distributary
    import _overlap

    # As much arithmetic as takes longer than bringing the batch to the device.
    size = (
        _overlap.Size(batch=1024, width=4096, layers=32)
        if request["platform"] == "gpu"
        else _overlap.Size(batch=128, width=1024, layers=4)
    )
    found = _overlap.measure(_distributary.mirrored(1), size, request["rounds"])
    return [_row(request, found["seconds"], losses={})]


# Several devices


def _measure_packs(request: dict[str, Json]) -> list[dict[str, Json]]:
    import _distributary
    import jax
    import jax.numpy as jnp
    import numpy as np

    import distributary as dist

    num_devices = request["num_devices"]
    if num_devices < 2:
        return [_skipped(request, "needs two devices, and there is one")]
    width, layers = (1024, 16) if request["platform"] == "gpu" else (256, 8)
    strategy = _distributary.mirrored(num_devices)
    rows = np.random.default_rng(0).standard_normal((num_devices, 4 * width, width), np.float32)
    x = _distributary.on_every_replica(strategy, rows)

    def peer(name: str, bytes_per_pack: int) -> _timing.InProcessPeer:
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

        return _timing.InProcessPeer(
            name,
            lambda number: strategy.run(step, (x,)),
            jax.block_until_ready,
            lambda loss: float(strategy.experimental_local_results(loss)[0]),
        )

    pack_bytes = _PACK_BYTES if request["platform"] == "gpu" else width * width * 4
    peers = [peer("one all-reduce", 0), peer("packs", pack_bytes), peer("control", 0)]
    return [_compare(request, peers, _CHECK_STEPS)]


def _measure_workers(request: dict[str, Json]) -> list[dict[str, Json]]:
    import _jobs

    variables: list[dict[str, str]] | None = None
    shared = False
    if request["platform"] == "gpu":
        num_gpus = request["num_devices"]
        shared = num_gpus < NUM_WORKERS
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(num_gpus))))
        gpus = visible.split(",")
        variables = [
            {"CUDA_VISIBLE_DEVICES": gpus[i % num_gpus], **(_SHARED_GPU if shared else {})}
            for i in range(NUM_WORKERS)
        ]
    names = ("handwritten", "distributary", "control")
    rows = []
    try:
        job = _jobs.start_jax(
            ["train", "mlp32", "0", *names], NUM_WORKERS, request["platform"], variables
        )
        try:
            peers = [_served.ServedPeer(name, job) for name in names]
            rows.append(_compare({**request, "workload": "mlp32"}, peers, _CHECK_STEPS))
        finally:
            job.close()
        sizes = [str(size) for size in ALL_REDUCE_BYTES]
        job = _jobs.start_jax(["all_reduce", *sizes], NUM_WORKERS, request["platform"], variables)
        try:
            for size in sizes:
                peers = [
                    _served.ServedPeer(f"{name}_{size}", job) for name in ("psum", "run", "control")
                ]
                rows.append(_compare({**request, "workload": f"{size} B"}, peers, 0))
        finally:
            job.close()
    except RuntimeError as error:
        if not shared:
            raise
        rows.append(_skipped(request, f"two workers cannot share this GPU: {error}"))
    return rows


# Rows


def _compare(
    request: dict[str, Json],
    peers: Sequence[_timing.Peer],
    check: int,
    num_steps: int | None = None,
) -> dict[str, Json]:
    """Checks that all peers compute the same, and times them in turns."""
    losses = {peer.name: peer.losses(check) for peer in peers}
    steps = num_steps or _timing.choose_steps(peers[0], request["block_seconds"])
    seconds = _timing.interleave(peers, request["rounds"], {peer.name: steps for peer in peers})
    return _row(request, seconds, losses)


def _row(
    request: dict[str, Json],
    seconds: Mapping[str, Sequence[float]],
    losses: Mapping[str, Sequence[float]],
) -> dict[str, Json]:
    reference = next(iter(seconds))
    return {
        "section": request["section"],
        "workload": request.get("workload"),
        "reference": reference,
        "peers": {
            name: {
                "milliseconds": {
                    "min": 1e3 * min(values),
                    "median": 1e3 * statistics.median(values),
                    "rounds": [round(1e3 * value, 5) for value in values],
                },
                "ratio": _timing.summarize_ratio(values, seconds[reference]),
                "losses": losses.get(name, []),
            }
            for name, values in seconds.items()
        },
    }


def _skipped(request: dict[str, Json], reason: str) -> dict[str, Json]:
    workload = request.get("workload")
    return {"section": request["section"], "workload": workload, "peers": {}, "skipped": reason}


def _disagreements(row: dict[str, Json]) -> list[str]:
    losses = {name: peer["losses"] for name, peer in row["peers"].items() if peer["losses"]}
    if not losses:
        return []
    reference = next(iter(losses))
    allowed = TOLERANCE * max(abs(loss) for loss in losses[reference])
    return [
        f"{row['section']} {row['workload'] or ''}: the losses of {name} are up to"
        f" {difference:.1e} away from those of {reference}; at most {allowed:.1e} is allowed."
        for name, difference in _timing.check_agreement(losses, reference).items()
        if not difference <= allowed
    ]


def _print(rows: Sequence[dict[str, Json]]) -> None:
    print("\nMilliseconds per step or per all-reduce; ratios to the first peer of the row.\n")
    table = []
    for row in rows:
        for name, peer in row["peers"].items():
            bar = BARS.get((row["section"], name))
            ratio = peer["ratio"]
            table.append(
                [
                    row["section"],
                    row["workload"],
                    name,
                    peer["milliseconds"]["min"],
                    peer["milliseconds"]["median"],
                    ratio["median"],
                    ratio["lower_quartile"],
                    ratio["upper_quartile"],
                    bar,
                    None if bar is None else _report.verdict(ratio["median"], bar),
                ]
            )
    header = ["section", "workload", "peer", "min", "median", "ratio", "quartiles", "", "bar", ""]
    _report.print_table(header, table)
    for row in rows:
        if "skipped" in row:
            print(f"\n{row['section']}: {row['skipped']}")


def _parse() -> argparse.Namespace:
    parser = _command_line.parser(__doc__, "timed blocks per peer", 15, 3)
    parser.add_argument("--platform", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="some of the default")
    parser.add_argument("--only", help="some workloads of step and fit, comma-separated")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = _command_line.parse(parser)
    arguments.sections = [name.strip() for name in arguments.sections.split(",")]
    if unknown := sorted(set(arguments.sections) - set(SECTIONS)):
        parser.error(f"--sections: unknown {unknown}; there are {', '.join(SECTIONS)}")
    return arguments


if __name__ == "__main__":
    # Ended by a signal, it ends the processes that it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    _command_line.run(_parse(), main, measure)
