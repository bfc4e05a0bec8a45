"""The yardstick: each step as one writes it in JAX without a library for distribution.

Several replicas: `jit` of `shard_map` over a mesh of the devices, one `psum` of the gradients
and the loss, state buffers donated. One replica: plain `jit` with donated state.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _losses import LOSSES, wide_loss_of_rows
from _timing import InProcessPeer
from _workloads import Workload
from jax.sharding import (
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

__all__ = ["AXIS", "Step", "build", "compile_step", "mesh_of", "placement"]

State: TypeAlias = Any  # a pytree of arrays
Step: TypeAlias = Callable[..., tuple[State, jax.Array]]

AXIS = "replica"


def build(workload: Workload, num_replicas: int, name: str = "handwritten") -> InProcessPeer:
    """Places state and data on the first `num_replicas` devices and compiles at the first step."""
    mesh = mesh_of(num_replicas)
    parameters = {name: jnp.array(value) for name, value in workload.parameters().items()}
    if workload.sparse:
        replica_step, state = _sparse_step(workload, num_replicas), parameters
    elif workload.optimizer == "adam":
        replica_step, state = (
            _adam_step(workload, num_replicas),
            (parameters, optax.adam(workload.learning_rate).init(parameters)),
        )
    else:
        replica_step, state = _sgd_step(workload, num_replicas), parameters
    step = compile_step(replica_step, mesh)
    state = jax.device_put(state, placement(mesh, PartitionSpec()))
    batches = [
        tuple(
            jax.device_put(
                array.reshape(workload.global_batch_size, *array.shape[2:]),
                placement(mesh, PartitionSpec(AXIS)),
            )
            for array in batch
        )
        for batch in workload.batches(num_replicas)
    ]

    def take_step(number: int) -> jax.Array:
        nonlocal state
        state, loss = step(state, *batches[number % len(batches)])
        return loss

    return InProcessPeer(name, take_step, jax.block_until_ready, float)


def compile_step(
    replica_step: Step, mesh: Mesh | None, loss_spec: PartitionSpec | None = None
) -> Step:
    """`jit` of one replica's `(state, *inputs) -> (state, loss)`, with the state donated.

    Args:
        replica_step: Sees the whole state and its replica's part of the inputs.
        mesh: Of the replicas; None for a single one, which needs no `shard_map`.
        loss_spec: How the second result is laid out; by default it is equal on all replicas.
    """
    if mesh is None:
        return jax.jit(replica_step, donate_argnums=0)

    def all_replicas(state: State, *inputs: jax.Array) -> tuple[State, jax.Array]:
        return jax.shard_map(
            replica_step,
            mesh=mesh,
            in_specs=(PartitionSpec(), *([PartitionSpec(AXIS)] * len(inputs))),
            out_specs=(PartitionSpec(), PartitionSpec() if loss_spec is None else loss_spec),
            check_vma=False,
        )(state, *inputs)

    return jax.jit(all_replicas, donate_argnums=0)


def mesh_of(num_replicas: int) -> Mesh | None:
    """Of the first devices; None for one replica."""
    if num_replicas == 1:
        return None
    return Mesh(np.array(jax.devices()[:num_replicas]), (AXIS,))


def placement(mesh: Mesh | None, spec: PartitionSpec) -> Sharding:
    """Where arrays of `spec` lie on the mesh, or on the one device."""
    if mesh is None:
        return SingleDeviceSharding(jax.devices()[0])
    return NamedSharding(mesh, spec)


def _adam_step(workload: Workload, num_replicas: int) -> Step:
    optimizer = optax.adam(workload.learning_rate)
    sum_of_losses = LOSSES[workload.model]

    def step(state: State, x: jax.Array, y: jax.Array) -> tuple[State, jax.Array]:
        parameters, optimizer_state = state
        loss, gradients = jax.value_and_grad(
            lambda p: sum_of_losses(p, x, y) / workload.global_batch_size
        )(parameters)
        if num_replicas > 1:
            loss, gradients = jax.lax.psum((loss, gradients), AXIS)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state, parameters)
        return (optax.apply_updates(parameters, updates), optimizer_state), loss

    return step


def _sgd_step(workload: Workload, num_replicas: int) -> Step:
    sum_of_losses = LOSSES[workload.model]

    def step(state: State, x: jax.Array, y: jax.Array) -> tuple[State, jax.Array]:
        loss, gradients = jax.value_and_grad(
            lambda p: sum_of_losses(p, x, y) / workload.global_batch_size
        )(state)
        if num_replicas > 1:
            loss, gradients = jax.lax.psum((loss, gradients), AXIS)
        return jax.tree.map(lambda p, g: p - workload.learning_rate * g, state, gradients), loss

    return step


def _sparse_step(workload: Workload, num_replicas: int) -> Step:
    """SGD that differentiates with respect to the gathered rows and exchanges only those."""

    def step(state: State, ids: jax.Array, y: jax.Array) -> tuple[State, jax.Array]:
        dense = {name: value for name, value in state.items() if name != "table"}
        loss, (gradients, row_gradients) = jax.value_and_grad(
            lambda p, rows: wide_loss_of_rows(rows, p, y) / workload.global_batch_size,
            argnums=(0, 1),
        )(dense, state["table"][ids])
        if num_replicas > 1:
            loss, gradients = jax.lax.psum((loss, gradients), AXIS)
            row_gradients, ids = jax.lax.all_gather((row_gradients, ids), AXIS, tiled=True)
        rate = workload.learning_rate
        updated = jax.tree.map(lambda p, g: p - rate * g, dense, gradients)
        return {**updated, "table": state["table"].at[ids].add(-rate * row_gradients)}, loss

    return step
