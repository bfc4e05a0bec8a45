"""What does it change to shard the state of an optimizer instead of mirroring it?

Two models in one process take turns in Keras' `fit`, one under a `MirroredStrategy`, one with
`experimental_shard_optimizer_state=True`, after they have been trained alike.

    state    bytes of the optimizer's variables on one device; the bar is what is held mirrored,
             divided by the number of replicas
    program  what XLA plans for one device: arguments + outputs - donated + temporary buffers
    step     time of a step of `fit`

    python benchmarks/sharded_state.py
"""

from argparse import Namespace
from collections.abc import Iterator

import _harness
from _harness import Request, Row, number, pair
from _plans import Plans
from _workloads import WORKLOADS
from fit_time import EPOCHS

BAR = 1.05  # of the share of one device


def requests(arguments: Namespace) -> Iterator[Request]:
    """Yields every workload with every number of replicas."""
    for workload in arguments.only:
        for num_replicas in arguments.replicas:
            yield {"workload": workload, "replicas": num_replicas}


def measure(request: Request) -> list[Row]:
    """Measures both ways for one workload and replica count."""
    import _keras

    workload, num_replicas = WORKLOADS[request["workload"]], request["replicas"]
    num_steps = EPOCHS[workload.name] // (4 if request["quick"] else 1)
    peers, numbers = [], []
    state_bytes = {}
    for way in ("distributary", "sharded"):
        model = _keras.build_model(way, workload, num_replicas)
        peer = _keras.fit(way, model, workload, num_steps)
        peer.num_steps, peer.group, peer.num_checked = num_steps, "fit", 2
        plans = Plans()
        peer.losses(1)
        program_bytes = plans.largest_new()
        assert program_bytes is not None
        state_bytes[way] = sum(
            variable._value.addressable_shards[0].data.nbytes
            for variable in model.optimizer.variables
        )
        numbers.append(number(f"state, {way}", state_bytes[way] / 1024, "KiB"))
        numbers.append(number(f"program, {way}", program_bytes / 1024, "KiB"))
        peers.append(peer)
    share = state_bytes["sharded"] / state_bytes["distributary"] * num_replicas
    numbers.append(number("state, share x replicas", share, "", BAR))
    pairs = [pair("sharded", "distributary")]
    row = _harness.compare(request, f"sharded state, {workload.name}", peers, pairs)
    return [{**row, "numbers": numbers}]


if __name__ == "__main__":
    _harness.run(
        requests,
        measure,
        rounds=(7, 2),
        options={
            "--only": {"choices": ("mlp256", "transformer32")},
            "--replicas": {"choices": (2, 4)},
        },
    )
