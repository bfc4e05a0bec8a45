"""What the hooks need to know about the replica whose code is being traced."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import lax

from distributary.collectives import ReduceOp
from distributary.context import (
    Mode,
    ReplicaContext,
    current_mode,
    default_mode,
    in_default_context,
    pop,
    push,
)
from distributary.keras_bridge._joined_sums import METRICS
from distributary.keras_bridge._variables import keeps_on_servers
from distributary.topology import REPLICA_AXIS
from distributary.tracing import current_scope
from distributary.variables import VariableAggregation, across_replicas


class _ThreadState(threading.local):
    in_optimizer = False
    is_sharing = False
    sums: "Sums | None" = None


_state = _ThreadState()


def replica_context() -> ReplicaContext | None:
    """The context of the replica that is being traced, if there are several replicas."""
    if in_default_context():
        return None
    mode = current_mode()
    if mode.role != "replica" or mode.strategy.num_replicas_in_sync == 1:
        return None
    context = mode.replica_context
    return None if context is None or context._has_whole_batch else context


def in_trainer() -> bool:
    """Whether a step of `fit`, `evaluate` or `predict` is being traced.

    Its gradients are averaged over the replicas, those of a custom loop in `Strategy.run` summed.
    """
    return _state.sums is not None


def in_optimizer() -> bool:
    """Whether an optimizer applies gradients that all replicas share."""
    return _state.in_optimizer


def is_sharing() -> bool:
    """Whether the replicas compute the same on a whole batch, and one optimizer updates for all."""
    return _state.is_sharing


def is_for_servers() -> bool:
    """Whether what is traced is a step whose updates are computed by parameter servers."""
    return current_scope() is not None and keeps_on_servers(current_mode().strategy)


def is_uneven() -> bool:
    """Whether the replicas may have batches of different sizes."""
    scope = current_scope()
    return scope is not None and scope.uneven is not None


@contextmanager
def optimizing() -> Iterator[None]:
    """Marks what runs inside as the work of an optimizer."""
    _state.in_optimizer = True
    try:
        yield
    finally:
        _state.in_optimizer = False


@contextmanager
def trainer_replica(strategy: Any) -> Iterator[ReplicaContext]:
    """Makes the code inside that of one replica of a step of `fit`, `evaluate` or `predict`."""
    number = lambda: lax.axis_index(REPLICA_AXIS)
    context = ReplicaContext(strategy, number, averages_gradients=True)
    mode = Mode(strategy, "replica", context)
    push(mode)
    before, _state.sums = _state.sums, Sums(context)
    try:
        yield context
    finally:
        _state.sums = before
        pop(mode)


@contextmanager
def sole_replica(strategy: Any) -> Iterator[None]:
    """Makes the code inside that of the only replica, also of a strategy that has several.

    With several, each of them computes the same: what a last batch that cannot be split needs.
    """
    mode = default_mode()
    if strategy.num_replicas_in_sync == 1:
        mode = Mode(strategy, "replica", ReplicaContext(strategy, lambda: jnp.int32(0)))
    push(mode)
    try:
        yield
    finally:
        pop(mode)


@contextmanager
def sharing_a_batch(strategy: Any) -> Iterator[None]:
    """Like `sole_replica`, where one optimizer updates for all replicas; see `is_sharing`."""
    before, _state.is_sharing = _state.is_sharing, True
    try:
        with sole_replica(strategy):
            yield
    finally:
        _state.is_sharing = before


def sums() -> "Sums":
    """The sums over replicas of the step of `fit`, `evaluate` or `predict` that is traced."""
    assert _state.sums is not None
    return _state.sums


def is_summed(variable: Any) -> bool:
    """Whether the value of a metric's variable is the sum of those of the replicas."""
    return variable.aggregation not in ("mean", "only_first_replica")


@final
class Sums:
    """The state of metrics over all replicas in one step; each value is combined once.

    Args:
        context: The replica whose step is traced.
    """

    def __init__(self, context: ReplicaContext) -> None:
        self._context = context
        self._known: dict[int, tuple[Any, Any]] = {}  # by id, with the value itself
        self._of_all: dict[int, Any] = {}

    def of(self, values: list[Any], variables: list[Any]) -> list[Any]:
        """Values of metrics' variables, combined as the variables say."""
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
        with jax.named_scope(METRICS):
            return self._context.all_reduce(op, values) if values else []

    def note_of_all(self, values: list[Any]) -> None:
        """Remembers results that were computed from sums, and so belong to all replicas."""
        self._of_all.update({id(value): value for value in values})

    def is_of_all(self, value: Any) -> bool:
        """Whether `value` is such a result."""
        return id(value) in self._of_all


def total(context: ReplicaContext, value: Any) -> Any:
    """The sum of `value` over all replicas."""
    return context.all_reduce(ReduceOp.SUM, value)


def agreed_state(
    context: ReplicaContext, variables: list[Any], before: list[Any], after: list[Any]
) -> list[Any]:
    """State that a step changed, the same on all replicas: the mean of floats, else replica 0's.

    Values that the step left alone, the same object before and after, stay as they are, and so do
    the states of seed generators, which advance alike everywhere.

    Args:
        context: The replica whose step is traced.
        variables: The Keras variables whose values they are.
        before: Values before the step.
        after: Values after it.
    """
    result = list(after)
    changed = [
        i
        for i, variable in enumerate(variables)
        if before[i] is not after[i] and variable.name != "seed_generator_state"
    ]
    floats = [i for i in changed if jnp.issubdtype(after[i].dtype, jnp.inexact)]
    if floats:
        means = context.all_reduce(ReduceOp.MEAN, [after[i] for i in floats])
        for i, mean in zip(floats, means, strict=True):
            result[i] = mean
    for i in set(changed) - set(floats):
        result[i] = of_first_replica(context, after[i])
    return result


def of_first_replica(context: ReplicaContext, value: Any) -> Any:
    """The value of replica 0, on all replicas."""
    return across_replicas(
        value,
        VariableAggregation.ONLY_FIRST_REPLICA,
        context.num_replicas_in_sync,
        lambda: context.replica_id_in_sync_group,
    )
