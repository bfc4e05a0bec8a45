"""How much memory does a step take, next to the same step written by hand in JAX?

Two answers for every workload and replica count, each peer in processes of its own:

    program   what XLA plans for one device: arguments + outputs - donated + temporary buffers
    resident  peak resident memory of the process while it takes steps, compilation excluded, where
              the system can reset the peak (Linux)

    python benchmarks/memory.py
"""

from argparse import Namespace
from collections.abc import Iterator

import _harness
from _harness import MEBIBYTE, Request, Row, pair
from _plans import Plans
from _workloads import STEP_WORKLOADS, WORKLOADS

BAR = 1.05


def requests(arguments: Namespace) -> Iterator[Request]:
    """Yields a process for every peer of every round."""
    for workload in arguments.only:
        for num_replicas in arguments.replicas:
            for _ in range(arguments.rounds):
                for peer in ("handwritten", "distributary"):
                    yield {"workload": workload, "replicas": num_replicas, "peer": peer}


def measure(request: Request) -> list[Row]:
    """Measures one peer once."""
    workload, num_replicas = WORKLOADS[request["workload"]], request["replicas"]
    if request["peer"] == "distributary":
        import _distributary

        peer = _distributary.build(workload, _distributary.mirrored(num_replicas))
    else:
        import _handwritten

        peer = _handwritten.build(workload, _handwritten.LocalReplicas(num_replicas))
    plans = Plans()
    peer.losses(2)
    found = {"memory of the program": plans.largest_new()}
    was_reset = _harness.reset_peak()
    peer.time_block(4 if request["quick"] else 20)
    if was_reset:
        found["resident memory"] = _harness.peak_bytes()
    pairs = [pair("distributary", "handwritten", BAR)]
    return [
        _harness.row(f"{what}, {workload.name}", num_replicas, "MiB", {peer.name: [size]}, pairs)
        for what, num_bytes in found.items()
        if num_bytes is not None
        for size in [num_bytes / MEBIBYTE]
    ]


if __name__ == "__main__":
    _harness.run(
        requests,
        measure,
        rounds=(3, 1),
        options={"--only": {"choices": STEP_WORKLOADS}, "--replicas": {"choices": (1, 2, 4)}},
    )
