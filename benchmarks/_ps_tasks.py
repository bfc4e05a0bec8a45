"""Tasks of a cluster with parameter servers.

Run as a script, it is a worker or a server; `peers` belongs to the chief of `parameter_server.py`.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from _peers import Peer
from _ps_work import DATA, NUM_BATCHES, NUM_IDS, NUM_ROWS, WIDTH, scheduled

import distributary as dist
from distributary.cluster_resolver import TFConfigClusterResolver
from distributary.coordinator import ClusterCoordinator

__all__ = ["peers"]


def peers() -> list[Peer]:
    """Returns the workloads of distributary's `ParameterServerStrategy`."""
    import keras

    partitioner = dist.experimental.partitioners.MinSizePartitioner(1 << 20, max_shards=2)
    strategy = dist.ParameterServerStrategy(TFConfigClusterResolver(), partitioner)
    coordinator = ClusterCoordinator(strategy)

    def trained(name: str, layers: list[Any], loss_of: Callable[..., Any]) -> Peer:
        with strategy.scope():
            model = keras.Sequential(layers)
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

        iterator = iter(coordinator.create_per_worker_dataset(_BATCHES[name]))
        return scheduled(name, coordinator, step, (iterator,))

    def one() -> Any:
        return np.float32(1)

    inputs, losses = keras.Input, keras.losses
    dense, embedding = keras.layers.Dense, keras.layers.Embedding
    return [
        trained(
            "mlp32",
            [inputs((784,)), dense(128, "relu"), dense(10)],
            losses.SparseCategoricalCrossentropy(from_logits=True),
        ),
        trained(
            "embedding256",
            [
                *(inputs((NUM_IDS,), dtype="int32"), embedding(NUM_ROWS, WIDTH)),
                *(keras.layers.Flatten(), dense(128, "relu"), dense(1)),
            ],
            losses.BinaryCrossentropy(from_logits=True),
        ),
        scheduled("empty", coordinator, one),
    ]


# Workers call these by name: they import this module, which lies beside their script.
def mlp32() -> Iterator[Any]:
    """Yields what every worker trains the MLP on."""
    return _endless("mlp32")


def embedding256() -> Iterator[Any]:
    """Yields what every worker trains the model with the table on."""
    return _endless("embedding256")


def _endless(name: str) -> Iterator[Any]:
    x, y = (np.split(array, NUM_BATCHES) for array in DATA[name]())
    while True:
        yield from zip(x, y, strict=True)


_BATCHES = {"mlp32": mlp32, "embedding256": embedding256}


if __name__ == "__main__":
    dist.Server(TFConfigClusterResolver()).join()
