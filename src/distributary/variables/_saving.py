"""The state of variables as it is saved, and how it comes back."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distributary.topology import dispatcher_for, fetch_whole, job_programs, local_copy, shard_dim
from distributary.variables._aggregation import of_rows
from distributary.variables._enums import VariableAggregation
from distributary.variables._foreign import ForeignVariable
from distributary.variables._variable import Variable


def is_per_replica(variable: Variable | ForeignVariable) -> bool:
    """Whether the replicas hold values of their own, so that the state is `[replica, *shape]`."""
    return bool(variable._handle.per_replica)


def _is_divided(variable: Variable | ForeignVariable) -> bool:
    return shard_dim(variable._handle.parts) is not None


def stored_arrays(variables: Sequence[Variable | ForeignVariable]) -> list[Any]:
    """The stored arrays, `[replica, *shape]` of variables with a value per replica.

    All of them can be read by this process; NumPy arrays where devices hold parts. With several
    workers all have to call it, because values of other workers' devices are fetched. Steps may
    donate what is returned: the caller holds `topology.latest_program.lock` until it is done.
    """
    arrays: list[Any] = [
        fetch_whole(variable._value, variable.shape) if _is_divided(variable) else variable._value
        for variable in variables
    ]
    far = [
        i
        for i, array in enumerate(arrays)
        if isinstance(array, jax.Array)
        and not array.is_fully_addressable
        and not array.is_fully_replicated
    ]
    if far:
        rows = [arrays[i] for i in far]
        # No other program may be under way on the devices when this one meets its collectives.
        jax.block_until_ready(rows)
        mesh = rows[0].sharding.mesh
        replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        gather = jax.jit(lambda values: values, out_shardings=replicated)
        job_programs.begin()
        gathered = dispatcher_for(tuple(mesh.devices.flat)).run(gather, lambda out: out[0], rows)
        for i, array in zip(far, gathered, strict=True):
            arrays[i] = array
    return [local_copy(array) for array in arrays]


def put_back(
    variable: Variable | ForeignVariable,
    value: np.ndarray,
    rows_of: VariableAggregation | None,
) -> None:
    """Gives a variable its saved state.

    Args:
        variable: The variable.
        value: Array of the variable's shape, or `[replica, *shape]`.
        rows_of: None for one value, else the aggregation of the variable whose rows these are.

    With as many replicas as rows each gets its own back. Otherwise the aggregated value stays what
    it was: of a SUM replica 0 holds all and the others zero, so that it is the same sum exactly.

    Raises:
        InvalidValueError: for rows of aggregation NONE and another number of replicas.
    """
    if rows_of is not None:
        if is_per_replica(variable) and len(value) == variable._layout.num_replicas:
            _put(variable, value)
            return
        value = np.asarray(of_rows(jnp.asarray(value), rows_of, variable.name))
    if is_per_replica(variable):
        assert isinstance(variable, Variable)
        value = np.broadcast_to(value, (variable._layout.num_replicas, *value.shape))
        if variable.aggregation is VariableAggregation.SUM:
            value = value.copy()
            value[1:] = 0
    _put(variable, value)


def _put(variable: Variable | ForeignVariable, value: np.ndarray) -> None:
    if isinstance(variable, ForeignVariable):
        variable.variable.assign(value)
        return
    layout = variable._layout
    variable._value = layout.place(value, variable.dtype, stacked=is_per_replica(variable))
    variable._shared = False
