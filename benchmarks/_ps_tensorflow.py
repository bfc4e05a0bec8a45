"""The same cluster as in `_ps_tasks.py` with TensorFlow's `ParameterServerStrategy`.

Its optimizers are the fused operations that Keras' used to call: Keras 3 has none for it. Run as a
script, it is a worker or a server; `peers` belongs to the chief.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from _peers import Peer, scheduled
from _tensorflow import LOSSES
from _workloads import WORKLOADS

__all__ = ["peers"]

_NUM_BATCHES = 32
_RATE, _EPSILON = 0.01, 1e-7


def _apply(variable: Any, slot: Any, gradient: Any) -> None:
    common = {"var": variable.handle, "accum": slot.handle, "lr": _RATE, "epsilon": _EPSILON}
    if isinstance(gradient, tf.IndexedSlices):
        ids, places = tf.unique(gradient.indices)
        rows = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(ids))
        tf.raw_ops.ResourceSparseApplyAdagradV2(**common, grad=rows, indices=ids)
    else:
        tf.raw_ops.ResourceApplyAdagradV2(**common, grad=gradient)


def peers(names: Sequence[str]) -> list[Peer]:
    """Returns the workloads of TensorFlow's `ParameterServerStrategy`."""
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(1 << 20, max_shards=2)
    strategy = tf.distribute.ParameterServerStrategy(resolver, partitioner)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

    @tf.function
    def one() -> Any:
        return tf.constant(1.0)

    return [
        scheduled(name, coordinator, one)
        if name == "empty"
        else _trained(name, strategy, coordinator)
        for name in names
    ]


def _trained(name: str, strategy: Any, coordinator: Any) -> Peer:
    workload = WORKLOADS[name]
    values = workload.parameters()
    with strategy.scope():
        params = {key: tf.Variable(value) for key, value in values.items()}
        slots = {
            key: tf.Variable(np.full(value.shape, 0.1, np.float32)) for key, value in values.items()
        }
    pieces, slot_pieces = list(_pieces_of(params)), list(_pieces_of(slots))

    @tf.function
    def step(iterator: Any) -> Any:
        def replica_step(batch: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = LOSSES[workload.model](params, *batch) / workload.global_batch_size
            gradients = tape.gradient(loss, pieces)
            for variable, slot, gradient in zip(pieces, slot_pieces, gradients, strict=True):
                _apply(variable, slot, gradient)
            return loss

        return strategy.run(replica_step, args=(next(iterator),))

    def make_batches() -> Any:
        rows = tf.data.Dataset.from_tensor_slices(workload.examples(_NUM_BATCHES))
        batches = rows.batch(workload.global_batch_size, drop_remainder=True)
        return batches.cache().repeat().prefetch(2)

    iterator = iter(coordinator.create_per_worker_dataset(make_batches))
    return scheduled(name, coordinator, step, (iterator,))


def _pieces_of(variables: Mapping[str, Any]) -> Iterator[Any]:
    for variable in variables.values():
        yield from getattr(variable, "variables", [variable])


if __name__ == "__main__":
    task = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    tf.distribute.Server(
        task.cluster_spec(),
        job_name=task.task_type,
        task_index=task.task_id,
        protocol="grpc",
        start=True,
    ).join()
