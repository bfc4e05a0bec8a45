"""A task of a cluster with parameter servers; all run this program, as users' scripts do.

Workers and servers serve; the chief answers the questions of `parameter_server.py`. Imported by
processes that have this checkout's package on their path.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any, final

import numpy as np
from _served import serve_several

import distributary as dist
from distributary.cluster_resolver import TFConfigClusterResolver
from distributary.coordinator import ClusterCoordinator

BATCH_SIZES = {"mlp32": 32, "embedding256": 256}
NUM_ROWS, NUM_IDS, WIDTH = 100_000, 26, 64
_NUM_BATCHES = 32


def mlp32() -> Iterator[Any]:
    """What every worker trains the MLP on."""
    return _endless(_mlp_batches())


def embedding256() -> Iterator[Any]:
    """What every worker trains the model with the table on."""
    return _endless(_embedding_batches())


def _mlp_batches() -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    size = _NUM_BATCHES * BATCH_SIZES["mlp32"]
    x = rng.normal(size=(size, 784)).astype(np.float32)
    y = x[:, :10].argmax(1).astype(np.int32)
    return list(zip(np.split(x, _NUM_BATCHES), np.split(y, _NUM_BATCHES), strict=True))


def _embedding_batches() -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    size = _NUM_BATCHES * BATCH_SIZES["embedding256"]
    ids = rng.integers(0, NUM_ROWS, (size, NUM_IDS)).astype(np.int32)
    y = (ids[:, 0] % 2).astype(np.float32)[:, None]
    return list(zip(np.split(ids, _NUM_BATCHES), np.split(y, _NUM_BATCHES), strict=True))


def _endless(batches: list[Any]) -> Iterator[Any]:
    while True:
        yield from batches


@final
class _Scheduled:
    """A peer whose steps are closures; a block ends when all of them have."""

    def __init__(
        self, name: str, coordinator: ClusterCoordinator, step: Callable[..., Any], args: Any
    ) -> None:
        self.name = name
        self._coordinator = coordinator
        self._step = step
        self._args = args

    def losses(self, num_steps: int) -> list[float]:
        """Takes `num_steps` steps and returns the loss of each."""
        values = [self._coordinator.schedule(self._step, self._args) for _ in range(num_steps)]
        self._coordinator.join()
        return [float(value.fetch()) for value in values]

    def time_block(self, num_steps: int) -> float:
        """Takes `num_steps` steps and returns the seconds per step."""
        start = time.perf_counter()
        for _ in range(num_steps):
            self._coordinator.schedule(self._step, self._args)
        self._coordinator.join()
        return (time.perf_counter() - start) / num_steps

    def close(self) -> None:
        """Nothing to do: the process ends."""


def _peers() -> list[_Scheduled]:
    import keras

    partitioner = dist.experimental.partitioners.MinSizePartitioner(1 << 20, max_shards=2)
    partitioner = dist.experimental.partitioners.MinSizePartitioner(1 << 20, max_shards=2)
    strategy = dist.ParameterServerStrategy(TFConfigClusterResolver(), partitioner)
    coordinator = ClusterCoordinator(strategy)

    def trained(name: str, model: Any, loss_of: Any, make_batches: Any) -> _Scheduled:
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
        return _Scheduled(name, coordinator, step, (iterator,))

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
        _Scheduled("empty", coordinator, one, ()),
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
