"""A training step whose batches take 80 % of its time to load, against the step alone."""

import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _harness import Pair, Request, Row, interleave, pair, row
from _peers import Peer, timed

import distributary as dist

__all__ = ["measure", "taking"]

BAR = 1.1
_STEPS = 30
_SHARE_OF_LOADING = 0.8


def taking(name: str, batches: Iterator[Any], use: Any = None) -> Peer:
    """Returns a peer that takes batches, and waits for what `use` makes of them."""

    def run(num_steps: int) -> None:
        last = None
        for _ in range(num_steps):
            last = next(batches) if use is None else use(next(batches))
        if use is not None:
            jax.block_until_ready(last)

    return timed(name, run)


def measure(request: Request, strategy: dist.Strategy, size: tuple[int, int, int]) -> Row:
    """Measures steps with batches that are there, are read ahead, and are not.

    Args:
        request: With `rounds` and `replicas`.
        strategy: Runs the steps.
        size: Examples of a batch over all replicas, their columns, and the layers of the step.
    """
    num_examples, width, num_layers = size
    with strategy.scope():
        w = dist.Variable(jnp.eye(width), name="w")

    def step(x: jax.Array) -> jax.Array:
        for _ in range(num_layers):
            x = jnp.tanh(x @ w)
        w.assign(w.value() * 0.999)
        return dist.get_replica_context().all_reduce("SUM", jnp.sum(x))

    batch = np.ones((num_examples, width), np.float32)
    (placed,) = strategy.experimental_distribute_dataset([batch])

    def train(x: Any) -> Any:
        loss = strategy.run(step, (x,))
        return jax.block_until_ready(loss)  # as a loop does that prints its loss

    train(placed)
    alone = taking("alone", iter(lambda: placed, None), train)
    load_seconds = _SHARE_OF_LOADING * min(alone.time_block(20) for _ in range(5))

    def load() -> Iterator[Any]:
        while True:
            time.sleep(load_seconds)  # a disk or a network, which leaves the cores alone
            yield batch

    dataset = dist.data.Dataset.from_generator(load)
    without = dist.InputOptions(experimental_per_replica_buffer_size=0)
    ahead = iter(strategy.experimental_distribute_dataset(dataset))
    behind = iter(strategy.experimental_distribute_dataset(dataset, without))
    peers = [
        alone,
        taking("with loader", ahead, train),
        taking("without reading ahead", behind, train),
    ]
    seconds = interleave(peers, request["rounds"], _STEPS)
    pairs: list[Pair] = [pair("with loader", "alone", BAR), pair("without reading ahead", "alone")]
    milliseconds = {name: [1e3 * value for value in values] for name, values in seconds.items()}
    return row("a step with a loader", request["replicas"], "ms", milliseconds, pairs)
