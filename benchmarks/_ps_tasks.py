"""A task of a cluster with parameter servers; all run this program, as users' scripts do.

Workers and servers serve; the chief answers the questions of `parameter_server.py`. Imported by
processes that have this checkout's package on their path.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from _ps_work import NUM_BATCHES, NUM_IDS, NUM_ROWS, WIDTH, Scheduled, embedding_data, mlp_data
from _served import serve_several

import distributary as dist
from distributary.cluster_resolver import TFConfigClusterResolver
from distributary.coordinator import ClusterCoordinator


def mlp32() -> Iterator[Any]:
    """What every worker trains the MLP on."""
    return _endless(mlp_data)


def embedding256() -> Iterator[Any]:
    """What every worker trains the model with the table on."""
    return _endless(embedding_data)


def _endless(data: Callable[[], tuple[np.ndarray, np.ndarray]]) -> Iterator[Any]:
    x, y = (np.split(array, NUM_BATCHES) for array in data())
    while True:
        yield from zip(x, y, strict=True)


def _peers() -> list[Scheduled]:
    import keras

    partitioner = dist.experimental.partitioners.MinSizePartitioner(1 << 20, max_shards=2)
    strategy = dist.ParameterServerStrategy(TFConfigClusterResolver(), partitioner)
    coordinator = ClusterCoordinator(strategy)

    def trained(name: str, model: Any, loss_of: Any, make_batches: Any) -> Scheduled:
        with strategy.scope():
            optimizer = keras.optimizers.Adagrad(0.01)
            optimizer.build(model.trainable_variables)

        def step(iterator: Any) -> Any:
            def replica_step(batch: Any) -> Any:
                x, y = batch
                with dist.GradientTape() as tape:
                    loss = loss_of(y, model(x))
                gradients = tape.gradient(loss, model.trainable_variables)
                optimizer.apply(gradients, model.trainable_variables)
                return loss

            return strategy.run(replica_step, args=(next(iterator),))

        iterator = iter(coordinator.create_per_worker_dataset(make_batches))
        return Scheduled(name, coordinator, step, (iterator,))

    with strategy.scope():
        mlp = keras.Sequential(
            [keras.Input((784,)), keras.layers.Dense(128, "relu"), keras.layers.Dense(10)]
        )
        table = keras.Sequential(
            [
                keras.Input((NUM_IDS,), dtype="int32"),
                keras.layers.Embedding(NUM_ROWS, WIDTH),
                keras.layers.Flatten(),
                keras.layers.Dense(128, "relu"),
                keras.layers.Dense(1),
            ]
        )

    def one() -> Any:
        return np.float32(1)

    return [
        trained("mlp32", mlp, keras.losses.SparseCategoricalCrossentropy(from_logits=True), mlp32),
        trained(
            "embedding256", table, keras.losses.BinaryCrossentropy(from_logits=True), embedding256
        ),
        Scheduled("empty", coordinator, one, ()),
    ]


def main() -> None:
    """Runs the task that TF_CONFIG names."""
    resolver = TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        dist.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id).join()
    else:
        serve_several(_peers)


if __name__ == "__main__":
    main()
