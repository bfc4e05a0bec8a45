"""How long is a step of `strategy.run` next to the same step written by hand in JAX?

Every workload and replica count gets a process of its own. In it all peers start from the same
parameters, take the same steps on the same data, must agree in the loss, and are then timed in
turns, a block of steps at a time:

    handwritten   jit + shard_map + one psum, donated state (plain jit for one replica)
    distributary  MirroredStrategy.run
    control       the hand-written step a second time: what a ratio of two equal peers looks like
    tensorflow    tf.distribute.MirroredStrategy in its own process, if it is installed

    python benchmarks/step_time.py                      # everything, about 15 minutes
    python benchmarks/step_time.py --quick --only mlp32 --replicas 1,2
"""

import argparse
import statistics
import sys
from typing import Any, TypeAlias

import _command_line
import _processes
import _report
import _tensorflow
import _timing
import _workloads

Json: TypeAlias = Any

BARS = {"mlp32": 1.15, "mlp256": 1.05, "transformer32": 1.05, "wide256": 1.15}
"""Time per step over hand-written JAX, median over the rounds; nothing is asked of others."""

TOLERANCE = 1e-4
"""Largest difference of the loss between two peers, at any of the compared steps."""

PEERS = ("handwritten", "distributary", "control", "tensorflow")
_CHILD_TIMEOUT_SECONDS = 900.0


def main(arguments: argparse.Namespace) -> int:
    """Measures, prints, writes; 1 if a measurement failed or losses differ, else 0."""
    load_before = _report.load_average()
    peers = [name.strip() for name in arguments.peers.split(",")]
    if unknown := sorted(set(peers) - set(PEERS)):
        raise SystemExit(f"--peers: unknown {unknown}; there are {', '.join(PEERS)}.")
    tensorflow_version = None
    if "tensorflow" in peers:
        tensorflow_version = _tensorflow.find_tensorflow(arguments.tensorflow_python)
        if tensorflow_version is None:
            print("tensorflow: not installed (see --tensorflow-python)", file=sys.stderr)
            peers.remove("tensorflow")

    rows: list[dict[str, Json]] = []
    problems: list[str] = []
    for workload in _workloads.select(arguments.only, _workloads.STEP_WORKLOADS):
        for num_replicas in arguments.replicas:
            request = {
                "workload": workload.name,
                "replicas": num_replicas,
                "peers": peers,
                "rounds": arguments.rounds,
                "steps": arguments.steps,
                "block_seconds": arguments.block_seconds,
                "check_steps": arguments.check_steps,
                "tensorflow_python": arguments.tensorflow_python,
            }
            print(f"{workload.name}, {num_replicas} replicas ...", file=sys.stderr, flush=True)
            try:
                row = _processes.run_child(__file__, request, num_replicas, _CHILD_TIMEOUT_SECONDS)
            except _processes.ChildFailedError as error:
                problems.append(str(error))
                continue
            rows.append(row)
            problems.extend(_disagreements(row))
        problems.extend(_disagreements_between_counts(rows, workload.name))

    _print(rows, has_tensorflow=tensorflow_version is not None)
    if rows:
        _report.write(
            "step_time",
            rows=rows,
            settings={
                "rounds": arguments.rounds,
                "block_seconds": arguments.block_seconds,
                "check_steps": arguments.check_steps,
                "tolerance": TOLERANCE,
            },
            load_before=load_before,
            more_versions={"tensorflow": tensorflow_version or "not installed"},
            folder=arguments.output,
        )
        if all(row["ratio"] for row in rows):
            _report.plot_ratios(
                rows,
                arguments.output / "step_time.png",
                "distributary strategy.run against hand-written JAX, logical CPU devices\n"
                "columns: median over rounds, whiskers: quartiles",
            )
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0


