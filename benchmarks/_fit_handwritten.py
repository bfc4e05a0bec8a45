"""The yardsticks of `fit`: training loops as one writes them in JAX without a library.

Shuffled indices, NumPy picks the batch, `Replicas.place` splits it, and the compiled step of
`_handwritten.compile_step` trains. The sum of the losses stays on the devices until the epoch ends.
The step is one of two:

    jax    model and loss of `_losses`, Adam as Keras computes it
    keras  `stateless_call`, loss and `stateless_apply` of the Keras model that `fit` is given

Run as a script it answers `_served.ServedPeer`.
"""

import argparse
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
from _handwritten import AXIS, LocalReplicas, Replicas, Step, compile_step
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
        name: What the report calls it.
        model: `"jax"` or `"keras"`.
        workload: What is trained, with Adam.
        replicas: The devices that share a batch.
        max_steps: Longest epoch.
    """

    def __init__(
        self, name: str, model: str, workload: Workload, replicas: Replicas, max_steps: int
    ) -> None:
        self.name = name
        self._replicas = replicas
        self._own = replicas.own_rows(workload.global_batch_size)
        self._batch_size = workload.global_batch_size
        self._x, self._y = workload.examples(max_steps)
        state, step = _MODELS[model](workload, replicas)
        state["sum_of_losses"] = jnp.float32(0.0)
        self._state = replicas.place(state, PartitionSpec())
        self._step = compile_step(step, replicas.mesh)

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
        self._state["sum_of_losses"] = self._replicas.place(np.float32(0.0), PartitionSpec())
        for start in range(0, len(indices), self._batch_size):
            chosen = indices[start : start + self._batch_size][self._own]
            batch = self._replicas.place((self._x[chosen], self._y[chosen]), PartitionSpec(AXIS))
            self._state, _ = self._step(self._state, *batch)
        return float(self._state["sum_of_losses"]) / num_steps


def _jax_step(workload: Workload, replicas: Replicas) -> tuple[State, Step]:
    sum_of_losses = LOSSES[workload.model]
    parameters = {name: jnp.array(value) for name, value in workload.parameters().items()}

    def step(state: State, x: jax.Array, y: jax.Array) -> tuple[State, jax.Array]:
        loss, gradients = jax.value_and_grad(
            lambda p: sum_of_losses(p, x, y) / workload.global_batch_size
        )(state["parameters"])
        loss, gradients = replicas.all_reduce((loss, gradients))
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

    state = {
        "parameters": parameters,
        "first": jax.tree.map(jnp.zeros_like, parameters),
        "second": jax.tree.map(jnp.zeros_like, parameters),
        "count": jnp.int32(0),
    }
    return state, step


def _keras_step(workload: Workload, replicas: Replicas) -> tuple[State, Step]:
    from _keras import build_model

    model = build_model("keras", workload, 1)
    model.optimizer.build(model.trainable_variables)
    assert not model.non_trainable_variables

    def step(state: State, x: jax.Array, y: jax.Array) -> tuple[State, jax.Array]:
        def loss_of(parameters: State) -> jax.Array:
            predictions, _ = model.stateless_call(parameters, [], x, training=True)
            return model.loss(y, predictions)

        loss, gradients = jax.value_and_grad(loss_of)(state["parameters"])
        loss, gradients = jax.tree.map(
            lambda total: total / replicas.num, replicas.all_reduce((loss, gradients))
        )
        parameters, optimizer = model.optimizer.stateless_apply(
            state["optimizer"], gradients, state["parameters"]
        )
        return {
            "parameters": parameters,
            "optimizer": optimizer,
            "sum_of_losses": state["sum_of_losses"] + loss,
        }, loss

    # Copies, as every step consumes its state.
    state = {
        "parameters": [jnp.array(v.value, copy=True) for v in model.trainable_variables],
        "optimizer": [jnp.array(v.value, copy=True) for v in model.optimizer.variables],
    }
    return state, step


_MODELS: Mapping[str, Callable[[Workload, Replicas], tuple[State, Step]]] = {
    "jax": _jax_step,
    "keras": _keras_step,
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=list(_MODELS))
    parser.add_argument("workload", choices=FIT_WORKLOADS)
    parser.add_argument("num_replicas", type=int)
    parser.add_argument("max_steps", type=int)
    chosen = parser.parse_args()
    serve(
        lambda: HandwrittenFit(
            "handwritten",
            chosen.model,
            WORKLOADS[chosen.workload],
            LocalReplicas(chosen.num_replicas),
            chosen.max_steps,
        )
    )
