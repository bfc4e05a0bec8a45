"""How long is a step of two workers on this machine, next to hand-written JAX and to others?

Two processes with one device each, connected over the loopback interface. Sections:

    step       A step of `strategy.run`. Peers, each two processes that work in turns:
                 handwritten   jit + shard_map + one psum of one vector, donated state
                 control       the same a second time: what a ratio of two equal peers looks like
                 distributary  MultiWorkerMirroredStrategy.run
                 tensorflow    tf.distribute.MultiWorkerMirroredStrategy, if it is installed
                 torch         DistributedDataParallel over gloo, if it is installed
    fit        A step of Keras' `fit` on NumPy arrays in memory:
                 fit_handwritten        the loop: shuffled indices, own rows, the compiled step
                 fit_handwritten_keras  the same around the Keras model, where layers matter most
                 fit                    fit under MultiWorkerMirroredStrategy
    wide       A step with an embedding table: its rows are exchanged, by torch the whole table.
    allreduce  One call that sums an array over the workers, and waits for it.
    start      From the strategy to the end of the first step, imports excluded: two workers less
               one.
    before     The steps of mlp32 next to those of another commit, whose checkout is `--before`.

All that is JAX lives in one pair of processes, over one connection, except in the last two.

    python benchmarks/multi_worker_time.py --tensorflow-python PATH --torch-python PATH
    python benchmarks/multi_worker_time.py --quick --sections step,fit --only mlp32
    git worktree add /tmp/before HEAD~1
    python benchmarks/multi_worker_time.py --sections before --before /tmp/before
"""

import contextlib
import statistics
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import _clusters
import _harness
from _harness import Pair, Request, Row, number, pair
from _peers import Job, Peer

SECTIONS = ("step", "fit", "wide", "allreduce", "start")
NUM_WORKERS = 2
REPLICAS = f"{NUM_WORKERS} workers"

TRAINED = ("mlp32", "mlp256", "transformer32")
"""What is measured in the sections step and fit."""

WIDE, WIDE_OF_TORCH = "wide256", "wide256_dense"
ALL_REDUCE_BYTES = (4, 1_000_000, 40_000_000)
EPOCHS = {"mlp32": 320, "mlp256": 160, "transformer32": 16, WIDE: 0}

STEP_BAR, ALL_REDUCE_BAR, START_BAR_SECONDS = 1.05, 1.1, 3.0
BARS_OF_OTHERS = {
    "mlp32": {"tensorflow": 1.0, "torch": 1.0},
    "mlp256": {"tensorflow": 1.0, "torch": 1.15},
    "transformer32": {"tensorflow": 0.5, "torch": 1.15},
    WIDE: {"torch": 1 / 3},
}


def requests(arguments: Namespace) -> Iterator[Request]:
    """Yields the sections; step and fit of a workload go together."""
    sections = [name for name in arguments.sections if name in ("step", "fit")]
    for workload in arguments.only if sections else ():
        yield {"section": "training", "workload": workload, "parts": sections}
    if "wide" in arguments.sections:
        yield {"section": "training", "workload": WIDE, "parts": ["step"]}
    for section in ("allreduce", "start", "before"):
        if section in arguments.sections:
            yield {"section": section}


def measure(request: Request) -> list[Row]:
    """Measures one section, or one workload of it."""
    return {
        "training": _measure_training,
        "allreduce": _measure_all_reduce,
        "start": _measure_start,
        "before": _measure_before,
    }[request["section"]](request)


# Time per step


def _measure_training(request: Request) -> list[Row]:
    workload = request["workload"]
    num_steps = EPOCHS[workload] // (4 if request["quick"] else 1)
    names = []
    if "step" in request["parts"]:
        names += ["handwritten", "distributary", "control"]
    if "fit" in request["parts"]:
        names += ["fit_handwritten", "fit"]
        names += ["fit_handwritten_keras"] * (workload == "transformer32")
    with contextlib.ExitStack() as stack:
        job = _clusters.jax_workers(
            NUM_WORKERS, workload=workload, num_steps=num_steps, names=names
        )
        stack.callback(job.close)
        peers = [_peer(job, name, num_steps) for name in names]
        if "tensorflow" in request["others"]:
            python = request["tensorflow_python"]
            job = _clusters.tensorflow_workers(python, NUM_WORKERS, workload=workload)
            stack.callback(job.close)
            peers.append(job.peer("tensorflow"))
        if "torch" in request["others"]:
            name = WIDE_OF_TORCH if workload == WIDE else workload
            job = _clusters.torch_workers(request["torch_python"], NUM_WORKERS, workload=name)
            stack.callback(job.close)
            peers.append(job.peer("torch"))
        what = f"two workers, {workload}"
        return [_harness.compare(request, what, peers, list(_pairs(workload)), replicas=REPLICAS)]


