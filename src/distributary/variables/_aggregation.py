"""The aggregations of variables, applied to arrays."""

from collections.abc import Callable

import jax.numpy as jnp

from distributary.collectives import NcclAllReduce, ReduceOp, all_gather, reduce_arrays
from distributary.errors import InvalidValueError
from distributary.options import CommunicationOptions
from distributary.tracing import Array
from distributary.values import IndexedSlices
from distributary.variables._enums import VariableAggregation


def across_replicas(
    value: Array,
    aggregation: VariableAggregation,
    num_replicas: int,
    replica_id: Callable[[], Array],
) -> Array:
    """Combines the replicas' values inside a replica program; every replica gets the result."""
    if aggregation is VariableAggregation.NONE or num_replicas == 1:
        return value
    if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        # A sum of replica 0's value and zeros.
        is_bool = value.dtype == jnp.bool_
        number = value.astype(jnp.int32) if is_bool else value
        own = jnp.where(replica_id() == 0, number, jnp.zeros_like(number))
        return _reduce(ReduceOp.SUM, own, num_replicas).astype(value.dtype)
    op = ReduceOp.from_variable_aggregation(aggregation)
    return _reduce(op, value, num_replicas)


def _reduce(op: ReduceOp, value: Array, num_replicas: int) -> Array:
    return NcclAllReduce().all_reduce(op, [value], num_replicas, CommunicationOptions())[0]


def slices_across_replicas(
    slices: IndexedSlices,
    aggregation: VariableAggregation,
    num_replicas: int,
    replica_id: Callable[[], Array],
) -> IndexedSlices:
    """Combines the replicas' rows inside a replica program; every replica gets the result."""
    if aggregation is VariableAggregation.NONE or num_replicas == 1:
        return slices
    if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        values = across_replicas(slices.values, aggregation, num_replicas, replica_id)
        ids = across_replicas(slices.indices, aggregation, num_replicas, replica_id)
        return IndexedSlices(values, ids, slices.dense_shape)
    values = slices.values
    if aggregation is VariableAggregation.MEAN:
        values = values / num_replicas
    return IndexedSlices(
        all_gather(values, 0, num_replicas),
        all_gather(slices.indices, 0, num_replicas),
        slices.dense_shape,
    )


def check_readable(aggregation: VariableAggregation, name: str) -> None:
    """Checks that an ON_READ variable has an aggregation, without which it cannot be read."""
    if aggregation is VariableAggregation.NONE:
        raise InvalidValueError(
            f"Variable {name!r} has synchronization ON_READ and aggregation NONE, so it has no"
            " single value outside of Strategy.run. Create it with aggregation SUM, MEAN or"
            " ONLY_FIRST_REPLICA, or look at strategy.experimental_local_results(v)."
        )


def of_rows(rows: Array, aggregation: VariableAggregation, name: str) -> Array:
    """Returns the aggregated value of an array `[replica, *shape]`."""
    check_readable(aggregation, name)
    if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        return rows[0]
    op = ReduceOp.from_variable_aggregation(aggregation)
    return reduce_arrays(
        op, [rows], rows.shape[0], lambda parts: [p.sum(0, p.dtype) for p in parts]
    )[0]


def parts_of(value: Array, aggregation: VariableAggregation, num_replicas: int) -> Array:
    """Returns rows `[replica, *shape]` whose aggregated value is `value`."""
    rows = jnp.broadcast_to(value, (num_replicas, *value.shape))
    if aggregation is not VariableAggregation.SUM:
        return rows
    if jnp.issubdtype(value.dtype, jnp.inexact):
        return rows / jnp.asarray(num_replicas, value.dtype)
    # With integers, replica 0 takes the remainder, so that nothing is lost.
    quotients = rows // num_replicas
    return quotients.at[0].add(value % num_replicas)
