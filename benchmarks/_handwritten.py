"""The yardsticks: steps and loops as one writes them in JAX without a library for distribution.

Several replicas: `jit` of `shard_map` over a mesh of the devices, one `psum` of the gradients
and the loss, state buffers donated; between processes they are one vector. One replica: plain
`jit` with donated state.

The loops of `fit`: shuffled indices, NumPy picks the batch, `Replicas.place` splits it, the
compiled step trains. The sum of the losses stays on the devices until the epoch ends.
"""

from collections.abc import Callable
from typing import Any, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _losses import LOSSES, wide_loss_of_rows
from _peers import Peer, stepping, timed
from _workloads import CHECK_STEPS, Workload
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

__all__ = ["AXIS", "Replicas", "Step", "build", "compile_step", "fit", "step_of_keras"]

Tree: TypeAlias = Any  # a pytree of arrays
State: TypeAlias = Tree
KerasModel: TypeAlias = Any
Step: TypeAlias = Callable[..., tuple[State, jax.Array]]

AXIS = "replica"


@final
class Replicas:
    """Devices that share the rows of a batch: of this process, or of connected ones.

    Attributes:
        mesh: Of the devices; None for a single one.
        num: How many there are.
    """

    def __init__(self, mesh: Mesh | None) -> None:
        self.mesh = mesh
        self.num = 1 if mesh is None else mesh.size
        self._is_connected = jax.process_count() > 1

    @classmethod
    def of_this_process(cls, num_replicas: int) -> "Replicas":
        """Returns the first devices of this process."""
        devices = np.array(jax.devices()[:num_replicas])
        return cls(Mesh(devices, (AXIS,)) if num_replicas > 1 else None)

    def own_rows(self, global_batch_size: int) -> slice:
        """Returns the rows of a global batch that this process needs."""
        num_rows = global_batch_size // jax.process_count()
        return slice(jax.process_index() * num_rows, (jax.process_index() + 1) * num_rows)

    def place(self, arrays: Tree, spec: PartitionSpec) -> Tree:
        """Splits own rows over the replicas of the process, or copies whole arrays to all."""
        if self.mesh is None:
            return jax.device_put(arrays, SingleDeviceSharding(jax.devices()[0]))
        sharding = NamedSharding(self.mesh, spec)
        if not self._is_connected:
            return jax.device_put(arrays, sharding)
        return jax.tree.map(
            lambda array: jax.make_array_from_process_local_data(sharding, np.asarray(array)),
            arrays,
        )

    def all_reduce(self, tree: Tree) -> Tree:
        """Returns the sum over the replicas, inside a step."""
        if self.mesh is None:
            return tree
        if not self._is_connected:
            return jax.lax.psum(tree, AXIS)
        # One all-reduce of one vector, as gloo pays for every array.
        leaves, structure = jax.tree.flatten(tree)
        # XLA:CPU fuses a concatenation with what computes its parts, and is 100 times slower. Of
        # the first update it makes a padding that computes its part for every element of the
        # vector if that is a short sum, as for a bias: the largest comes first.
        order = sorted(range(len(leaves)), key=lambda i: -leaves[i].size)
        vector = jnp.zeros(sum(leaf.size for leaf in leaves), jnp.float32)
        starts, start = {}, 0
        for i in order:
            starts[i] = start
            vector = jax.lax.dynamic_update_slice(vector, leaves[i].reshape(-1), (start,))
            start += leaves[i].size
        vector = jax.lax.psum(vector, AXIS)
        parts = [
            vector[starts[i] : starts[i] + leaf.size].reshape(leaf.shape)
            for i, leaf in enumerate(leaves)
        ]
        return jax.tree.unflatten(structure, parts)


def build(workload: Workload, replicas: Replicas, name: str = "handwritten") -> Peer:
    """Places state and data on the replicas' devices and compiles at the first step."""
    optimizer = {"adam": optax.adam, "sgd": optax.sgd}[workload.optimizer](workload.learning_rate)
    replica_step, state = _step_of(workload, replicas, optimizer)
    step = compile_step(replica_step, replicas.mesh)
    state = replicas.place(state, PartitionSpec())
    own = replicas.own_rows(workload.global_batch_size)
    batches = [
        replicas.place(
            tuple(array.reshape(-1, *array.shape[2:])[own] for array in batch),
            PartitionSpec(AXIS),
        )
        for batch in workload.batches(replicas.num)
    ]

    def take_step(number: int) -> jax.Array:
        nonlocal state
        state, loss = step(state, *batches[number % len(batches)])
        return loss

    return stepping(name, take_step, jax.block_until_ready)


