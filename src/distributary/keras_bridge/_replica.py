"""The replica whose code is being traced, as far as the hooks need to know it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import jax
import jax.numpy as jnp

from distributary.collectives import ReduceOp
from distributary.context import (
    Mode,
    ReplicaContext,
    current_mode,
    default_mode,
    entered,
    in_default_context,
)
from distributary.engine import traced_replica_id
from distributary.errors import InvalidValueError
from distributary.keras_bridge._variables import keeps_on_servers
from distributary.rows import STATE
from distributary.tracing import current_scope
from distributary.variables import VariableAggregation, across_replicas
from distributary.xla_cpu import JOINABLE


class _ThreadState(threading.local):
    in_optimizer = False
    is_away = False
    weight: Any = 1
    sums: "Sums | None" = None


_state = _ThreadState()


def replica_context() -> ReplicaContext | None:
    """Returns the context of the replica that is being traced, if there are several replicas."""
    if in_default_context():
        return None
    mode = current_mode()
    if mode.role != "replica" or mode.strategy.num_replicas_in_sync == 1:
        return None
    context = mode.replica_context
    return None if context is None or context._has_whole_batch else context


def in_trainer() -> bool:
    """Returns whether a step of `fit`, `evaluate` or `predict` is being traced.

    In such a step, gradients are averaged over the replicas. In a custom loop with `Strategy.run`,
    they are summed.
    """
    return _state.sums is not None


def in_optimizer() -> bool:
    """Returns whether an optimizer is applying gradients that all replicas share."""
    return _state.in_optimizer


def is_away_from_variables() -> bool:
    """Returns whether the only replica computes on another device than that of the variables."""
    return _state.is_away and current_scope() is not None


def is_for_servers() -> bool:
    """Returns whether the step that is traced gets its updates computed by parameter servers."""
    return current_scope() is not None and keeps_on_servers(current_mode().strategy)


def is_uneven() -> bool:
    """Returns whether the replicas may have batches of different sizes."""
    scope = current_scope()
    return scope is not None and scope.uneven is not None


@contextmanager
def optimizing() -> Iterator[None]:
    """Runs the block as the work of an optimizer."""
    _state.in_optimizer = True
    try:
        yield
    finally:
        _state.in_optimizer = False


@contextmanager
def trainer_replica(strategy: Any, num_rows: int) -> Iterator[ReplicaContext]:
    """Runs the block as the code of one replica of a step of `fit`, `evaluate` or `predict`.

    Args:
        strategy: The strategy.
        num_rows: Number of rows of its part of the batch.
    """
    context = ReplicaContext(strategy, traced_replica_id, averages_gradients=True)
    before = _state.sums, _state.weight
    with entered(Mode(strategy, "replica", context)):
        _state.sums, _state.weight = Sums(context), 1
        try:
            scope = current_scope()
            if scope is not None and scope.uneven is not None:
                scope.num_rows = num_rows
                # Float64 where that is enabled: what is multiplied keeps its own dtype.
                mean = total(context, jnp.asarray(num_rows, float)) / context.num_replicas_in_sync
                _state.weight = num_rows / mean
            yield context
        finally:
            _state.sums, _state.weight = before


@contextmanager
def run_replica(strategy: Any) -> Iterator[ReplicaContext]:
    """Runs the block as the code of one replica of `Strategy.run`."""
    context = ReplicaContext(strategy, traced_replica_id)
    with entered(Mode(strategy, "replica", context)):
        yield context


def weight_of_rows() -> Any:
    """Returns this replica's number of rows over the mean of all; 1 unless a batch is uneven."""
    return _state.weight


def mean_over_rows(context: ReplicaContext, values: list[Any]) -> list[Any]:
    """Returns the means over the whole batch of values that are means over a replica's rows."""
    if not values:
        return []
    parts = [value * weight_of_rows() for value in values] if is_uneven() else values
    means: list[Any] = context.all_reduce(ReduceOp.MEAN, parts)
    return [
        mean.astype(value.dtype) if jnp.issubdtype(value.dtype, jnp.inexact) else mean
        for mean, value in zip(means, values, strict=True)
    ]


