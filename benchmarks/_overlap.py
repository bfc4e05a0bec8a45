"""A training step whose batches take 80 % of its time to load, against the step alone."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from _timing import Batches, interleave

import distributary as dist

__all__ = ["Size", "measure"]

Json: TypeAlias = Any

_STEPS = 30
_SHARE_OF_LOADING = 0.8


@dataclass(frozen=True)
class Size:
    """Examples of a batch over all replicas, their columns, and the layers of the step."""

    batch: int
    width: int
    layers: int


def measure(strategy: dist.Strategy, size: Size, num_rounds: int) -> dict[str, Json]:
    """Seconds per step with batches that are there, are read ahead, and are not."""
    with strategy.scope():
        w = dist.Variable(jnp.eye(size.width), name="w")

    def step(x: jax.Array) -> jax.Array:
        for _ in range(size.layers):
            x = jnp.tanh(x @ w)
        w.assign(w.value() * 0.999)
        return dist.get_replica_context().all_reduce("SUM", jnp.sum(x))

    batch = np.ones((size.batch, size.width), np.float32)
    (placed,) = strategy.experimental_distribute_dataset([batch])

    def train(x: Any) -> Any:
        loss = strategy.run(step, (x,))
        return jax.block_until_ready(loss)  # as a loop does that prints its loss

    train(placed)
    alone = Batches("alone", iter(lambda: placed, None), train)
    step_seconds = min(alone.time_block(20) for _ in range(5))
    load_seconds = _SHARE_OF_LOADING * step_seconds

    def load() -> Iterator[Any]:
        while True:
            time.sleep(load_seconds)  # a disk or a network, which leaves the cores alone
            yield batch

    dataset = dist.data.Dataset.from_generator(load)
    ahead = iter(strategy.experimental_distribute_dataset(dataset))
    without = dist.InputOptions(experimental_per_replica_buffer_size=0)
    behind = iter(strategy.experimental_distribute_dataset(dataset, without))
    peers = [
        alone,
        Batches("with loader", ahead, train),
        Batches("without reading ahead", behind, train),
    ]
    seconds = interleave(peers, num_rounds, {peer.name: _STEPS for peer in peers})
    return {"step_seconds": step_seconds, "seconds": seconds}
