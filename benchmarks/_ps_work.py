"""The work of `parameter_server.py`, for tasks of distributary and of TensorFlow: NumPy only."""

from collections.abc import Callable
from typing import Any

import numpy as np
from _peers import Peer, timed

__all__ = ["BATCH_SIZES", "DATA", "NUM_BATCHES", "NUM_IDS", "NUM_ROWS", "WIDTH", "scheduled"]

BATCH_SIZES = {"mlp32": 32, "embedding256": 256}
NUM_BATCHES = 32
NUM_ROWS, NUM_IDS, WIDTH = 100_000, 26, 64


def _mlp_data() -> tuple[np.ndarray, np.ndarray]:
    """Returns the inputs of all batches, float32, and the classes, int32."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_BATCHES * BATCH_SIZES["mlp32"], 784)).astype(np.float32)
    return x, x[:, :10].argmax(1).astype(np.int32)


def _embedding_data() -> tuple[np.ndarray, np.ndarray]:
    """Returns the ids of all batches, int32, and the labels, float32."""
    rng = np.random.default_rng(0)
    size = NUM_BATCHES * BATCH_SIZES["embedding256"]
    ids = rng.integers(0, NUM_ROWS, (size, NUM_IDS)).astype(np.int32)
    return ids, (ids[:, 0] % 2).astype(np.float32)[:, None]


DATA = {"mlp32": _mlp_data, "embedding256": _embedding_data}


def scheduled(
    name: str, coordinator: Any, step: Callable[..., Any], args: tuple[Any, ...] = ()
) -> Peer:
    """Returns a peer whose steps are closures of a coordinator; a block ends when all have."""

    def run(num_steps: int) -> list[Any]:
        values = [coordinator.schedule(step, args) for _ in range(num_steps)]
        coordinator.join()
        return values

    return timed(name, run, losses=lambda count: [float(value.fetch()) for value in run(count)])
