"""Peers of a process with JAX, by name: hand-written, of distributary, and of Keras alone.

    handwritten            steps of `_handwritten`
    control                the same again: what a ratio of two equal peers looks like
    distributary           steps of `strategy.run`
    packs                  the same with gradients in packs of 4 MiB
    mirrored, central      the same on all devices but the first, which holds the state of `central`
    start                  all from the strategy to the end of a step
    fit_handwritten        a loop of `_handwritten` that does what `fit` does
    fit_handwritten_keras  the same around the Keras model
    fit                    `fit` under a strategy
    keras, data_parallel   `fit` without a strategy; under `keras.distribution.DataParallel`
    KERAS/N                one of the last three with `steps_per_execution=N`
    KERAS/start            its first step
    psum, reduce, reduce_to, run    all-reduces over workers, and `control` of `psum`

The connection of workers is that of `MultiWorkerMirroredStrategy`; what is hand-written uses its
mesh alone.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

import _distributary
import _handwritten
import jax
import numpy as np
from _handwritten import AXIS, Replicas
from _peers import Peer, stepping, timed
from _workloads import WORKLOADS, Workload
from jax.sharding import PartitionSpec

import distributary as dist

__all__ = ["peers"]

Reduced: TypeAlias = Any

_PACK_BYTES = 4 << 20


def peers(
    names: Sequence[str],
    workload: str = "mlp32",
    num_replicas: int | None = None,
    num_steps: int = 0,
    num_bytes: int = 0,
) -> list[Peer]:
    """Returns peers of a process; without a number of replicas, of a worker of several.

    Args:
        names: In the order in which they are built.
        workload: What is trained.
        num_replicas: Devices that are used.
        num_steps: Longest epoch.
        num_bytes: Size of the array that is summed; 0 where something is trained.
    """
    np.random.seed(0)  # all workers shuffle alike
    if num_bytes:
        return [_all_reduce(name, num_bytes) for name in names]
    return [_trained(name, WORKLOADS[workload], num_replicas, num_steps) for name in names]


def _trained(name: str, workload: Workload, num_replicas: int | None, num_steps: int) -> Peer:
    if name in ("handwritten", "control"):
        return _handwritten.build(workload, _replicas(num_replicas), name)
    if name.startswith("fit_handwritten"):
        model = "keras" if name.endswith("keras") else "jax"
        return _handwritten.fit(name, model, workload, _replicas(num_replicas), num_steps)
    if name in ("distributary", "packs"):
        bytes_per_pack = _PACK_BYTES if name == "packs" else 0
        return _distributary.build(workload, _strategy(num_replicas), name, bytes_per_pack)
    if name in ("mirrored", "central"):
        others = [f"CPU:{i}" for i in range(1, len(jax.devices()))]
        central = dist.CentralStorageStrategy(others, "CPU:0")
        strategy = central if name == "central" else dist.MirroredStrategy(others)
        return _distributary.build(workload, strategy, name)
    if name == "start":
        return timed(name, lambda num_steps: _first_step(workload, num_steps))
    return _trained_by_keras(name, workload, num_replicas, num_steps)


def _trained_by_keras(
    name: str, workload: Workload, num_replicas: int | None, num_steps: int
) -> Peer:
    import _keras
    import keras

    way, _, how = name.partition("/")
    scope = None
    if way == "fit":
        scope = _strategy(num_replicas).scope()
    elif way == "data_parallel":
        devices = keras.distribution.list_devices("cpu")[:num_replicas]
        # `fit` asks for it again, so it stays.
        keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
    else:
        assert way == "keras", f"no peer is called {name}"
    model = _keras.build_model(workload, scope, int(how) if how.isdigit() else 1)
    if how == "start":
        return _keras.first_step(name, model, workload)
    return _keras.fit(name, model, workload, num_steps)


def _first_step(workload: Workload, num_steps: int) -> None:
    """Does all from the strategy, which connects workers, to the end of a step."""
    _distributary.build(workload, dist.MultiWorkerMirroredStrategy()).time_block(num_steps)


@cache
def _strategy(num_replicas: int | None) -> dist.Strategy:
    if num_replicas is None:
        return dist.MultiWorkerMirroredStrategy()
    return _distributary.mirrored(num_replicas)


def _replicas(num_replicas: int | None) -> Replicas:
    if num_replicas is None:
        return Replicas(_strategy(None).extended.mesh)
    return Replicas.of_this_process(num_replicas)


def _all_reduce(name: str, num_bytes: int) -> Peer:
    strategy, replicas = _strategy(None), _replicas(None)
    assert replicas.mesh is not None
    raw = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x, AXIS),
            mesh=replicas.mesh,
            in_specs=PartitionSpec(AXIS),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )
    rows = np.full((1, num_bytes // 4), 1.0 + jax.process_index(), np.float32)
    stacked = replicas.place(rows, PartitionSpec(AXIS))
    value = strategy.experimental_distribute_values_from_function(lambda context: rows[0])

    def summed(x: jax.Array) -> jax.Array:
        return dist.get_replica_context().all_reduce(dist.ReduceOp.SUM, x)

    def first_element(result: Reduced) -> float:
        return float(np.asarray(strategy.experimental_local_results(result)[0]).ravel()[0])

    calls: Mapping[str, Callable[[], Reduced]] = {
        "psum": lambda: raw(stacked),
        "control": lambda: raw(stacked),
        "reduce": lambda: strategy.reduce(dist.ReduceOp.SUM, value, axis=None),
        "reduce_to": lambda: strategy.extended.reduce_to(
            dist.ReduceOp.SUM, value, destinations=value
        ),
        "run": lambda: strategy.run(summed, args=(value,)),
    }
    call = calls[name]
    # One at a time.
    return stepping(
        name, lambda number: jax.block_until_ready(call()), lambda result: None, first_element
    )
