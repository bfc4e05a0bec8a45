"""What does `CentralStorageStrategy` save on the devices that compute, and what does it cost?

The same model, optimizer and batches under `CentralStorageStrategy` and `MirroredStrategy`, on the
same logical CPU devices; the variables of the first lie on a further one.

    between    bytes of arrays on one computing device between steps, batches left out
    step       what XLA plans for one computing device: arguments + outputs - donated + temporary
               buffers of the largest program that runs on all of them
    time       of a step; copies between logical devices cost little, those to a GPU more

    python benchmarks/central_storage.py
"""

import argparse
import sys
from typing import Any, TypeAlias

import _command_line
import _plans
import _processes
import _report
import _timing
import _workloads

Json: TypeAlias = Any

WORKLOADS = ("mlp256", "transformer32", "wide256_dense")
TOLERANCE = 1e-3
_CHILD_TIMEOUT_SECONDS = 600.0
_MEBIBYTE = 2**20


def main(arguments: argparse.Namespace) -> int:
    """Measures, prints, writes; 1 if a measurement failed, else 0."""
    load_before = _report.load_average()
    requests = [
        (
            {
                "workload": workload.name,
                "replicas": num_replicas,
                "rounds": arguments.rounds,
                "block_seconds": 0.1 if arguments.quick else 0.4,
            },
            num_replicas + 1,
        )
        for workload in _workloads.select(arguments.only, WORKLOADS)
        for num_replicas in arguments.replicas
    ]
    rows, failed = _processes.run_children(__file__, requests, _CHILD_TIMEOUT_SECONDS)
    for row in rows:
        if not row["loss_difference"] <= TOLERANCE:
            print(f"FAILED: losses differ by {row['loss_difference']:.1e}", file=sys.stderr)
            failed = True
    print("\nMiB on one computing device; ratios are central / mirrored.\n")
    _report.print_table(
        [
            "workload",
            "R",
            "between, mirrored",
            "central",
            "ratio",
            "step, mirrored",
            "central",
            "ratio",
            "parameter device",
            "time ratio",
            "of min",
        ],
        [_table_row(row) for row in rows],
    )
    if rows:
        _report.write(
            "central_storage",
            rows=rows,
            settings={"rounds": arguments.rounds},
            load_before=load_before,
            folder=arguments.output,
        )
    return int(failed)


def measure(request: dict[str, Json]) -> dict[str, Json]:
    """Both strategies at one replica count; runs in the child process."""
    import _distributary

    import distributary as dist

    workload = _workloads.WORKLOADS[request["workload"]]
    num_replicas = request["replicas"]
    devices = [f"CPU:{i + 1}" for i in range(num_replicas)]
    strategies = {
        "mirrored": lambda: dist.MirroredStrategy(devices),
        "central": lambda: dist.CentralStorageStrategy(devices, "CPU:0"),
    }
    peers, losses, memory = [], {}, {}
    batches = [array for batch in workload.batches(num_replicas) for array in batch]
    batch_bytes = sum(array.nbytes for array in batches) // num_replicas
    for name, make in strategies.items():
        before, others = _bytes_by_device(), _plans.programs()
        peer = _distributary.build(workload, make(), name)
        losses[name] = peer.losses(10)
        after = _bytes_by_device()
        on_all = [
            program
            for program in _plans.programs()
            if not any(program is other for other in others)
            and len(program.local_devices()) == num_replicas
        ]
        memory[name] = {
            "between_bytes": after[1] - before[1] - batch_bytes,
            "parameter_device_bytes": after[0] - before[0],
            "step": _plans.largest_plan(on_all),
        }
        peers.append(peer)
    difference = _timing.check_agreement(losses, "mirrored")["central"]
    steps = _timing.choose_steps(peers[0], request["block_seconds"])
    seconds = _timing.interleave(peers, request["rounds"], dict.fromkeys(strategies, steps))
    return {
        "workload": workload.name,
        "replicas": num_replicas,
        "memory": memory,
        "loss_difference": difference,
        "steps_per_block": steps,
        "seconds": seconds,
        "time_ratio": _timing.summarize_ratio(seconds["central"], seconds["mirrored"]),
    }


def _bytes_by_device() -> list[int]:
    """Bytes of live arrays on each device of this process."""
    import jax

    found = dict.fromkeys(jax.devices(), 0)
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            found[shard.device] += shard.data.nbytes
    return list(found.values())


def _table_row(row: dict[str, Json]) -> list[object]:
    mirrored, central = row["memory"]["mirrored"], row["memory"]["central"]

    def compared(theirs: int, ours: int) -> list[object]:
        return [f"{theirs / _MEBIBYTE:.2f}", f"{ours / _MEBIBYTE:.2f}", ours / theirs]

    step: list[object] = [None, None, None]
    if mirrored["step"] and central["step"]:
        step = compared(mirrored["step"]["total_bytes"], central["step"]["total_bytes"])
    return [
        row["workload"],
        row["replicas"],
        *compared(mirrored["between_bytes"], central["between_bytes"]),
        *step,
        f"{central['parameter_device_bytes'] / _MEBIBYTE:.2f}",
        row["time_ratio"]["median"],
        row["time_ratio"]["of_minima"],
    ]


def _parse() -> argparse.Namespace:
    parser = _command_line.parser(__doc__, "timed blocks per strategy", 9, 3)
    parser.add_argument("--only", help=f"some of {','.join(WORKLOADS)}")
    _command_line.add_replicas(parser, "2,4")
    return _command_line.parse(parser)


if __name__ == "__main__":
    _command_line.run(_parse(), main, measure)
