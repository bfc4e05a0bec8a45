"""What does it save that only the rows of a table travel that a step looks up?

A table of 1M x 64 float32 on a parameter server, a worker and the server in processes of their own,
linked by gRPC on loopback. Closures take turns:

    dense   pulls the table as a whole
    rows    looks up as many distinct rows as `--rows` says, and pulls these
    train   looks them up and pushes their gradients, which the server applies by Adagrad

Each turn is a few closures, as steps follow steps in training: the first after 256 MiB have passed
meets cold caches. Times are those that the worker counts, per closure: of its pulls, and of its
pushes until they are applied.

    python benchmarks/ps_rows.py
"""

import contextlib
import statistics
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import _harness
from _clusters import SERVER, Cluster
from _harness import Request, Row, number, pair

BAR = 0.01  # pull of 4096 rows over pull of the table
SHAPE = (2**20, 64)
CLOSURES_PER_TURN = 3


def requests(arguments: Namespace) -> Iterator[Request]:
    """Yields the numbers of rows."""
    for num_rows in arguments.rows:
        yield {"replicas": "a worker, a server", "num_rows": num_rows, "devices": 1}


def measure(request: Request) -> list[Row]:
    """Measures one number of rows; its process is the chief."""
    import jax.numpy as jnp
    import numpy as np

    import distributary as dist

    num_rows = request["num_rows"]
    rng = np.random.default_rng(0)

    with contextlib.closing(
        Cluster(SERVER, _harness.environment(), chief=1, worker=1, ps=1)
    ) as cluster:
        cluster.start("worker", "ps")
        resolver = dist.cluster_resolver.SimpleClusterResolver(
            dist.cluster_resolver.ClusterSpec(cluster.spec), task_type="chief"
        )
        strategy = dist.ParameterServerStrategy(resolver)
        with strategy.scope():
            table = dist.Variable(np.zeros(SHAPE, np.float32), name="table")
            total = dist.Variable(np.full(SHAPE, 0.1, np.float32), name="total")
        coordinator = dist.coordinator.ClusterCoordinator(strategy)

        def dense() -> Any:
            return table.value()[:1].sum()

        def rows(ids: Any) -> Any:
            return dist.embedding_lookup(table, ids).sum()

        def train(ids: Any) -> Any:
            with dist.GradientTape() as tape:
                loss = rows(ids)
            context = dist.get_replica_context()
            gradient = context.all_reduce("SUM", tape.gradient(loss, table))
            total.assign_add(gradient * gradient)
            table.assign_sub(0.1 * gradient / jnp.sqrt(total.value()))
            return loss

        def seconds_of(phase: str, function: Callable[..., Any], *args: Any) -> float:
            before = getattr(coordinator.statistics().workers[0], f"{phase}_seconds")
            for _ in range(CLOSURES_PER_TURN):
                coordinator.schedule(function, args=args).fetch()
            after = getattr(coordinator.statistics().workers[0], f"{phase}_seconds")
            return float(after - before) / CLOSURES_PER_TURN

        def step(ids: Any) -> Any:
            return strategy.run(train, args=(ids,))

        seconds: dict[str, list[float]] = {"dense": [], "rows": [], "push": []}
        for round_number in range(request["rounds"] + 1):
            ids = rng.permutation(SHAPE[0])[:num_rows].astype(np.int32)
            found = {
                "dense": seconds_of("pull", dense),
                "rows": seconds_of("pull", rows, ids),
                "push": seconds_of("push", step, ids),
            }
            if round_number:  # the first one compiles
                for name, value in found.items():
                    seconds[name].append(value)
        strategy._cluster.close()
    return [
        _harness.row(
            f"{num_rows} rows",
            request["replicas"],
            "ms",
            {name: [1e3 * value for value in values] for name, values in seconds.items()},
            [pair("rows", "dense", BAR if num_rows == 4096 else None)],
            numbers=[number("pulled", num_rows / statistics.median(seconds["rows"]), "rows/s")],
        )
    ]


if __name__ == "__main__":
    _harness.run(
        requests,
        measure,
        rounds=(15, 3),
        options={"--rows": {"choices": (256, 4096, 32768), "help": "numbers of rows"}},
    )