def _peer(job: Job, name: str, num_steps: int, called: str = "") -> Peer:
    if not name.startswith("fit"):
        return job.peer(called or name, name)
    return job.peer(called or name, name, num_checked=2, num_steps=num_steps, group="fit")


def _pairs(workload: str) -> Iterator[Pair]:
    """Yields what is alike; the loops of TensorFlow and torch, which read no data, with both."""
    foreign = BARS_OF_OTHERS[workload]
    for ours, what in (("distributary", "`strategy.run`"), ("fit", "`fit`")):
        prefix = "fit_" if ours == "fit" else ""
        name = f"{what}, {workload}"
        yield pair(ours, f"{prefix}handwritten", STEP_BAR, name)
        yield pair(ours, f"{prefix}handwritten_keras", STEP_BAR, f"{name} around the Keras model")
        for theirs in ("tensorflow", "torch"):
            yield pair(ours, theirs, foreign.get(theirs), name)


def _measure_before(request: Request) -> list[Row]:
    """Measures the steps of this checkout and of another one, and those of the other one again."""
    if request["before"] is None:
        raise SystemExit("--sections before: give the checkout of the other commit as --before")
    num_steps = EPOCHS["mlp32"]
    names = ["distributary", "fit"]
    other = Path(request["before"]) / "src"
    rows = []
    with contextlib.ExitStack() as stack:
        jobs = {}
        for job, source in {"before": other, "after": None, "control": other}.items():
            jobs[job] = _clusters.jax_workers(
                NUM_WORKERS, source=source, workload="mlp32", num_steps=num_steps, names=names
            )
            stack.callback(jobs[job].close)
        for name in names:
            peers = [_peer(job, name, num_steps, called) for called, job in jobs.items()]
            pairs = [pair("after", "before"), pair("control", "before")]
            what = f"{name}, next to another commit"
            rows.append(_harness.compare(request, what, peers, pairs, replicas=REPLICAS))
    return rows


# All-reduces


def _measure_all_reduce(request: Request) -> list[Row]:
    whats = {
        "reduce": "`reduce` of",
        "reduce_to": "`reduce_to` of",
        "run": "`all_reduce` in `run`,",
    }
    rows = []
    with contextlib.ExitStack() as stack:
        jax = _clusters.jax_workers(NUM_WORKERS, num_bytes=ALL_REDUCE_BYTES)
        stack.callback(jax.close)
        jobs = dict.fromkeys(("psum", *whats, "control"), jax)
        if "torch" in request["others"]:
            python = request["torch_python"]
            jobs["torch"] = _clusters.torch_workers(python, NUM_WORKERS, num_bytes=ALL_REDUCE_BYTES)
            stack.callback(jobs["torch"].close)
        for num_bytes in ALL_REDUCE_BYTES:
            peers = [
                job.peer(name, f"{name}_{num_bytes}", num_checked=2) for name, job in jobs.items()
            ]
            size = f"{num_bytes / 1e6:g} MB" if num_bytes >= 1e6 else f"{num_bytes} B"
            pairs = [
                pair(ours, theirs, bar, f"{what} {size}")
                for ours, what in whats.items()
                for theirs, bar in (("psum", ALL_REDUCE_BAR), ("torch", None))
            ]
            rows.append(
                _harness.compare(
                    request,
                    f"all-reduce of {size}",
                    peers,
                    pairs,
                    unit="ms",
                    replicas=REPLICAS,
                    must_fall=False,
                )
            )
    return rows


# The start


def _measure_start(request: Request) -> list[Row]:
    """Measures jobs of one and of two workers in turns, each in fresh processes."""
    seconds: dict[int, list[float]] = {1: [], NUM_WORKERS: []}
    for _ in range(1 if request["quick"] else 5):
        for num_workers, found in seconds.items():
            with contextlib.closing(_clusters.jax_workers(num_workers)) as job:
                peer = job.peer("start")
                peer.losses(0)  # answered when all is imported
                found.append(peer.time_block(1))
    alone, together = map(statistics.median, seconds.values())
    numbers = [number("two workers less one", together - alone, "s", START_BAR_SECONDS)]
    rounds = {f"{count} workers": found for count, found in seconds.items()}
    return [_harness.row("start, mlp32", REPLICAS, "s", rounds, numbers=numbers)]


if __name__ == "__main__":
    _harness.run(
        requests,
        measure,
        rounds=(11, 3),
        options={
            "--sections": {"choices": (*SECTIONS, "before"), "default": SECTIONS},
            "--only": {"choices": TRAINED, "help": "some of these, in step and fit"},
            "--before": {"metavar": "FOLDER", "help": "checkout of another commit"},
            "--tensorflow-python": {"default": sys.executable, "metavar": "PATH"},
            "--torch-python": {"default": sys.executable, "metavar": "PATH"},
        },
    )
