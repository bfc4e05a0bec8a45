"""How long is a step of two workers on this machine, next to hand-written JAX and to others?

Two processes with one device each, connected over the loopback interface. Five sections, see
`--sections`:

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

All that is JAX lives in one pair of processes, over one connection.

    python benchmarks/multi_worker_time.py --tensorflow-python PATH --torch-python PATH
    python benchmarks/multi_worker_time.py --quick --sections step,fit --only mlp32
"""

import argparse
import contextlib
import signal
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import _command_line
import _processes
import _report
import _served
import _tensorflow
import _timing
import _torch
import _workloads
from _epochs import Epochs, FitPeer

Json: TypeAlias = Any

SECTIONS = ("step", "fit", "wide", "allreduce", "start")
NUM_WORKERS = 2

TRAINED = ("mlp32", "mlp256", "transformer32")
"""What is measured in the sections step and fit."""

WIDE, WIDE_OF_TORCH = "wide256", "wide256_dense"
ALL_REDUCE_BYTES = (4, 1_000_000, 40_000_000)

STEP_TOLERANCE = 1e-4
"""Largest difference of the loss between two peers, at any of the compared steps."""

FIT_TOLERANCE = 1e-4
"""Largest relative difference of the mean loss of a short epoch between two peers."""

START_BAR_SECONDS = 3.0

EPOCHS: Mapping[str, Epochs] = {
    "mlp32": Epochs(320, 80),
    "mlp256": Epochs(160, 40),
    "transformer32": Epochs(16, 4),
}
QUICK_EPOCHS: Mapping[str, Epochs] = {
    "mlp32": Epochs(64, 16),
    "mlp256": Epochs(64, 16),
    "transformer32": Epochs(8, 4),
}

_CHECK_STEPS = 20
_CHECK_EPOCHS = 2
_CHILD_TIMEOUT_SECONDS = 900.0


@dataclass(frozen=True)
class Bar:
    """`ours / theirs` of a row's time per step must not exceed `limit`."""

    row: str
    ours: str
    theirs: str
    limit: float


_LIMITS_OF_OTHERS = {"mlp32": (1.0, 1.0), "mlp256": (1.0, 1.15), "transformer32": (0.5, 1.15)}
BARS = (
    *(Bar(name, "distributary", "handwritten", 1.05) for name in TRAINED),
    *(Bar(name, "fit", "fit_handwritten", 1.05) for name in TRAINED),
    Bar("transformer32", "fit", "fit_handwritten_keras", 1.05),
    *(
        Bar(name, ours, theirs, limit)
        for name, limits in _LIMITS_OF_OTHERS.items()
        for theirs, limit in zip(("tensorflow", "torch"), limits, strict=True)
        for ours in ("distributary", "fit")
    ),
    Bar(WIDE, "distributary", "handwritten", 1.05),
    Bar(WIDE, "distributary", "torch", 1 / 3),
    *(
        Bar(f"{num_bytes} B", ours, "psum", 1.1)
        for num_bytes in ALL_REDUCE_BYTES
        for ours in ("reduce", "reduce_to", "run")
    ),
)


def main(arguments: argparse.Namespace) -> int:
    """Measures, prints, writes; 1 if a measurement failed or losses differ, else 0."""
    load_before = _report.load_average()
    versions = {
        "tensorflow": _tensorflow.find_tensorflow(arguments.tensorflow_python),
        "torch": _torch.find_torch(arguments.torch_python, arguments.torch_path),
    }
    for name, version in versions.items():
        if version is None:
            print(f"{name}: not installed (see --{name}-python)", file=sys.stderr)
    others = [name for name, version in versions.items() if version is not None]

    problems: list[str] = []
    rows: list[dict[str, Json]] = []
    for request in _requests(arguments, others):
        name = " ".join([request["section"], request.get("workload", "")])
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            found = _processes.run_child(__file__, request, 1, _CHILD_TIMEOUT_SECONDS)
        except _processes.ChildFailedError as error:
            problems.append(str(error))
            continue
        rows.extend(found)
        for row in found:
            problems.extend(_disagreements(row))

    if timed := [row for row in rows if "peers" in row]:
        _print_timed(timed)
    if starts := [row for row in rows if row["section"] == "start"]:
        _print_start(starts)
    if rows:
        _report.write(
            "multi_worker_time",
            rows=rows,
            settings={
                "rounds": arguments.rounds,
                "quick": arguments.quick,
                "workers": NUM_WORKERS,
                "block_seconds": arguments.block_seconds,
                "step_tolerance": STEP_TOLERANCE,
                "fit_tolerance": FIT_TOLERANCE,
            },
            load_before=load_before,
            more_versions={name: version or "not measured" for name, version in versions.items()},
            folder=arguments.output,
        )
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0