def fit(name: str, model: str, workload: Workload, replicas: Replicas, num_steps: int) -> Peer:
    """Returns a peer whose blocks are epochs.

    Args:
        name: What the report calls it.
        model: `"jax"` for the loss of `_losses` and Adam as Keras computes it, `"keras"` for
            `stateless_call`, loss and `stateless_apply` of the Keras model that `fit` is given.
        workload: What is trained, with Adam.
        replicas: The devices that share a batch.
        num_steps: Steps per epoch.
    """
    if model == "jax":
        replica_step, state = _step_of(workload, replicas, _keras_adam(workload.learning_rate))
    else:
        from _keras import build_model

        replica_step, state = step_of_keras(build_model(workload), replicas)

    def summing_step(state: State, x: jax.Array, y: jax.Array) -> tuple[State, jax.Array]:
        inner, total = state
        inner, loss = replica_step(inner, x, y)
        return (inner, total + loss), loss

    step = compile_step(summing_step, replicas.mesh)
    state = replicas.place(state, PartitionSpec())
    own = replicas.own_rows(workload.global_batch_size)
    batch_size = workload.global_batch_size
    all_x, all_y = workload.examples(max(num_steps, CHECK_STEPS))

    def epoch(indices: np.ndarray[Any, Any]) -> float:
        nonlocal state
        both = state, replicas.place(np.float32(0.0), PartitionSpec())
        for start in range(0, len(indices), batch_size):
            chosen = indices[start : start + batch_size][own]
            batch = replicas.place((all_x[chosen], all_y[chosen]), PartitionSpec(AXIS))
            both, _ = step(both, *batch)
        state, total = both
        return float(total) / (len(indices) // batch_size)

    def check(num_epochs: int) -> list[float]:
        return [epoch(np.arange(CHECK_STEPS * batch_size)) for _ in range(num_epochs)]

    return timed(name, lambda count: epoch(np.random.permutation(count * batch_size)), losses=check)


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


def _step_of(
    workload: Workload, replicas: Replicas, optimizer: optax.GradientTransformation
) -> tuple[Step, State]:
    """Returns the step of one replica, and the state before the first."""
    parameters = {name: jnp.array(value) for name, value in workload.parameters().items()}
    if workload.sparse:
        return _sparse_step(workload, replicas), parameters
    sum_of_losses = LOSSES[workload.model]

    def step(state: State, x: jax.Array, y: jax.Array) -> tuple[State, jax.Array]:
        parameters, optimizer_state = state
        loss, gradients = jax.value_and_grad(
            lambda p: sum_of_losses(p, x, y) / workload.global_batch_size
        )(parameters)
        loss, gradients = replicas.all_reduce((loss, gradients))
        updates, optimizer_state = optimizer.update(gradients, optimizer_state, parameters)
        return (optax.apply_updates(parameters, updates), optimizer_state), loss

    return step, (parameters, optimizer.init(parameters))


def _keras_adam(learning_rate: float) -> optax.GradientTransformation:
    """Returns Adam as Keras computes it, which adds epsilon to the uncorrected root."""
    beta_1, beta_2, epsilon = 0.9, 0.999, 1e-7

    def init(parameters: Tree) -> Tree:
        zeros = jax.tree.map(jnp.zeros_like, parameters)
        return zeros, jax.tree.map(jnp.zeros_like, parameters), jnp.int32(0)

    def update(gradients: Tree, state: Tree, parameters: Tree = None) -> tuple[Tree, Tree]:
        first, second, count = state
        count = count + 1
        time = count.astype(jnp.float32)
        rate = learning_rate * jnp.sqrt(1 - beta_2**time) / (1 - beta_1**time)
        first = jax.tree.map(lambda m, g: m + (g - m) * (1 - beta_1), first, gradients)
        second = jax.tree.map(lambda v, g: v + (g * g - v) * (1 - beta_2), second, gradients)
        updates = jax.tree.map(lambda m, v: -rate * m / (jnp.sqrt(v) + epsilon), first, second)
        return updates, (first, second, count)

    return optax.GradientTransformation(init, update)


def step_of_keras(model: KerasModel, replicas: Replicas) -> tuple[Step, State]:
    """Returns the step of one replica around a compiled Keras model, and its first state.

    Every replica normalizes its own part of a batch, and all keep the mean of their statistics.
    """
    model.optimizer.build(model.trainable_variables)

    def step(state: State, x: jax.Array, y: jax.Array) -> tuple[State, jax.Array]:
        def loss_of(parameters: State, others: State) -> tuple[jax.Array, State]:
            predictions, others = model.stateless_call(parameters, others, x, training=True)
            return model.loss(y, predictions), others

        parameters, others, optimizer = state
        (loss, others), gradients = jax.value_and_grad(loss_of, has_aux=True)(parameters, others)
        # Seeds are the same everywhere; an exchange of several workers takes one dtype.
        statistics = [i for i, x in enumerate(others) if jnp.issubdtype(x.dtype, jnp.floating)]
        loss, means, gradients = jax.tree.map(
            lambda total: total / replicas.num,
            replicas.all_reduce((loss, [others[i] for i in statistics], gradients)),
        )
        for i, mean in zip(statistics, means, strict=True):
            others[i] = mean
        parameters, optimizer = model.optimizer.stateless_apply(optimizer, gradients, parameters)
        return (parameters, others, optimizer), loss

    # Copies, as every step consumes its state.
    parts = model.trainable_variables, model.non_trainable_variables, model.optimizer.variables
    state = tuple([jnp.array(variable.value, copy=True) for variable in part] for part in parts)
    return step, state


def _sparse_step(workload: Workload, replicas: Replicas) -> Step:
    """SGD that differentiates with respect to the gathered rows and exchanges only those."""

    def step(state: State, ids: jax.Array, y: jax.Array) -> tuple[State, jax.Array]:
        dense = {name: value for name, value in state.items() if name != "table"}
        loss, (gradients, row_gradients) = jax.value_and_grad(
            lambda p, rows: wide_loss_of_rows(rows, p, y) / workload.global_batch_size,
            argnums=(0, 1),
        )(dense, state["table"][ids])
        loss, gradients = replicas.all_reduce((loss, gradients))
        if replicas.mesh is not None:
            row_gradients, ids = jax.lax.all_gather((row_gradients, ids), AXIS, tiled=True)
        rate = workload.learning_rate
        updated = jax.tree.map(lambda p, g: p - rate * g, dense, gradients)
        return {**updated, "table": state["table"].at[ids].add(-rate * row_gradients)}, loss

    return step
