"""The replica whose code is being traced, as far as the hooks need to know it."""

from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import jax.numpy as jnp

from distributary._threads import bound
from distributary.context import Mode, ReplicaContext, current_mode, in_default_context
from distributary.errors import ContextError, InvalidValueError
from distributary.keras_bridge._variables import keeps_on_servers
from distributary.options import ReduceOp, VariableAggregation
from distributary.tracing import current_scope

_in_optimizer: ContextVar[bool] = ContextVar("in an optimizer", default=False)


def _mode() -> Mode | None:
    """Returns the mode of the code of a replica, in `run` or in a step of `fit`; None elsewhere."""
    mode = None if in_default_context() else current_mode()
    return mode if mode is not None and mode.role == "replica" else None


def replica_context() -> ReplicaContext | None:
    """Returns the context of the replica that is being traced, if there are several replicas."""
    mode = _mode()
    if mode is None or mode.strategy.extended.num_replicas == 1:
        return None
    return mode.replica_context


def refuse_in_step(model: Any, what: str) -> None:
    """Checks that a method of a model is called outside of `Strategy.run`."""
    if _mode() is not None:
        raise ContextError(
            f"{model.name}.{what} was called inside Strategy.run. It works for all replicas, and"
            " needs the values of variables: call it outside."
        )


def in_own_step() -> bool:
    """Returns whether a step of the user's own is being traced, not one of `fit`."""
    mode = _mode()
    return mode is not None and not mode.is_global and not is_for_servers()


def in_optimizer() -> bool:
    """Returns whether an optimizer is applying gradients that all replicas share."""
    return _in_optimizer.get()


def is_away_from_variables() -> bool:
    """Returns whether the only replica computes on another device than that of the variables."""
    mode = _mode()
    if mode is None or current_scope() is None:
        return False
    extended = mode.strategy.extended
    return extended.num_replicas == 1 and extended.placement.home is not None


def is_for_servers() -> bool:
    """Returns whether the step that is traced gets its updates computed by parameter servers."""
    return current_scope() is not None and keeps_on_servers(current_mode().strategy)


def is_uneven() -> bool:
    """Returns whether the replicas may have batches of different sizes."""
    scope = current_scope()
    return scope is not None and scope.uneven is not None


def optimizing() -> AbstractContextManager[None]:
    """Runs the block as the work of an optimizer."""
    return bound(_in_optimizer, True)


def total(context: ReplicaContext, value: object) -> Any:
    """Returns the sum of `value` over all replicas."""
    return context.all_reduce(ReduceOp.SUM, value)


def aggregation_of_state(variable: Any, value: Any) -> VariableAggregation:
    """Returns how the values that replicas assign to a layer's state become one.

    Raises:
        InvalidValueError: if the variable's aggregation is `"sum"`.
    """
    if variable.aggregation == "sum":
        # Keras makes `assign_add` an `assign` of the new value, so what to add is not known.
        raise InvalidValueError(
            f"Variable {variable.path!r} has aggregation 'sum', but a layer assigns its value, and"
            " the replicas' values hold what was there before. Create it without an aggregation,"
            " and add up the replicas before you assign it:"
            " distributary.get_replica_context().all_reduce('SUM', value)."
        )
    if variable.aggregation == "only_first_replica":
        return VariableAggregation.ONLY_FIRST_REPLICA
    is_float = jnp.issubdtype(value.dtype, jnp.inexact)
    return VariableAggregation.MEAN if is_float else VariableAggregation.NONE
