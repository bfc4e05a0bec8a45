"""The yardstick of `fit`: the training loop as one writes it in JAX without a library.

Shuffled indices, NumPy picks the batch, `device_put` splits it, and the compiled step of
`_handwritten.compile_step` trains with Adam as Keras computes it. The sum of the losses stays on
the devices until the epoch ends.

Run as a script it answers `_served.ServedPeer`.
"""

import argparse
import time
from typing import Any, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
from _handwritten import AXIS, Step, compile_step, mesh_of, placement
from _losses import LOSSES
from _served import serve
from _workloads import CHECK_STEPS, FIT_WORKLOADS, WORKLOADS, Workload
from jax.sharding import PartitionSpec

__all__ = ["HandwrittenFit"]

State: TypeAlias = Any

_BETA_1, _BETA_2, _EPSILON = 0.9, 0.999, 1e-7


@final
class HandwrittenFit:
    """A `Peer` whose blocks are epochs.

    Args:
        workload: What is trained, with Adam.
        num_replicas: How many devices share a batch.
        max_steps: Longest epoch.
    """

    def __init__(self, workload: Workload, num_replicas: int, max_steps: int) -> None:
        self.name = "handwritten"
        self._batch_size = workload.global_batch_size
        self._x, self._y = workload.examples(max_steps)
        mesh = mesh_of(num_replicas)
        self._split = placement(mesh, PartitionSpec(AXIS))
        self._everywhere = placement(mesh, PartitionSpec())
        parameters = {name: jnp.array(value) for name, value in workload.parameters().items()}
        state = {
            "parameters": parameters,
            "first": jax.tree.map(jnp.zeros_like, parameters),
            "second": jax.tree.map(jnp.zeros_like, parameters),
            "count": jnp.int32(0),
            "sum_of_losses": jnp.float32(0.0),
        }
        self._state = jax.device_put(state, self._everywhere)
        self._step = compile_step(_step(workload, num_replicas), mesh)

    def losses(self, num_steps: int) -> list[float]:
        """The mean losses of `num_steps` short epochs, unshuffled."""
        indices = np.arange(CHECK_STEPS * self._batch_size)
        return [self._epoch(indices) for _ in range(num_steps)]

    def time_block(self, num_steps: int) -> float:
        """Trains one epoch of `num_steps` steps and returns the seconds per step."""
        start = time.perf_counter()
        self._epoch(np.random.permutation(num_steps * self._batch_size))
        return (time.perf_counter() - start) / num_steps

    def close(self) -> None:
        """Nothing to do: the arrays go with the object."""

    def _epoch(self, indices: np.ndarray[Any, Any]) -> float:
        num_steps = len(indices) // self._batch_size
        self._state["sum_of_losses"] = jax.device_put(np.float32(0.0), self._everywhere)
        for start in range(0, len(indices), self._batch_size):
            chosen = indices[start : start + self._batch_size]
            batch = jax.device_put((self._x[chosen], self._y[chosen]), self._split)
            self._state, _ = self._step(self._state, *batch)
        return float(self._state["sum_of_losses"]) / num_steps


def _step(workload: Workload, num_replicas: int) -> Step:
    sum_of_losses = LOSSES[workload.model]

    def step(state: State, x: jax.Array, y: jax.Array) -> tuple[State, jax.Array]:
        loss, gradients = jax.value_and_grad(
            lambda p: sum_of_losses(p, x, y) / workload.global_batch_size
        )(state["parameters"])
        if num_replicas > 1:
            loss, gradients = jax.lax.psum((loss, gradients), AXIS)
        count = state["count"] + 1
        time_ = count.astype(jnp.float32)
        rate = workload.learning_rate * jnp.sqrt(1 - _BETA_2**time_) / (1 - _BETA_1**time_)
        first = jax.tree.map(lambda m, g: m + (g - m) * (1 - _BETA_1), state["first"], gradients)
        second = jax.tree.map(
            lambda v, g: v + (g * g - v) * (1 - _BETA_2), state["second"], gradients
        )
        parameters = jax.tree.map(
            lambda p, m, v: p - rate * m / (jnp.sqrt(v) + _EPSILON),
            state["parameters"],
            first,
            second,
        )
        return {
            "parameters": parameters,
            "first": first,
            "second": second,
            "count": count,
            "sum_of_losses": state["sum_of_losses"] + loss,
        }, loss

    return step


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=FIT_WORKLOADS)
    parser.add_argument("num_replicas", type=int)
    parser.add_argument("max_steps", type=int)
    chosen = parser.parse_args()
    serve(lambda: HandwrittenFit(WORKLOADS[chosen.workload], chosen.num_replicas, chosen.max_steps))
