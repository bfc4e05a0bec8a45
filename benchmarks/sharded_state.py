"""What does it change to shard the state of an optimizer instead of mirroring it?

Two models in one process take turns in Keras' `fit`, one under a `MirroredStrategy`, one with
`experimental_shard_optimizer_state=True`, after they have been trained alike.

    state    bytes of the optimizer's variables on one device; the bar is what is held mirrored,
             divided by the number of replicas
    program  what XLA plans for one device: arguments + outputs - donated + temporary buffers
    step     time of a step of `fit`

    python benchmarks/sharded_state.py
"""

import argparse
from typing import Any, TypeAlias

import _command_line
import _plans
import _processes
import _report
import _timing
import _workloads

Json: TypeAlias = Any

BAR = 1.05  # of the share of one device
WAYS = ("distributary", "sharded")
_WORKLOADS = ("mlp256", "transformer32")
_CHILD_TIMEOUT_SECONDS = 900.0
_KIBIBYTE = 2**10


def main(arguments: argparse.Namespace) -> int:
    """Measures, prints, writes; 1 if a measurement failed, else 0."""
    load_before = _report.load_average()
    requests = [
        (
            {
                "workload": workload.name,
                "replicas": num_replicas,
                "rounds": arguments.rounds,
                "block_seconds": 0.3 if arguments.quick else 2.0,
            },
            num_replicas,
        )
        for workload in _workloads.select(arguments.only, _WORKLOADS)
        for num_replicas in arguments.replicas
    ]
    rows, failed = _processes.run_children(__file__, requests, _CHILD_TIMEOUT_SECONDS)
    print("\nKiB per device, mirrored and sharded; times: sharded over mirrored.\n")
    header = ["workload", "R", "state", "", "x R", "bar", "", "program", "", "step", "loss"]
    _report.print_table(header, [_table_row(row) for row in rows])
    if rows:
        _report.write(
            "sharded_state",
            rows=rows,
            settings={"rounds": arguments.rounds, "bar": BAR},
            load_before=load_before,
            folder=arguments.output,
        )
    return int(failed)


def measure(request: dict[str, Json]) -> dict[str, Json]:
    """Both ways for one workload and replica count; runs in the child process."""
    import _keras

    workload = _workloads.WORKLOADS[request["workload"]]
    num_replicas = request["replicas"]
    max_steps = 200
    peers, state_bytes, program_bytes = [], {}, {}
    losses = {}
    for way in WAYS:
        model = _keras.build_model(way, workload, num_replicas)
        peer = _keras.KerasFit(way, model, workload, max_steps)
        others = _plans.programs()  # held, so that none is freed and replaced
        losses[way] = peer.losses(2)
        new = [p for p in _plans.programs() if not any(p is other for other in others)]
        plan = _plans.largest_plan(new)
        assert plan is not None
        program_bytes[way] = plan["total_bytes"]
        state_bytes[way] = sum(
            variable._value.addressable_shards[0].data.nbytes
            for variable in model.optimizer.variables
        )
        peers.append(peer)
    difference = _timing.check_agreement(losses, WAYS[0])["sharded"] / losses[WAYS[0]][-1]
    steps = min(max_steps, _timing.choose_steps(peers[0], request["block_seconds"]))
    seconds = _timing.interleave(peers, request["rounds"], dict.fromkeys(WAYS, steps))
    return {
        "workload": workload.name,
        "replicas": num_replicas,
        "state_bytes": state_bytes,
        "program_bytes": program_bytes,
        "loss_difference": difference,
        "seconds_per_step": seconds,
        "ratio": _timing.summarize_ratio(seconds["sharded"], seconds["distributary"]),
    }


def _table_row(row: dict[str, Json]) -> list[object]:
    mirrored, sharded = (row["state_bytes"][way] for way in WAYS)
    share = sharded / mirrored * row["replicas"]
    return [
        row["workload"],
        row["replicas"],
        *(f"{size / _KIBIBYTE:.1f}" for size in (mirrored, sharded)),
        share,
        BAR,
        _report.verdict(share, BAR),
        *(f"{row['program_bytes'][way] / _KIBIBYTE:.0f}" for way in WAYS),
        row["ratio"]["median"],
        f"{row['loss_difference']:.0e}",
    ]


def _parse() -> argparse.Namespace:
    parser = _command_line.parser(__doc__, "rounds", 7, 2)
    parser.add_argument("--only", help=f"some of {','.join(_WORKLOADS)}")
    _command_line.add_replicas(parser, "2,4")
    return _command_line.parse(parser)


if __name__ == "__main__":
    _command_line.run(_parse(), main, measure)
