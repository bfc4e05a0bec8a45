"""The aggregations of variables, applied to arrays."""

from typing import TypeVar

import jax
import jax.numpy as jnp

from distributary.errors import InvalidValueError
from distributary.options import CommunicationOptions, ReduceOp, VariableAggregation
from distributary.tracing import TraceScope
from distributary.variables._conversion import Change
from distributary.variables._cross_device_ops import NcclAllReduce
from distributary.variables._reduce_op import reduce_arrays

_Change = TypeVar("_Change", bound=Change)


def across_replicas(value: _Change, aggregation: VariableAggregation, scope: TraceScope) -> _Change:
    """Combines the replicas' values or rows in a replica program; every replica gets the result."""
    if aggregation is VariableAggregation.NONE or scope.num_replicas == 1:
        return value
    if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        return jax.tree.map(lambda part: _of_first(part, scope), value)
    return _reduce(ReduceOp.from_variable_aggregation(aggregation), value, scope.num_replicas)


def _of_first(value: jax.Array, scope: TraceScope) -> jax.Array:
    """Returns replica 0's value on every replica: a sum of this value and zeros."""
    number = value.astype(jnp.int32) if value.dtype == jnp.bool_ else value
    summand = jnp.where(scope.replica_id() == 0, number, jnp.zeros_like(number))
    return _reduce(ReduceOp.SUM, summand, scope.num_replicas).astype(value.dtype)


def _reduce(op: ReduceOp, value: _Change, num_replicas: int) -> _Change:
    (reduced,) = NcclAllReduce().all_reduce(op, [value], num_replicas, CommunicationOptions())
    return reduced


def check_readable(aggregation: VariableAggregation, name: str) -> None:
    """Checks that an ON_READ variable has an aggregation, without which it cannot be read."""
    if aggregation is VariableAggregation.NONE:
        raise InvalidValueError(
            f"Variable {name!r} has synchronization ON_READ and aggregation NONE, so it has no"
            " single value outside of Strategy.run. Create it with aggregation SUM, MEAN or"
            " ONLY_FIRST_REPLICA, or look at strategy.experimental_local_results(v)."
        )


def of_rows(rows: jax.Array, aggregation: VariableAggregation, name: str) -> jax.Array:
    """Returns the aggregated value of an array `[replica, *shape]`."""
    check_readable(aggregation, name)
    if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        return rows[0]
    op = ReduceOp.from_variable_aggregation(aggregation)
    return reduce_arrays(
        op, [rows], rows.shape[0], lambda parts: [p.sum(0, p.dtype) for p in parts]
    )[0]


def parts_of(value: jax.Array, aggregation: VariableAggregation, num_replicas: int) -> jax.Array:
    """Returns rows `[replica, *shape]` whose aggregated value is `value`."""
    rows = jnp.broadcast_to(value, (num_replicas, *value.shape))
    if aggregation is not VariableAggregation.SUM:
        return rows
    if jnp.issubdtype(value.dtype, jnp.inexact):
        return rows / jnp.asarray(num_replicas, value.dtype)
    # With integers, replica 0 takes the remainder, so that nothing is lost.
    quotients = rows // num_replicas
    return quotients.at[0].add(value % num_replicas)
