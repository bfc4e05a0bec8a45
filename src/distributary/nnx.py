"""Flax NNX modules, optimizers and random streams in steps of a strategy."""

from contextlib import AbstractContextManager
from typing import Any, final

import jax
from jax.tree_util import keystr

from distributary.context import get_replica_context
from distributary.errors import MissingPackageError
from distributary.options import VariableAggregation, VariableSynchronization
from distributary.variables import Variable, assign, values

__all__ = ["State"]


@final
class State:
    """The state of NNX objects, in variables of the strategy in whose scope you create it.

    ```python
    with strategy.scope():
        state = distributary.nnx.State(model, optimizer)


    def step(x, y):
        with state.merged() as (model, optimizer):
            loss, gradients = nnx.value_and_grad(loss_of)(model, x, y)
            gradients = distributary.get_replica_context().all_reduce("MEAN", gradients)
            optimizer.update(model, gradients)
        return loss
    ```

    Parameters, the state of optimizers and counts of random streams are the same on all replicas.
    Batch statistics are each replica's own, and outside of a step their mean, as
    `tf.keras.layers.BatchNormalization` has them under `tf.distribute`. Each of several replicas
    draws its own random numbers; one replica draws those of NNX alone.

    Args:
        *objects: `nnx.Module`, `nnx.Optimizer`, `nnx.Rngs` or other NNX objects, which may share
            parts. Their values are copied.
    """

    def __init__(self, *objects: Any) -> None:
        self._graph, keys, statistics, others = _split(objects)
        self._impls = jax.tree.map(jax.random.key_impl, keys)
        self._variables = (
            jax.tree.map_with_path(_key_data, keys),
            jax.tree.map_with_path(_of_replicas, statistics),
            jax.tree.map_with_path(_variable, others),
        )

    @property
    def variables(self) -> dict[str, Variable]:
        """The variables by name, for `distributary.checkpoint.Checkpoint`."""
        return {variable.name: variable for variable in jax.tree.leaves(self._variables)}

    def merged(self) -> AbstractContextManager[Any]:
        """Gives the objects with their present values, and keeps what you change in them.

        Use it in a step and outside. An error in the block leaves the variables as they were.

        Returns:
            A context manager that gives copies of the objects: a tuple, or the only object.

        Raises:
            ReplicaDivergenceError: at the end of the block, if replicas would keep different values
                for the same parameter.
        """
        keys, statistics, others = values(self._variables)
        keys = jax.tree.map(_key_of_replica, keys, self._impls)
        objects = _flax_nnx().merge(self._graph, keys, statistics, others)
        return _Merged(objects, self._variables[1:])


@final
class _Merged:
    # Not a generator: messages name the line of the block.
    def __init__(self, objects: tuple[Any, ...], variables: Any) -> None:
        self._objects = objects
        self._variables = variables

    def __enter__(self) -> Any:
        return self._objects if len(self._objects) > 1 else self._objects[0]

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            _, _, *changed = _split(self._objects)
            assign(self._variables, tuple(changed))


def _flax_nnx() -> Any:
    try:
        from flax import nnx
    except ImportError:
        raise MissingPackageError("distributary.nnx needs flax: pip install flax.") from None
    return nnx


def _split(objects: tuple[Any, ...]) -> Any:
    # Random keys and statistics of a replica's rows are not the same on all replicas.
    nnx = _flax_nnx()
    return nnx.split(objects, nnx.RngKey, nnx.BatchStat, ...)


def _variable(path: Any, value: Any, **options: Any) -> Variable:
    name = keystr(path, simple=True, separator="/").removesuffix("/value")
    return Variable(value, name=name, **options)


def _of_replicas(path: Any, value: Any) -> Variable:
    synchronization = VariableSynchronization.ON_READ
    aggregation = VariableAggregation.MEAN
    return _variable(path, value, synchronization=synchronization, aggregation=aggregation)


def _key_data(path: Any, key: Any) -> Variable:
    return _variable(path, jax.random.key_data(key))


def _key_of_replica(data: Any, impl: Any) -> Any:
    key = jax.random.wrap_key_data(data, impl=impl)
    context = get_replica_context()
    if context is None or context.strategy.extended.num_replicas == 1:
        return key
    return jax.random.fold_in(key, context.replica_id_in_sync_group)