@contextmanager
def sole_replica(strategy: Any) -> Iterator[None]:
    """Runs the block as the code of the only replica, even if the strategy has several.

    If it has several, each of them computes the same. This is for a last batch that cannot be
    split.
    """
    mode = default_mode()
    if strategy.num_replicas_in_sync == 1:
        mode = Mode(strategy, "replica", ReplicaContext(strategy, lambda: jnp.int32(0)))
    with entered(mode):
        before, _state.is_away = _state.is_away, strategy.extended.placement.home is not None
        try:
            yield
        finally:
            _state.is_away = before


def sums() -> "Sums":
    """Returns the sums over replicas for the step of `fit` or a related method that is traced."""
    assert _state.sums is not None
    return _state.sums


def is_summed(variable: Any) -> bool:
    """Returns whether the value of a metric's variable is the sum of the replicas' values."""
    return variable.aggregation not in ("mean", "only_first_replica")


@final
class Sums:
    """The state of metrics over all replicas in one step; each value is combined once.

    Args:
        context: The replica whose step is traced.
    """

    def __init__(self, context: ReplicaContext) -> None:
        self._context = context
        self._known: dict[int, tuple[Any, Any]] = {}  # by id, together with the value itself
        self._of_all: dict[int, Any] = {}

    def of(self, values: list[Any], variables: list[Any]) -> list[Any]:
        """Combines values of metrics' variables over the replicas, as each variable specifies."""
        new: dict[str, list[Any]] = {"sum": [], "mean": [], "only_first_replica": []}
        for value, variable in zip(values, variables, strict=True):
            if id(value) not in self._known:
                new["sum" if is_summed(variable) else variable.aggregation].append(value)
        for aggregation, of_kind in new.items():
            for value, combined in zip(of_kind, self._combined(aggregation, of_kind), strict=True):
                self._known[id(value)] = value, combined
        return [self._known[id(value)][1] for value in values]

    def _combined(self, aggregation: str, values: list[Any]) -> list[Any]:
        if aggregation == "only_first_replica":
            return [of_first_replica(self._context, value) for value in values]
        op = ReduceOp.SUM if aggregation == "sum" else ReduceOp.MEAN
        with jax.named_scope(JOINABLE):
            return self._context.all_reduce(op, values) if values else []

    def note_of_all(self, values: list[Any]) -> None:
        """Remembers results that were computed from sums, and so hold for all replicas."""
        self._of_all.update({id(value): value for value in values})

    def is_of_all(self, value: object) -> bool:
        """Returns whether `value` is such a result."""
        return id(value) in self._of_all


def total(context: ReplicaContext, value: object) -> Any:
    """Returns the sum of `value` over all replicas."""
    return context.all_reduce(ReduceOp.SUM, value)


def agreed_state(
    context: ReplicaContext, variables: list[Any], before: list[Any], after: list[Any]
) -> list[Any]:
    """Makes changed state the same on all replicas: the mean of floats, else replica 0's values.

    An aggregation `"only_first_replica"` of a variable takes replica 0's value of floats, too.
    Values that the step did not change (the same object before and after) are returned unchanged.
    So are the states of seed generators, which advance in the same way on all replicas.

    Args:
        context: The replica whose step is traced.
        variables: The Keras variables to which the values belong.
        before: Values before the step.
        after: Values after the step.
    """
    result = list(after)
    changed = [
        i
        for i, variable in enumerate(variables)
        if before[i] is not after[i] and variable.name != "seed_generator_state"
    ]
    aggregations = {i: aggregation_of_state(variables[i], after[i]) for i in changed}
    floats = [i for i in changed if aggregations[i] is VariableAggregation.MEAN]
    with jax.named_scope(STATE):
        means = mean_over_rows(context, [after[i] for i in floats])
        for i, mean in zip(floats, means, strict=True):
            result[i] = mean
        for i in set(changed) - set(floats):
            result[i] = of_first_replica(context, after[i])
    return result


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


def of_first_replica(context: ReplicaContext, value: Any) -> Any:
    """Returns the value of replica 0 on all replicas."""
    return across_replicas(
        value,
        VariableAggregation.ONLY_FIRST_REPLICA,
        context.num_replicas_in_sync,
        lambda: context.replica_id_in_sync_group,
    )
