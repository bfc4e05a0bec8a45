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

import argparse
import contextlib
import json
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import _command_line
import _processes
import _report
import _timing

Json: TypeAlias = Any

BAR = 0.01  # pull of 4096 rows over pull of the table
SHAPE = (2**20, 64)
CLOSURES_PER_TURN = 3
_CHILD_TIMEOUT_SECONDS = 900.0
_TASK = """
import distributary as dist
dist.Server(dist.cluster_resolver.TFConfigClusterResolver()).join()
"""


def main(arguments: argparse.Namespace) -> int:
    """Measures, prints, writes; 1 if a measurement failed, else 0."""
    load_before = _report.load_average()
    requests = [
        ({"workload": f"{rows} rows", "rows": rows, "rounds": arguments.rounds}, 1)
        for rows in arguments.rows
    ]
    rows, failed = _processes.run_children(__file__, requests, _CHILD_TIMEOUT_SECONDS)
    print("\nMilliseconds, min / median; the ratio is that of the pulls, of medians.\n")
    _report.print_table(
        ["rows", "dense pull", "pull", "push (Adagrad)", "rows/s pulled", "ratio", "bar", ""],
        [
            [
                row["rows"],
                *(_both(row["seconds"][name]) for name in ("dense", "rows", "push")),
                f"{row['rows'] / statistics.median(row['seconds']['rows']):.3g}",
                row["ratio"]["median"],
                *((BAR, _report.verdict(row["ratio"]["median"], BAR)) * (row["rows"] == 4096)),
                *([None, None] * (row["rows"] != 4096)),
            ]
            for row in rows
        ],
    )
    _report.write(
        "ps_rows",
        rows=rows,
        settings={
            "rounds": arguments.rounds,
            "closures_per_turn": CLOSURES_PER_TURN,
            "shape": SHAPE,
            "bar": BAR,
        },
        load_before=load_before,
        folder=arguments.output,
    )
    return int(failed)


def measure(request: dict[str, Json]) -> Json:
    """Seconds of every round; runs in the child process, the chief."""
    import jax.numpy as jnp
    import numpy as np

    import distributary as dist

    num_rows = request["rows"]
    rng = np.random.default_rng(0)

    with _tasks() as cluster:
        resolver = dist.cluster_resolver.SimpleClusterResolver(
            dist.cluster_resolver.ClusterSpec(cluster), task_type="chief"
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
    ratio = _timing.summarize_ratio(seconds["rows"], seconds["dense"])
    return {**request, "seconds": seconds, "ratio": ratio}


@contextlib.contextmanager
def _tasks() -> Iterator[dict[str, list[str]]]:
    """Processes of a worker and a server; the addresses of the cluster."""
    with contextlib.ExitStack() as sockets:
        bound = [sockets.enter_context(socket.socket()) for _ in range(3)]
        for own in bound:
            own.bind(("127.0.0.1", 0))
        addresses = [f"127.0.0.1:{own.getsockname()[1]}" for own in bound]
    cluster = dict(
        zip(("chief", "worker", "ps"), [[address] for address in addresses], strict=True)
    )
    with contextlib.ExitStack() as stack:
        for task_type in ("worker", "ps"):
            config = {"cluster": cluster, "task": {"type": task_type, "index": 0}}
            environ = {**_processes.environment(1), "TF_CONFIG": json.dumps(config)}
            process = subprocess.Popen([sys.executable, "-c", _TASK], env=environ)
            stack.enter_context(process)
            stack.callback(process.kill)
        yield cluster


def _both(seconds: list[float]) -> str:
    return f"{1e3 * min(seconds):.2f} / {1e3 * statistics.median(seconds):.2f}"


def _parse() -> argparse.Namespace:
    parser = _command_line.parser(__doc__, "of all closures", 15, 3)
    parser.add_argument("--rows", default="256,4096,32768", help="numbers of rows, comma-separated")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = _command_line.parse(parser)
    arguments.rows = [int(number) for number in arguments.rows.split(",")]
    return arguments


if __name__ == "__main__":
    _command_line.run(_parse(), main, measure)
