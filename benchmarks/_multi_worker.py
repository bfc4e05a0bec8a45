"""A worker of a JAX job: hand-written and distributary peers over the same connection.

    train WORKLOAD MAX_STEPS NAME..   peers that take steps, or epochs of at most MAX_STEPS
    all_reduce BYTES..                peers that sum one array over the workers
    start                             one peer that does not connect before it is timed

The connection is that of `MultiWorkerMirroredStrategy`; what is hand-written uses its mesh alone.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, final

import _distributary
import _handwritten
import jax
import numpy as np
from _fit_handwritten import HandwrittenFit
from _handwritten import AXIS, WorkerReplicas
from _served import serve_several
from _timing import InProcessPeer, Peer
from _workloads import WORKLOADS, Workload
from jax.sharding import PartitionSpec

import distributary as dist

Reduced: TypeAlias = Any


@final
class _FirstStep:
    """A `Peer` whose only block is all from the strategy to the end of a step."""

    name = "start"

    def losses(self, num_steps: int) -> list[float]:
        """None; the answer tells that all is imported."""
        return []

    def time_block(self, num_steps: int) -> float:
        """Seconds; once per process."""
        start = time.perf_counter()
        strategy = dist.MultiWorkerMirroredStrategy()
        _distributary.build(WORKLOADS["mlp32"], strategy).time_block(num_steps)
        return time.perf_counter() - start

    def close(self) -> None:
        """Nothing to do."""


def _train(workload: Workload, max_steps: int, names: Sequence[str]) -> list[Peer]:
    strategy = dist.MultiWorkerMirroredStrategy()
    replicas = WorkerReplicas(strategy.extended.mesh)

    def handwritten(name: str) -> Peer:
        return _handwritten.build(workload, replicas, name)

    def handwritten_fit(model: str) -> Callable[[str], Peer]:
        return lambda name: HandwrittenFit(name, model, workload, replicas, max_steps)

    def fit(name: str) -> Peer:
        import _keras

        model = _keras.build_model("multi_worker", workload, strategy.num_replicas_in_sync)
        return _keras.KerasFit(name, model, workload, max_steps)

    peers: Mapping[str, Callable[[str], Peer]] = {
        "handwritten": handwritten,
        "control": handwritten,
        "distributary": lambda name: _distributary.build(workload, strategy, name),
        "fit_handwritten": handwritten_fit("jax"),
        "fit_handwritten_keras": handwritten_fit("keras"),
        "fit": fit,
    }
    np.random.seed(0)  # all workers shuffle alike
    return [peers[name](name) for name in names]


def _all_reduce(sizes: Sequence[int]) -> list[Peer]:
    strategy = dist.MultiWorkerMirroredStrategy()
    replicas = WorkerReplicas(strategy.extended.mesh)
    raw = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x, AXIS),
            mesh=replicas.mesh,
            in_specs=PartitionSpec(AXIS),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )

    def summed(x: jax.Array) -> jax.Array:
        return dist.get_replica_context().all_reduce(dist.ReduceOp.SUM, x)

    def first_element(result: Reduced) -> float:
        return float(np.asarray(strategy.experimental_local_results(result)[0]).ravel()[0])

    def peers_of(num_bytes: int) -> list[Peer]:
        rows = np.full((1, num_bytes // 4), 1.0 + jax.process_index(), np.float32)
        stacked = replicas.place(rows, PartitionSpec(AXIS))
        value = strategy.experimental_distribute_values_from_function(lambda context: rows[0])
        calls: Mapping[str, Callable[[], Reduced]] = {
            "psum": lambda: raw(stacked),
            "control": lambda: raw(stacked),
            "reduce": lambda: strategy.reduce(dist.ReduceOp.SUM, value, axis=None),
            "reduce_to": lambda: strategy.extended.reduce_to(
                dist.ReduceOp.SUM, value, destinations=value
            ),
            "run": lambda: strategy.run(summed, args=(value,)),
        }

        def one_at_a_time(call: Callable[[], Reduced]) -> Callable[[int], Reduced]:
            return lambda number: jax.block_until_ready(call())

        return [
            InProcessPeer(
                f"{name}_{num_bytes}", one_at_a_time(call), lambda result: None, first_element
            )
            for name, call in calls.items()
        ]

    return [peer for num_bytes in sizes for peer in peers_of(num_bytes)]


def _build(arguments: argparse.Namespace) -> list[Peer]:
    if arguments.what == "train":
        return _train(WORKLOADS[arguments.workload], arguments.max_steps, arguments.names)
    if arguments.what == "all_reduce":
        return _all_reduce(arguments.num_bytes)
    return [_FirstStep()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    what = parser.add_subparsers(dest="what", required=True)
    train = what.add_parser("train")
    train.add_argument("workload", choices=list(WORKLOADS))
    train.add_argument("max_steps", type=int)
    train.add_argument("names", nargs="+")
    what.add_parser("all_reduce").add_argument("num_bytes", type=int, nargs="+")
    what.add_parser("start")
    chosen = parser.parse_args()
    serve_several(lambda: _build(chosen))
