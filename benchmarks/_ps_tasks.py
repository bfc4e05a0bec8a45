"""Tasks of a cluster with parameter servers.

Run as a script, it is a worker or a server; `peers` belongs to the chief.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from _peers import Peer, scheduled
from _workloads import WORKLOADS

import distributary as dist
from distributary.cluster_resolver import TFConfigClusterResolver
from distributary.coordinator import ClusterCoordinator

__all__ = ["peers"]

_NUM_BATCHES = 32


def peers(names: Sequence[str]) -> list[Peer]:
    """Returns the workloads of distributary's `ParameterServerStrategy`."""
    partitioner = dist.experimental.partitioners.MinSizePartitioner(1 << 20, max_shards=2)
    strategy = dist.ParameterServerStrategy(TFConfigClusterResolver(), partitioner)
    coordinator = ClusterCoordinator(strategy)

    def one() -> Any:
        return np.float32(1)

    return [
        scheduled(name, coordinator, one)
        if name == "empty"
        else _trained(name, strategy, coordinator)
        for name in names
    ]


def _trained(
    name: str, strategy: dist.ParameterServerStrategy, coordinator: ClusterCoordinator
) -> Peer:
    import keras

    inputs, losses = keras.Input, keras.losses
    dense, embedding = keras.layers.Dense, keras.layers.Embedding
    loss_of: Callable[..., Any]
    with strategy.scope():
        if name == "mlp32":
            layers = [inputs((784,)), dense(128, "relu"), dense(10)]
            loss_of = losses.SparseCategoricalCrossentropy(from_logits=True)
        else:
            parameters = WORKLOADS[name].parameters()
            num_rows, width = parameters["table"].shape
            num_ids = len(parameters["hidden_kernel"]) // width
            layers = [inputs((num_ids,), dtype="int32"), embedding(num_rows, width)]
            layers += [keras.layers.Flatten(), dense(128, "relu"), dense(1)]
            loss_of = losses.BinaryCrossentropy(from_logits=True)
        model = keras.Sequential(layers)
        optimizer = keras.optimizers.Adagrad(0.01)
        optimizer.build(model.trainable_variables)

    def step(iterator: Any) -> Any:
        def replica_step(batch: Any) -> Any:
            x, y = batch
            with dist.GradientTape() as tape:
                loss = loss_of(y.reshape(len(y), -1), model(x))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)
            return loss

        return strategy.run(replica_step, args=(next(iterator),))

    iterator = iter(coordinator.create_per_worker_dataset(_BATCHES[name]))
    return scheduled(name, coordinator, step, (iterator,))


# Workers call these by name: they import this module, which lies beside their script.
def mlp32() -> Iterator[Any]:
    """Yields what every worker trains the MLP on."""
    return _endless("mlp32")


def embedding256() -> Iterator[Any]:
    """Yields what every worker trains the model with the table on."""
    return _endless("embedding256")


def _endless(name: str) -> Iterator[Any]:
    size = WORKLOADS[name].global_batch_size
    x, y = WORKLOADS[name].examples(_NUM_BATCHES)
    starts = range(0, len(x), size)
    while True:
        yield from ((x[start : start + size], y[start : start + size]) for start in starts)


_BATCHES: Mapping[str, Callable[[], Iterator[Any]]] = {
    "mlp32": mlp32,
    "embedding256": embedding256,
}


if __name__ == "__main__":
    dist.Server(TFConfigClusterResolver()).join()
