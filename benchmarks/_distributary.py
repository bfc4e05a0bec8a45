"""The same steps through `distributary`: variables in a scope, `strategy.run`, `all_reduce`."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np
import optax
from _losses import LOSSES, wide_loss_of_rows
from _peers import Peer, stepping
from _workloads import Workload

import distributary as dist

__all__ = ["build", "mirrored", "on_every_replica"]

Step: TypeAlias = Callable[..., jax.Array]
PerReplicaValue: TypeAlias = Any  # dist.PerReplica


def mirrored(num_replicas: int) -> dist.Strategy:
    """A `MirroredStrategy` of the first GPUs, or logical CPU devices where there is none."""
    return dist.MirroredStrategy(jax.devices()[:num_replicas])


def build(
    workload: Workload, strategy: dist.Strategy, name: str = "distributary", bytes_per_pack: int = 0
) -> Peer:
    """Creates variables and inputs; compiles at the first step."""
    with strategy.scope():
        variables = {
            name: dist.Variable(value, name=name) for name, value in workload.parameters().items()
        }
        step = _step_of(workload, variables, bytes_per_pack)
    batches = [
        tuple(on_every_replica(strategy, array) for array in batch)
        for batch in workload.batches(strategy.num_replicas_in_sync)
    ]

    def take_step(number: int) -> PerReplicaValue:
        return strategy.run(step, args=batches[number % len(batches)])

    def to_float(loss: PerReplicaValue) -> float:
        return float(strategy.experimental_local_results(loss)[0])

    return stepping(name, take_step, jax.block_until_ready, to_float)


def on_every_replica(strategy: dist.Strategy, array: np.ndarray[Any, Any]) -> PerReplicaValue:
    """`array[i]` on the device of replica i, for an array `[replica, ...]`."""

    def placed(context: Any) -> jax.Array:
        replica_id = context.replica_id_in_sync_group
        return jax.device_put(array[replica_id], jax.devices()[replica_id])

    return strategy.experimental_distribute_values_from_function(placed)


def _step_of(workload: Workload, variables: dict[str, dist.Variable], bytes_per_pack: int) -> Step:
    """Returns the step of one replica; runs in the scope of the strategy."""
    options = dist.experimental.CommunicationOptions(bytes_per_pack=bytes_per_pack)
    sum_of_losses = LOSSES[workload.model]
    adam = optax.adam(workload.learning_rate) if workload.optimizer == "adam" else None
    state_variables = jax.tree.map(dist.Variable, adam.init(_values(variables))) if adam else None

    def step(x: jax.Array, y: jax.Array) -> jax.Array:
        def loss_fn() -> jax.Array:
            if workload.sparse:
                dense = {name: value for name, value in variables.items() if name != "table"}
                total = wide_loss_of_rows(variables["table"].sparse_read(x), _values(dense), y)
            else:
                total = sum_of_losses(_values(variables), x, y)
            return total / workload.global_batch_size

        loss, gradients = dist.value_and_grad(loss_fn, variables)()
        context = dist.get_replica_context()
        gradients, loss = context.all_reduce(dist.ReduceOp.SUM, (gradients, loss), options)
        if adam is not None:
            parameters = _values(variables)
            updates, state = adam.update(gradients, _values(state_variables), parameters)
            _assign(variables, optax.apply_updates(parameters, updates))
            _assign(state_variables, state)
        else:
            _descend(variables, gradients, workload.learning_rate)
        return loss

    return step


def _descend(variables: dict[str, dist.Variable], gradients: Any, rate: float) -> None:
    for name, variable in variables.items():
        own = gradients[name]
        if isinstance(own, dist.IndexedSlices):
            rows = dist.IndexedSlices(rate * own.values, own.indices, own.dense_shape)
            variable.scatter_sub(rows)
        else:
            variable.assign_sub(rate * own)


def _values(tree: Any) -> Any:
    """The arrays of a tree of variables."""
    return jax.tree.map(lambda variable: variable.value(), tree)


def _assign(variables: Any, arrays: Any) -> None:
    jax.tree.map(lambda variable, array: variable.assign(array), variables, arrays)
