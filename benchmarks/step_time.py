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

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence

import _harness
from _harness import Request, Row, pair
from _peers import Job, Peer, command
from _workloads import STEP_WORKLOADS, WORKLOADS

BARS = {"mlp32": 1.15, "mlp256": 1.05, "transformer32": 1.05, "wide256": 1.15}
"""Time per step over hand-written JAX, median over the rounds; nothing is asked of others."""

PEERS = ("handwritten", "distributary", "control", "tensorflow")


def requests(arguments: Namespace) -> Iterator[Request]:
    """Yields every workload with every number of replicas."""
    for workload in arguments.only:
        for num_replicas in arguments.replicas:
            yield {"workload": workload, "replicas": num_replicas}


def measure(request: Request) -> list[Row]:
    """Measures one workload at one replica count."""
    name = request["workload"]
    peers = [
        _build(peer, request)
        for peer in request["peers"]
        if peer != "tensorflow" or peer in request["others"]
    ]
    pairs = [
        pair("distributary", "handwritten", request.get("bar", BARS.get(name))),
        pair("distributary", "tensorflow"),
        pair("control", "handwritten"),
    ]
    return [_harness.compare(request, f"`strategy.run`, {name}", peers, pairs)]


def _build(name: str, request: Request) -> Peer:
    # Imported here: the process that only starts others needs neither JAX nor distributary.
    workload, num_replicas = WORKLOADS[request["workload"]], request["replicas"]
    if name == "tensorflow":
        served = command(
            "_tensorflow",
            request["tensorflow_python"],
            workload=workload.name,
            num_replicas=num_replicas,
        )
        return Job(name, [served], [_harness.foreign_environment()]).peer(name)
    if name == "distributary":
        import _distributary

        return _distributary.build(workload, _distributary.mirrored(num_replicas))
    import _handwritten

    return _handwritten.build(workload, _handwritten.LocalReplicas(num_replicas), name)


def check(rows: Sequence[Row]) -> list[str]:
    """Returns where hand-written steps differ from themselves at another replica count."""
    problems = []
    first: dict[str, Row] = {}
    for row in rows:
        reference = first.setdefault(row["what"], row)
        both = (one["losses"]["handwritten"] for one in (row, reference))
        gap = max(abs(a - b) for a, b in zip(*both, strict=True))
        if not gap <= _harness.TOLERANCES["cpu"]:
            problems.append(
                f"{row['what']}: hand-written at {row['replicas']} and at {reference['replicas']}"
                f" replicas differ by {gap:.1e} in the loss; at most"
                f" {_harness.TOLERANCES['cpu']:g} is allowed."
            )
    return problems


if __name__ == "__main__":
    _harness.run(
        requests,
        measure,
        rounds=(15, 3),
        check=check,
        options={
            "--only": {"choices": STEP_WORKLOADS},
            "--replicas": {"choices": (1, 2, 4)},
            "--peers": {"choices": PEERS, "help": "the first is the yardstick"},
            "--tensorflow-python": {"default": sys.executable, "metavar": "PATH"},
        },
    )