def measure(request: dict[str, Json]) -> list[dict[str, Json]]:
    """The rows of one section, or of one workload of it; runs in the child."""
    return {
        "training": _measure_training,
        "allreduce": _measure_all_reduce,
        "start": _measure_start,
    }[request["section"]](request)


def _requests(arguments: argparse.Namespace, others: Sequence[str]) -> list[dict[str, Json]]:
    """What child processes are asked to measure, one after the other."""
    common = {
        "rounds": arguments.rounds,
        "block_seconds": arguments.block_seconds,
        "tensorflow_python": arguments.tensorflow_python,
        "torch_python": arguments.torch_python,
        "torch_path": arguments.torch_path and str(arguments.torch_path),
    }
    of_steps = ["handwritten", "distributary", "control"]
    training: dict[str, list[str]] = {}
    for workload in _workloads.select(arguments.only, TRAINED):
        names = []
        if "step" in arguments.sections:
            names += of_steps
        if "fit" in arguments.sections:
            names += ["fit_handwritten", "fit"]
            if workload.name == "transformer32":
                names.append("fit_handwritten_keras")
        if names:
            training[workload.name] = [*names, *others]
    if "wide" in arguments.sections:
        training[WIDE] = [*of_steps, *others]
    epochs = QUICK_EPOCHS if arguments.quick else EPOCHS
    requests = [
        {
            **common,
            "section": "training",
            "workload": name,
            "peers": peers,
            "epochs": [epochs[name].long, epochs[name].short] if name in epochs else None,
        }
        for name, peers in training.items()
    ]
    if "allreduce" in arguments.sections:
        requests.append({**common, "section": "allreduce", "torch": "torch" in others})
    if "start" in arguments.sections:
        requests.append({"section": "start", "rounds": 1 if arguments.quick else 5})
    return requests


# Time per step


def _measure_training(request: dict[str, Json]) -> list[dict[str, Json]]:
    import _jobs

    workload = _workloads.WORKLOADS[request["workload"]]
    epochs = Epochs(*request["epochs"]) if request["epochs"] else None
    names = request["peers"]
    with contextlib.ExitStack() as stack:

        def started(job: _served.ServedJob) -> _served.ServedJob:
            stack.callback(job.close)
            return job

        max_steps = max(epochs.long, _workloads.CHECK_STEPS) if epochs else 0
        ours = [name for name in names if name not in ("tensorflow", "torch")]
        jax = started(_jobs.start_jax(["train", workload.name, str(max_steps), *ours], NUM_WORKERS))
        served = {name: _served.ServedPeer(name, jax) for name in ours}
        if "tensorflow" in names:
            job = started(
                _jobs.start_tensorflow(request["tensorflow_python"], workload.name, NUM_WORKERS)
            )
            served["tensorflow"] = _served.ServedPeer("tensorflow", job)
        if "torch" in names:
            name = WIDE_OF_TORCH if workload.name == WIDE else workload.name
            job = started(_start_torch(request, ["train", name]))
            served["torch"] = _served.ServedPeer("torch", job)

        peers: list[_timing.Peer] = []
        for name in names:
            of_name = served[name]
            peers.append(FitPeer(of_name, epochs) if epochs and _is_of_fit(name) else of_name)
        losses = {
            peer.name: peer.losses(_CHECK_EPOCHS if _is_of_fit(peer.name) else _CHECK_STEPS)
            for peer in peers
        }
        num_steps: dict[str, int] = {}
        for peer in peers:
            if isinstance(peer, FitPeer):
                assert epochs is not None
                num_steps[peer.name] = epochs.long
            elif peer.name in ("distributary", "control"):
                num_steps[peer.name] = num_steps["handwritten"]
            else:
                num_steps[peer.name] = _timing.choose_steps(peer, request["block_seconds"])
        seconds = _timing.interleave(peers, request["rounds"], num_steps)
        final_loss = {peer.name: peer.losses(1)[0] for peer in peers}
    row = _row(workload.name, seconds, losses, num_steps, request["section"])
    for peer in peers:
        found = row["peers"][peer.name]
        found["final_loss"] = final_loss[peer.name]
        if isinstance(peer, FitPeer):
            # The first block does not count.
            found["marginal_milliseconds"] = _milliseconds(peer.marginal_seconds[1:])
    return [row]


