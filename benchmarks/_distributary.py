"""The same steps through `distributary`: variables in a scope, `strategy.run`, `all_reduce`."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np
import optax
from _losses import LOSSES, wide_loss_of_rows
from _timing import InProcessPeer
from _workloads import Workload

import distributary as dist

__all__ = ["build", "mirrored", "on_every_replica"]

Step: TypeAlias = Callable[..., jax.Array]
PerReplicaValue: TypeAlias = Any  # dist.PerReplica


def mirrored(num_replicas: int) -> dist.Strategy:
    """A `MirroredStrategy` of the first GPUs, or logical CPU devices where there is none."""
    return dist.MirroredStrategy(jax.devices()[:num_replicas])


def build(workload: Workload, strategy: dist.Strategy, name: str = "distributary") -> InProcessPeer:
    """Creates variables and inputs; compiles at the first step."""
    with strategy.scope():
        variables = {
            name: dist.Variable(value, name=name) for name, value in workload.parameters().items()
        }
        if workload.sparse:
            step = _sparse_step(workload, variables)
        elif workload.optimizer == "adam":
            step = _adam_step(workload, variables)
        else:
            step = _sgd_step(workload, variables)
    batches = [
        tuple(on_every_replica(strategy, array) for array in batch)
        for batch in workload.batches(strategy.num_replicas_in_sync)
    ]

    def take_step(number: int) -> PerReplicaValue:
        return strategy.run(step, args=batches[number % len(batches)])

    def to_float(loss: PerReplicaValue) -> float:
        return float(strategy.experimental_local_results(loss)[0])

    return InProcessPeer(name, take_step, jax.block_until_ready, to_float)


def on_every_replica(strategy: dist.Strategy, array: np.ndarray[Any, Any]) -> PerReplicaValue:
    """`array[i]` on the device of replica i, for an array `[replica, ...]`."""

    def placed(context: Any) -> jax.Array:
        replica_id = context.replica_id_in_sync_group
        return jax.device_put(array[replica_id], jax.devices()[replica_id])

    return strategy.experimental_distribute_values_from_function(placed)


def _adam_step(workload: Workload, variables: dict[str, dist.Variable]) -> Step:
    optimizer = optax.adam(workload.learning_rate)
    state_variables = jax.tree.map(dist.Variable, optimizer.init(_values(variables)))
    sum_of_losses = LOSSES[workload.model]

    def step(x: jax.Array, y: jax.Array) -> jax.Array:
        def loss_fn() -> jax.Array:
            return sum_of_losses(_values(variables), x, y) / workload.global_batch_size

        loss, gradients = dist.value_and_grad(loss_fn, variables)()
        context = dist.get_replica_context()
        gradients, loss = context.all_reduce(dist.ReduceOp.SUM, (gradients, loss))
        parameters = _values(variables)
        updates, state = optimizer.update(gradients, _values(state_variables), parameters)
        _assign(variables, optax.apply_updates(parameters, updates))
        _assign(state_variables, state)
        return loss

    return step


def _sgd_step(workload: Workload, variables: dict[str, dist.Variable]) -> Step:
    sum_of_losses = LOSSES[workload.model]

    def step(x: jax.Array, y: jax.Array) -> jax.Array:
        def loss_fn() -> jax.Array:
            return sum_of_losses(_values(variables), x, y) / workload.global_batch_size

        loss, gradients = dist.value_and_grad(loss_fn, variables)()
        context = dist.get_replica_context()
        gradients, loss = context.all_reduce(dist.ReduceOp.SUM, (gradients, loss))
        for name, variable in variables.items():
            variable.assign_sub(workload.learning_rate * gradients[name])
        return loss

    return step


def _sparse_step(workload: Workload, variables: dict[str, dist.Variable]) -> Step:
    table = variables["table"]
    dense = {name: variable for name, variable in variables.items() if name != "table"}

    def step(ids: jax.Array, y: jax.Array) -> jax.Array:
        def loss_fn() -> jax.Array:
            rows = table.sparse_read(ids)
            return wide_loss_of_rows(rows, _values(dense), y) / workload.global_batch_size

        loss, gradients = dist.value_and_grad(loss_fn, variables)()
        context = dist.get_replica_context()
        gradients, loss = context.all_reduce(dist.ReduceOp.SUM, (gradients, loss))
        rate = workload.learning_rate
        rows = gradients["table"]
        table.scatter_sub(dist.IndexedSlices(rate * rows.values, rows.indices, rows.dense_shape))
        for name, variable in dense.items():
            variable.assign_sub(rate * gradients[name])
        return loss

    return step


def _values(tree: Any) -> Any:
    """The arrays of a tree of variables."""
    return jax.tree.map(lambda variable: variable.value(), tree)


def _assign(variables: Any, arrays: Any) -> None:
    jax.tree.map(lambda variable, array: variable.assign(array), variables, arrays)
