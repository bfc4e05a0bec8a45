"""Steps whose variables are on one device and whose replicas compute on others."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from distributary.engine import Place, Staged, struct_of
from distributary.topology import REPLICA_AXIS
from distributary.tracing import cut, opened


def in_stages(
    step: Callable[..., Any], mesh: Any, is_split: bool, gives_rows: bool
) -> Callable[..., Any]:
    """Turns the step of one replica into one for all: first the replicas, then what they share.

    Args:
        step: Function from state and the replica's part of a batch to outputs and new state.
        mesh: Mesh of the replicas' devices.
        is_split: Whether each replica has a part of the batch; else each has all of it.
        gives_rows: Whether the outputs are parts of arrays; else all replicas have the same
            outputs.

    Returns:
        A function from state and batch to outputs and new state.
    """

    def several(state: Any, data: Any) -> Any:
        def part(x: Any) -> Any:
            rows = x.shape[0] // mesh.size if is_split else x.shape[0]
            return jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)

        closed, shapes = jax.make_jaxpr(
            step, axis_env=[(REPLICA_AXIS, mesh.size)], return_shape=True
        )(state, jax.tree.map(part, data))
        shared, batch = [*closed.consts, *jax.tree.leaves(state)], jax.tree.leaves(data)
        is_batch = [*[False] * len(shared), *[True] * len(batch)]
        rows = range(len(jax.tree.leaves(shapes[0]))) if gives_rows else ()
        # The batch goes to the replicas, even if there is only one.
        stages = cut(opened(closed), is_batch, max(2, mesh.size), rows)
        values = [*shared, *batch]
        replica = stages.replica
        made = jax.shard_map(
            lambda *own: jax.core.eval_jaxpr(replica.jaxpr, replica.consts, *own),
            mesh=mesh,
            in_specs=tuple(
                P(REPLICA_AXIS) if is_split and is_batch[i] else P() for i in stages.replica_inputs
            ),
            out_specs=[
                *(P(REPLICA_AXIS) if i in rows else P() for i in stages.replica_outputs),
                *[P()] * stages.num_cut,
            ],
            check_vma=False,
        )(*(values[i] for i in stages.replica_inputs))
        results = stages.complete(values, made)
        outputs = [results[i] for i in range(len(results))]
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    return several


def staged_call(
    function: Callable[..., Any],
    state: Any,
    data: Any,
    sharding: Any,
    mesh: Any,
    home: Any,
    storage: Any,
    look: Callable[[Any, Any], None],
) -> Callable[..., Any]:
    """Makes a step that reads its state from the parameter device and leaves it there.

    Args:
        function: Function from state and data to outputs and new state.
        state: The state, for its shapes.
        data: The data, for its shapes.
        sharding: Sharding of the data.
        mesh: Mesh of the replicas' devices.
        home: Sharding of the parameter device.
        storage: Sharding of the state there.
        look: Called with the closed jaxpr and the shapes of the results.

    Returns:
        The same function, compiled for these shapes. It consumes the state.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(
        *jax.tree.map(struct_of, (state, data))
    )
    look(closed, shapes)
    before, after = jax.tree.leaves(state), jax.tree.leaves(shapes[1])
    inputs = [
        *[Place(storage) for _ in before],
        *[Place(sharding, is_data=True) for _ in jax.tree.leaves(data)],
    ]
    outputs = [
        *[Place() for _ in jax.tree.leaves(shapes[0])],
        *[Place(storage, replaces=i) for i in range(len(after))],
    ]
    staged = Staged(closed, inputs, outputs, mesh, home, storage)
    tree = jax.tree.structure(shapes)

    def call(state: Any, data: Any) -> Any:
        outs, _ = staged([*jax.tree.leaves(state), *jax.tree.leaves(data)])
        return jax.tree.unflatten(tree, outs)

    return call
