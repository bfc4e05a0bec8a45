"""A worker of a JAX job: hand-written and distributary peers over the same connection.

The connection is that of `MultiWorkerMirroredStrategy`; what is hand-written uses its mesh alone.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import _distributary
import _handwritten
import jax
import numpy as np
from _handwritten import AXIS, WorkerReplicas
from _peers import Peer, stepping, timed
from _workloads import WORKLOADS, Workload
from jax.sharding import PartitionSpec

import distributary as dist

Reduced: TypeAlias = Any


def peers(
    workload: str | None = None,
    num_steps: int = 0,
    names: Sequence[str] = (),
    num_bytes: Sequence[int] = (),
) -> list[Peer]:
    """Returns peers of a worker.

    Args:
        workload: What is trained; None for other peers.
        num_steps: Longest epoch.
        names: Which peers train.
        num_bytes: Sizes of arrays to be summed over the workers. Without these, and without a
            workload, the only peer is `start`, which does not connect before it is timed.
    """
    if workload is not None:
        return _train(WORKLOADS[workload], num_steps, names)
    return _all_reduce(num_bytes) if num_bytes else [timed("start", _first_step)]


def _first_step(num_steps: int) -> None:
    """Does all from the strategy to the end of a step; once per process."""
    strategy = dist.MultiWorkerMirroredStrategy()
    _distributary.build(WORKLOADS["mlp32"], strategy).time_block(num_steps)


def _train(workload: Workload, num_steps: int, names: Sequence[str]) -> list[Peer]:
    strategy = dist.MultiWorkerMirroredStrategy()
    replicas = WorkerReplicas(strategy.extended.mesh)

    def handwritten(name: str) -> Peer:
        return _handwritten.build(workload, replicas, name)

    def handwritten_fit(model: str) -> Callable[[str], Peer]:
        return lambda name: _handwritten.fit(name, model, workload, replicas, num_steps)

    def fit(name: str) -> Peer:
        import _keras

        model = _keras.build_model("multi_worker", workload, strategy.num_replicas_in_sync)
        return _keras.fit(name, model, workload, num_steps)

    builders: Mapping[str, Callable[[str], Peer]] = {
        "handwritten": handwritten,
        "control": handwritten,
        "distributary": lambda name: _distributary.build(workload, strategy, name),
        "fit_handwritten": handwritten_fit("jax"),
        "fit_handwritten_keras": handwritten_fit("keras"),
        "fit": fit,
    }
    np.random.seed(0)  # all workers shuffle alike
    return [builders[name](name) for name in names]


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
            stepping(f"{name}_{num_bytes}", one_at_a_time(call), lambda result: None, first_element)
            for name, call in calls.items()
        ]

    return [peer for num_bytes in sizes for peer in peers_of(num_bytes)]
