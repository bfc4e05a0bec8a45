"""How much memory does a step take, next to the same step written by hand in JAX?

Two answers for every workload and replica count, each peer in processes of its own:

    program   what XLA plans for one device: arguments + outputs - donated + temporary buffers
    process   peak resident memory of the process while it takes steps, compilation excluded
              where the system can reset the peak (Linux), and over its whole life

    python benchmarks/memory.py
"""

import argparse
import statistics
import sys
from typing import Any, TypeAlias

import _command_line
import _plans
import _processes
import _report
import _workloads

Json: TypeAlias = Any

BAR = 1.05
PEERS = ("handwritten", "distributary")
_CHILD_TIMEOUT_SECONDS = 300.0
_MEBIBYTE = 2**20


def main(arguments: argparse.Namespace) -> int:
    """Measures, prints, writes; 1 if a measurement failed, else 0."""
    load_before = _report.load_average()
    peers = arguments.peers.split(",")
    rows: list[dict[str, Json]] = []
    failed = False
    for workload in _workloads.select(arguments.only, _workloads.STEP_WORKLOADS):
        for num_replicas in arguments.replicas:
            found: dict[str, list[Json]] = {name: [] for name in peers}
            print(f"{workload.name}, {num_replicas} replicas ...", file=sys.stderr, flush=True)
            try:
                for _ in range(arguments.rounds):
                    for name in peers:
                        request = {
                            "peer": name,
                            "workload": workload.name,
                            "replicas": num_replicas,
                            "steps": arguments.steps,
                        }
                        found[name].append(
                            _processes.run_child(
                                __file__, request, num_replicas, _CHILD_TIMEOUT_SECONDS
                            )
                        )
            except _processes.ChildFailedError as error:
                print(f"FAILED: {error}", file=sys.stderr)
                failed = True
                continue
            rows.append(_summarize(workload.name, num_replicas, found))
    print("\nMiB, medians of the processes; program: per device.\n")
    _report.print_table(
        [
            "workload",
            "R",
            "program hand",
            "dist",
            "ratio",
            "bar",
            "",
            "steps' peak hand",
            "dist",
            "ratio",
            "bar",
            "",
            "life's peak hand",
            "dist",
            "ratio",
        ],
        [_table_row(row) for row in rows],
    )
    if rows:
        _report.write(
            "memory",
            rows=rows,
            settings={"rounds": arguments.rounds, "steps": arguments.steps, "bar": BAR},
            load_before=load_before,
            folder=arguments.output,
        )
    return int(failed)


def measure(request: dict[str, Json]) -> dict[str, Json]:
    """One peer's memory; runs in the child process. Bytes; None where not available."""
    workload = _workloads.WORKLOADS[request["workload"]]
    if request["peer"] == "distributary":
        import _distributary

        peer = _distributary.build(workload, _distributary.mirrored(request["replicas"]))
    else:
        import _handwritten

        peer = _handwritten.build(workload, _handwritten.LocalReplicas(request["replicas"]))
    # Those that placed the parameters; held, so that none is freed and replaced.
    others = _plans.programs()
    peer.losses(2)
    step_programs = [
        program for program in _plans.programs() if not any(program is other for other in others)
    ]
    peak_before_bytes = _processes.peak_bytes()  # resetting resets this one, too
    was_reset = _processes.reset_peak()
    peer.time_block(request["steps"])
    return {
        "program": _plans.largest_plan(step_programs),
        "steps_peak_bytes": _processes.peak_bytes() if was_reset else None,
        "life_peak_bytes": max(peak_before_bytes, _processes.peak_bytes()),
    }


def _summarize(workload: str, num_replicas: int, found: dict[str, list[Json]]) -> dict[str, Json]:
    def median(name: str, key: str) -> float | None:
        values = [run[key] for run in found.get(name, ())]
        return None if not values or None in values else statistics.median(values)

    def program(name: str) -> float | None:
        runs = found.get(name)
        return runs[0]["program"]["total_bytes"] if runs and runs[0]["program"] else None

    row: dict[str, Json] = {"workload": workload, "replicas": num_replicas, "processes": found}
    for key, function in (
        ("program", program),
        ("steps_peak", lambda name: median(name, "steps_peak_bytes")),
        ("life_peak", lambda name: median(name, "life_peak_bytes")),
    ):
        theirs, ours = (function(name) for name in PEERS)
        row[key] = {
            "handwritten_bytes": theirs,
            "distributary_bytes": ours,
            "ratio": ours / theirs if ours and theirs else None,
        }
    return row


def _table_row(row: dict[str, Json]) -> list[object]:
    def cells(key: str, *, with_bar: bool = True) -> list[object]:
        part = row[key]
        mebibytes = [
            None if part[f"{name}_bytes"] is None else f"{part[f'{name}_bytes'] / _MEBIBYTE:.1f}"
            for name in PEERS
        ]
        bar = [BAR, _report.verdict(part["ratio"], BAR)] if with_bar else []
        return [*mebibytes, part["ratio"], *bar]

    return [
        row["workload"],
        row["replicas"],
        *cells("program"),
        *cells("steps_peak"),
        *cells("life_peak", with_bar=False),
    ]


def _parse() -> argparse.Namespace:
    parser = _command_line.parser(__doc__, "processes per peer", 3, 1)
    parser.add_argument("--steps", type=int, help="steps while the peak is watched (20, quick: 4)")
    parser.add_argument("--only", help=f"some of {','.join(_workloads.STEP_WORKLOADS)}")
    _command_line.add_replicas(parser)
    parser.add_argument("--peers", default=",".join(PEERS))
    arguments = _command_line.parse(parser)
    arguments.steps = arguments.steps or (4 if arguments.quick else 20)
    return arguments


if __name__ == "__main__":
    _command_line.run(_parse(), main, measure)