def _start_torch(request: dict[str, Json], arguments: Sequence[str]) -> _served.ServedJob:
    import _jobs

    folder = request["torch_path"] and Path(request["torch_path"])
    return _jobs.start_torch(request["torch_python"], folder, arguments, NUM_WORKERS)


def _is_of_fit(name: str) -> bool:
    return name.startswith("fit")


def _measure_all_reduce(request: dict[str, Json]) -> list[dict[str, Json]]:
    import _jobs

    sizes = [str(num_bytes) for num_bytes in ALL_REDUCE_BYTES]
    with contextlib.ExitStack() as stack:
        jobs = dict.fromkeys(("psum", "reduce", "reduce_to", "run", "control"), "jax")
        running = {"jax": _jobs.start_jax(["all_reduce", *sizes], NUM_WORKERS)}
        stack.callback(running["jax"].close)
        if request["torch"]:
            jobs["torch"] = "torch"
            running["torch"] = _start_torch(request, ["all_reduce", *sizes])
            stack.callback(running["torch"].close)
        rows = []
        for size in sizes:
            peers = [
                _served.ServedPeer(f"{name}_{size}", running[job]) for name, job in jobs.items()
            ]
            losses = {peer.name: peer.losses(2) for peer in peers}
            steps = _timing.choose_steps(peers[0], request["block_seconds"] / 2)
            num_steps = {peer.name: steps for peer in peers}
            seconds = _timing.interleave(peers, request["rounds"], num_steps)

            def by_peer(found: Mapping[str, Json], size: str = size) -> dict[str, Json]:
                return {name.removesuffix(f"_{size}"): value for name, value in found.items()}

            rows.append(
                _row(
                    f"{size} B",
                    by_peer(seconds),
                    by_peer(losses),
                    by_peer(num_steps),
                    request["section"],
                )
            )
    return rows


def _row(
    name: str,
    seconds: Mapping[str, Sequence[float]],
    losses: Mapping[str, Sequence[float]],
    num_steps: Mapping[str, int],
    section: str,
) -> dict[str, Json]:
    """One workload or size: what the peers took, and the bars it has."""
    differences: dict[str, float] = {}
    references: dict[str, str] = {}
    for of_fit in (False, True):
        group = {n: values for n, values in losses.items() if _is_of_fit(n) == of_fit}
        for peer in group:
            references[peer] = next(iter(group))
        if group:
            differences |= _timing.check_agreement(group, next(iter(group)))
    return {
        "section": section,
        "workload": name,
        "peers": {
            peer: {
                "steps_per_block": num_steps[peer],
                "milliseconds": _milliseconds(values),
                "reference": references[peer],
                "ratio": _timing.summarize_ratio(values, seconds[references[peer]]),
                "losses": losses[peer],
                "loss_difference": differences[peer],
            }
            for peer, values in seconds.items()
        },
        "bars": [
            {
                "ours": bar.ours,
                "theirs": bar.theirs,
                "limit": bar.limit,
                **_timing.summarize_ratio(seconds[bar.ours], seconds[bar.theirs]),
            }
            for bar in BARS
            if bar.row == name and bar.ours in seconds and bar.theirs in seconds
        ],
    }


def _milliseconds(seconds: Sequence[float]) -> dict[str, Json]:
    return {
        "min": 1e3 * min(seconds),
        "median": 1e3 * statistics.median(seconds),
        "rounds": [round(1e3 * value, 5) for value in seconds],
    }


def _disagreements(row: dict[str, Json]) -> list[str]:
    problems = []
    for name, peer in row.get("peers", {}).items():
        reference = row["peers"][peer["reference"]]["losses"]
        allowed = STEP_TOLERANCE
        if _is_of_fit(name):
            allowed = FIT_TOLERANCE * max(abs(loss) for loss in reference)
        if not peer["loss_difference"] <= allowed:
            problems.append(
                f"{row['workload']}: the losses of {name} are up to {peer['loss_difference']:.1e}"
                f" away from those of {peer['reference']}; at most {allowed:.1e} is allowed."
            )
        if "final_loss" in peer and not peer["final_loss"] < peer["losses"][0]:
            problems.append(
                f"{row['workload']}: the loss of {name} went from {peer['losses'][0]:.4f} to"
                f" {peer['final_loss']:.4f}; it was expected to fall."
            )
    return problems


