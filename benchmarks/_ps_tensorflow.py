"""The same cluster as in `_ps_tasks.py` with TensorFlow's `ParameterServerStrategy`.

Its optimizers are the fused operations that Keras' used to call: Keras 3 has none for it.
"""

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from _ps_work import (
    BATCH_SIZES,
    NUM_IDS,
    NUM_ROWS,
    WIDTH,
    Scheduled,
    embedding_data,
    mlp_data,
)
from _served import serve_several

_RATE, _EPSILON = 0.01, 1e-7


def _dataset(data: Callable[[], tuple[np.ndarray, np.ndarray]], size: int) -> Callable[[], Any]:
    def make() -> Any:
        batches = tf.data.Dataset.from_tensor_slices(data()).batch(size, drop_remainder=True)
        return batches.cache().repeat().prefetch(2)

    return make


def _glorot(rng: np.random.Generator, *shape: int) -> np.ndarray:
    limit = np.sqrt(6 / sum(shape))
    return rng.uniform(-limit, limit, shape).astype(np.float32)


def _apply(variable: Any, slot: Any, gradient: Any) -> None:
    if isinstance(gradient, tf.IndexedSlices):
        ids, places = tf.unique(gradient.indices)
        rows = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(ids))
        tf.raw_ops.ResourceSparseApplyAdagradV2(
            var=variable.handle,
            accum=slot.handle,
            lr=_RATE,
            epsilon=_EPSILON,
            grad=rows,
            indices=ids,
        )
    else:
        tf.raw_ops.ResourceApplyAdagradV2(
            var=variable.handle, accum=slot.handle, lr=_RATE, epsilon=_EPSILON, grad=gradient
        )


def _peers() -> Iterator[Scheduled]:
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(1 << 20, max_shards=2)
    strategy = tf.distribute.ParameterServerStrategy(resolver, partitioner)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    rng = np.random.default_rng(0)

    def variables(*values: np.ndarray) -> list[Any]:
        with strategy.scope():
            return [tf.Variable(value) for value in values]

    def flat(variable: Any) -> list[Any]:
        return list(getattr(variable, "variables", [variable]))

    def trained(name: str, params: list[Any], loss_of: Any, data: Any) -> Scheduled:
        slots = variables(*(np.full(v.shape, 0.1, np.float32) for v in params))
        pieces = [piece for v in params for piece in flat(v)]
        slot_pieces = [piece for v in slots for piece in flat(v)]

        @tf.function
        def step(iterator: Any) -> Any:
            def replica_step(batch: Any) -> Any:
                with tf.GradientTape() as tape:
                    loss = loss_of(params, *batch)
                gradients = tape.gradient(loss, pieces)
                for variable, slot, gradient in zip(pieces, slot_pieces, gradients, strict=True):
                    _apply(variable, slot, gradient)
                return loss

            return strategy.run(replica_step, args=(next(iterator),))

        iterator = iter(coordinator.create_per_worker_dataset(_dataset(data, BATCH_SIZES[name])))
        return Scheduled(name, coordinator, step, (iterator,))

    def mlp_loss(params: Any, x: Any, y: Any) -> Any:
        hidden = tf.nn.relu(x @ params[0] + params[1])
        logits = hidden @ params[2] + params[3]
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
        return tf.reduce_mean(losses)

    def table_loss(params: Any, ids: Any, y: Any) -> Any:
        table, *dense = params
        rows = tf.nn.embedding_lookup(table, tf.reshape(ids, [-1]))
        hidden = tf.nn.relu(tf.reshape(rows, [-1, NUM_IDS * WIDTH]) @ dense[0] + dense[1])
        logits = hidden @ dense[2] + dense[3]
        return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=y, logits=logits))

    zeros = np.zeros
    mlp = variables(
        _glorot(rng, 784, 128), zeros(128, np.float32), _glorot(rng, 128, 10), zeros(10, np.float32)
    )
    yield trained("mlp32", mlp, mlp_loss, mlp_data)
    table = variables(
        rng.uniform(-0.05, 0.05, (NUM_ROWS, WIDTH)).astype(np.float32),
        _glorot(rng, NUM_IDS * WIDTH, 128),
        zeros(128, np.float32),
        _glorot(rng, 128, 1),
        zeros(1, np.float32),
    )
    yield trained("embedding256", table, table_loss, embedding_data)

    @tf.function
    def one() -> Any:
        return tf.constant(1.0)

    yield Scheduled("empty", coordinator, one, ())


def main() -> None:
    task = json.loads(os.environ["TF_CONFIG"])["task"]
    if task["type"] in ("worker", "ps"):
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        tf.distribute.Server(
            resolver.cluster_spec(),
            job_name=task["type"],
            task_index=task["index"],
            protocol="grpc",
            start=True,
        ).join()
    else:
        serve_several(lambda: list(_peers()))


if __name__ == "__main__":
    main()