def measure(request: dict[str, Json]) -> dict[str, Json]:
    """One workload at one replica count; runs in the child process."""
    workload = _workloads.WORKLOADS[request["workload"]]
    num_replicas = request["replicas"]
    peers = [_build(name, workload, num_replicas, request) for name in request["peers"]]
    try:
        losses = {peer.name: peer.losses(request["check_steps"]) for peer in peers}
        reference = peers[0].name
        differences = _timing.check_agreement(losses, reference)
        steps = request["steps"] or _timing.choose_steps(peers[0], request["block_seconds"])
        # TensorFlow takes several times as long; a quarter of the steps is block enough.
        num_steps = {
            peer.name: max(4, steps // 4) if peer.name == "tensorflow" else steps for peer in peers
        }
        seconds = _timing.interleave(peers, request["rounds"], num_steps)
        final_loss = {peer.name: peer.losses(1)[0] for peer in peers}
    finally:
        for peer in peers:
            peer.close()

    def ratio(name: str) -> _timing.RatioSummary | None:
        if name not in seconds or name == reference:
            return None
        return _timing.summarize_ratio(seconds[name], seconds[reference])

    return {
        "workload": workload.name,
        "description": workload.description,
        "replicas": num_replicas,
        "steps_per_block": num_steps,
        "milliseconds": {
            name: {
                "min": 1e3 * min(values),
                "median": 1e3 * statistics.median(values),
                "rounds": [round(1e3 * value, 5) for value in values],
            }
            for name, values in seconds.items()
        },
        "bar": BARS.get(workload.name),
        "ratio": ratio("distributary"),
        "control": ratio("control"),
        "tensorflow_ratio": ratio("tensorflow"),
        "losses": {name: values for name, values in losses.items() if name != "control"},
        "loss_difference": differences,
        "final_loss": final_loss,
    }


def _build(
    name: str, workload: _workloads.Workload, num_replicas: int, request: dict[str, Json]
) -> _timing.Peer:
    # Imported here: the process that only starts others needs neither JAX nor distributary.
    if name == "tensorflow":
        return _tensorflow.start(request["tensorflow_python"], workload, num_replicas)
    if name == "distributary":
        import _distributary

        return _distributary.build(workload, _distributary.mirrored(num_replicas))
    import _handwritten

    return _handwritten.build(workload, _handwritten.LocalReplicas(num_replicas), name)


def _disagreements(row: dict[str, Json]) -> list[str]:
    where = f"{row['workload']}, {row['replicas']} replicas"
    problems = [
        f"{where}: the loss of {name} is {difference:.1e} away from the hand-written one within"
        f" the first {len(row['losses']['handwritten'])} steps; at most {TOLERANCE:g} is allowed."
        for name, difference in row["loss_difference"].items()
        if not difference <= TOLERANCE
    ]
    for name, losses in row["losses"].items():
        if not row["final_loss"][name] < losses[0]:
            problems.append(
                f"{where}: the loss of {name} went from {losses[0]:.4f} to"
                f" {row['final_loss'][name]:.4f}; it was expected to fall."
            )
    return problems


def _disagreements_between_counts(rows: list[dict[str, Json]], workload: str) -> list[str]:
    """The hand-written steps must agree with themselves at every replica count."""
    same = [row for row in rows if row["workload"] == workload]
    losses = {str(row["replicas"]): row["losses"]["handwritten"] for row in same}
    if not losses:
        return []
    reference = next(iter(losses))
    return [
        f"{workload}: hand-written at {count} and at {reference} replicas differ by"
        f" {difference:.1e} in the loss; at most {TOLERANCE:g} is allowed."
        for count, difference in _timing.check_agreement(losses, reference).items()
        if not difference <= TOLERANCE
    ]


def _print(rows: list[dict[str, Json]], *, has_tensorflow: bool) -> None:
    def time_of(row: dict[str, Json], name: str) -> list[float | None]:
        times = row["milliseconds"].get(name)
        return [times["min"], times["median"]] if times else [None, None]

    def table_row(row: dict[str, Json]) -> list[object]:
        ratio, control = row["ratio"] or {}, row["control"] or {}
        ours = ratio.get("median")
        difference = row["loss_difference"].get("distributary")
        if has_tensorflow:
            tensorflow = [
                *time_of(row, "tensorflow"),
                row["tensorflow_ratio"]["median"],
                f"{row['loss_difference']['tensorflow']:.0e}",
            ]
        else:
            tensorflow = ["not installed"]
        return [
            row["workload"],
            row["replicas"],
            row["steps_per_block"]["handwritten"],
            *time_of(row, "handwritten"),
            *time_of(row, "distributary"),
            ours,
            ratio.get("of_minima"),
            row["bar"],
            _report.verdict(ours, row["bar"]),
            control.get("median"),
            None if difference is None else f"{difference:.0e}",
            *tensorflow,
        ]

    print("\nMilliseconds per step, min and median over the rounds; ratios to hand-written JAX.\n")
    _report.print_table(
        [
            "workload",
            "R",
            "steps",
            "hand min",
            "median",
            "dist min",
            "median",
            "ratio",
            "of min",
            "bar",
            "",
            "control",
            "dloss",
            *(["TF min", "median", "TF ratio", "TF dloss"] if has_tensorflow else ["TF"]),
        ],
        [table_row(row) for row in rows],
    )


def _parse() -> argparse.Namespace:
    parser = _command_line.parser(__doc__, "timed blocks per peer", 15, 3)
    parser.add_argument("--steps", type=int, help="steps per block (what fills --block-seconds)")
    parser.add_argument("--block-seconds", type=float, help="length of a block (0.4, quick: 0.1)")
    parser.add_argument("--check-steps", type=int, default=20, help="steps whose losses must agree")
    parser.add_argument("--only", help=f"some of {','.join(_workloads.STEP_WORKLOADS)}")
    _command_line.add_replicas(parser)
    parser.add_argument("--peers", default=",".join(PEERS), help="some of the default, in order")
    parser.add_argument("--tensorflow-python", default=sys.executable, metavar="PATH")
    arguments = _command_line.parse(parser)
    arguments.block_seconds = arguments.block_seconds or (0.1 if arguments.quick else 0.4)
    if not arguments.peers.startswith("handwritten"):
        parser.error("--peers: the first one is the yardstick, handwritten")
    return arguments


if __name__ == "__main__":
    _command_line.run(_parse(), main, measure)
