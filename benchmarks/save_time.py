"""How long does an asynchronous save of 256 MiB keep a training loop waiting?

32 variables of 8 MiB on two devices, a step that changes all of them and donates their buffers.

    save   seconds until `CheckpointManager.save` returns, and training goes on
    numpy  seconds that a copy of the same arrays to NumPy takes: what cannot be avoided
"""

import tempfile
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _peers import Peer, timed

import distributary as dist

__all__ = ["peers"]

NUM_VARIABLES = 32
NUM_VALUES = 2 * 2**20
_FOLDER = tempfile.TemporaryDirectory()  # removed when the process ends


def peers(names: Sequence[str]) -> list[Peer]:
    """Returns what is timed once per block."""
    strategy = dist.MirroredStrategy()
    with strategy.scope():
        variables = [
            dist.Variable(np.full(NUM_VALUES, i, np.float32), name=f"v{i}")
            for i in range(NUM_VARIABLES)
        ]
    state = dist.checkpoint.Checkpoint(variables=variables)
    manager = dist.checkpoint.CheckpointManager(state, _FOLDER.name, max_to_keep=1)

    def replica_step() -> jax.Array:
        for variable in variables:
            variable.assign(variable.value() * 0.999 + 1.0)
        return jnp.float32(1.0)

    def step() -> None:
        strategy.run(replica_step)
        np.asarray(variables[-1].value()[:1])

    def save(num_steps: int) -> float:
        manager.wait_until_finished()
        step()
        start = time.perf_counter()
        manager.save()
        return time.perf_counter() - start

    def copy(num_steps: int) -> list[np.ndarray[Any, Any]]:
        return [np.array(variable.value()) for variable in variables]

    step()
    return [Peer(name, save) if name == "save" else timed(name, copy) for name in names]