def _print_timed(rows: list[dict[str, Json]]) -> None:
    print(
        "\nTwo workers: milliseconds per step, or per all-reduce, min and median over the rounds;"
        " marginal = per step more in an epoch; ratios to the first peer of the kind.\n"
    )
    _report.print_table(
        [
            "workload",
            "peer",
            "steps",
            "min",
            "median",
            "marginal",
            "ratio",
            "quartiles",
            "",
            "dloss",
        ],
        [
            [
                row["workload"],
                name,
                peer["steps_per_block"],
                peer["milliseconds"]["min"],
                peer["milliseconds"]["median"],
                peer.get("marginal_milliseconds", {}).get("median"),
                peer["ratio"]["median"],
                peer["ratio"]["lower_quartile"],
                peer["ratio"]["upper_quartile"],
                f"{peer['loss_difference']:.0e}",
            ]
            for row in rows
            for name, peer in row["peers"].items()
        ],
    )
    print()
    _report.print_table(
        ["workload", "peer", "over", "ratio", "quartiles", "", "of min", "bar", ""],
        [
            [
                row["workload"],
                bar["ours"],
                bar["theirs"],
                bar["median"],
                bar["lower_quartile"],
                bar["upper_quartile"],
                bar["of_minima"],
                bar["limit"],
                _report.verdict(bar["median"], bar["limit"]),
            ]
            for row in rows
            for bar in row["bars"]
        ],
    )


# The start


def _measure_start(request: dict[str, Json]) -> list[dict[str, Json]]:
    """Jobs of one and of two workers in turns, each in fresh processes."""
    import _jobs

    seconds: dict[int, list[float]] = {1: [], NUM_WORKERS: []}
    for _ in range(request["rounds"]):
        for num_workers, found in seconds.items():
            peer = _served.ServedPeer("start", _jobs.start_jax(["start"], num_workers))
            try:
                peer.losses(0)  # answered when all is imported
                found.append(peer.time_block(1))
            finally:
                peer.close()
    alone, together = seconds.values()
    return [
        {
            "section": "start",
            "workload": "mlp32",
            "seconds_of_one": alone,
            "seconds_of_two": together,
            "difference_seconds": statistics.median(together) - statistics.median(alone),
            "bar": START_BAR_SECONDS,
        }
    ]


def _print_start(rows: list[dict[str, Json]]) -> None:
    print("\nStart: seconds from the strategy to the end of the first step, medians.\n")
    _report.print_table(
        ["workload", "one worker", "two", "difference", "bar", ""],
        [
            [
                row["workload"],
                statistics.median(row["seconds_of_one"]),
                statistics.median(row["seconds_of_two"]),
                row["difference_seconds"],
                row["bar"],
                _report.verdict(row["difference_seconds"], row["bar"]),
            ]
            for row in rows
        ],
    )


def _parse() -> argparse.Namespace:
    parser = _command_line.parser(__doc__, "timed blocks per peer", 11, 3)
    parser.add_argument("--sections", default=",".join(SECTIONS), help="some of the default")
    parser.add_argument("--only", help=f"some of {','.join(TRAINED)}, in step and fit")
    parser.add_argument("--block-seconds", type=float, help="length of a block (0.4, quick: 0.1)")
    parser.add_argument("--tensorflow-python", default=sys.executable, metavar="PATH")
    parser.add_argument("--torch-python", default=sys.executable, metavar="PATH")
    parser.add_argument("--torch-path", type=Path, metavar="FOLDER", help="where torch lies")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = _command_line.parse(parser)
    arguments.block_seconds = arguments.block_seconds or (0.1 if arguments.quick else 0.4)
    arguments.sections = [name.strip() for name in arguments.sections.split(",")]
    if unknown := sorted(set(arguments.sections) - set(SECTIONS)):
        parser.error(f"--sections: unknown {unknown}; there are {', '.join(SECTIONS)}")
    return arguments


if __name__ == "__main__":
    # Ended by a signal, it ends the processes that it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    _command_line.run(_parse(), main, measure)
