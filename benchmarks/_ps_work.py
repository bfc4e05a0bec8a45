"""The work of `parameter_server.py`, for tasks of distributary and of TensorFlow: NumPy only."""

import time
from collections.abc import Callable
from typing import Any, final

import numpy as np

BATCH_SIZES = {"mlp32": 32, "embedding256": 256}
NUM_BATCHES = 32
NUM_ROWS, NUM_IDS, WIDTH = 100_000, 26, 64


def mlp_data() -> tuple[np.ndarray, np.ndarray]:
    """What the MLP is trained on: of all batches the inputs, float32, and the classes, int32."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_BATCHES * BATCH_SIZES["mlp32"], 784)).astype(np.float32)
    return x, x[:, :10].argmax(1).astype(np.int32)


def embedding_data() -> tuple[np.ndarray, np.ndarray]:
    """What the model with the table is trained on: the ids, int32, and the labels, float32."""
    rng = np.random.default_rng(0)
    size = NUM_BATCHES * BATCH_SIZES["embedding256"]
    ids = rng.integers(0, NUM_ROWS, (size, NUM_IDS)).astype(np.int32)
    return ids, (ids[:, 0] % 2).astype(np.float32)[:, None]


@final
class Scheduled:
    """A peer whose steps are closures of a `ClusterCoordinator`; a block ends when all have."""

    def __init__(
        self, name: str, coordinator: Any, step: Callable[..., Any], args: tuple[Any, ...]
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
