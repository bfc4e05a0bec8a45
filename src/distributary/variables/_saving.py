"""The state of variables as it is saved, and how it comes back."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from distributary.job import copies
from distributary.topology import (
    JobEvent,
    dispatcher_for,
    fetch_whole,
    job_programs,
    local_copy,
    shard_dim,
)
from distributary.variables._aggregation import of_rows
from distributary.variables._array_files import SavedRows
from distributary.variables._enums import VariableAggregation
from distributary.variables._foreign import ForeignVariable
from distributary.variables._sharded_variable import ShardedVariable
from distributary.variables._variable import Variable

SavedVariable: TypeAlias = Variable | ForeignVariable | ShardedVariable


class Keeper(Protocol):
    """Other processes that keep variables, and save and restore the values by themselves."""

    def at_rest(self) -> AbstractContextManager[None]:
        """A context in which nobody changes the variables; raises why their training failed."""
        ...

    def copy(self, variables: Mapping[str, SavedVariable]) -> "KeptCopy":
        """A copy of the values that variables, by any names, have now."""
        ...

    def load(
        self,
        path: Path,
        variables: Mapping[str, SavedVariable],
        rows: Mapping[str, Sequence[SavedRows]],
    ) -> "KeptCopy":
        """Values for variables from a checkpoint.

        Args:
            path: Of the checkpoint.
            variables: By any names.
            rows: By the same names, all rows that the values consist of.
        """
        ...


class KeptCopy(Protocol):
    """Values for variables, kept beside those that they have."""

    def save(self, path: Path) -> Mapping[str, Sequence[SavedRows]]:
        """Writes them below a folder, and returns where they are; raises if they are not."""
        ...

    def adopt(self) -> None:
        """Makes them the values that the variables have."""
        ...

    def drop(self) -> None:
        """Frees the memory; called at the end, once."""
        ...


def keeper_of(variable: SavedVariable) -> Keeper | None:
    """Who keeps the value of a variable elsewhere, if it has elements."""
    shards = getattr(variable, "_shards", ())
    keeper: Keeper | None = getattr(shards[0], "_keeper", None) if shards else None
    return None if 0 in variable.shape else keeper


def is_per_replica(variable: SavedVariable) -> bool:
    """Whether the replicas hold values of their own, so that the state is `[replica, *shape]`."""
    return not isinstance(variable, ShardedVariable) and bool(variable._handle.per_replica)


def stored_arrays(variables: Sequence[SavedVariable]) -> list[Any]:
    """The stored arrays, `[replica, *shape]` of variables with a value per replica.

    All of them can be read by this process; NumPy arrays where devices hold parts. With several
    workers all have to call it, because values of other workers' devices are fetched. Steps may
    donate what is returned: the caller holds `topology.latest_program.lock` until it is done.
    """
    arrays = [_stored(variable) for variable in variables]
    mirrored = [
        (variable.name, array)
        for variable, array in zip(variables, arrays, strict=True)
        if isinstance(array, jax.Array)
        and array.is_fully_replicated
        and not array.is_fully_addressable
    ]
    if mirrored:
        copies.compare("while saving", *zip(*mirrored, strict=True))
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
        job_programs.begin(JobEvent("reading variables", lambda: _described(variables)))
        gathered = dispatcher_for(tuple(mesh.devices.flat)).run(gather, lambda out: out[0], rows)
        for i, array in zip(far, gathered, strict=True):
            arrays[i] = array
    return [local_copy(array) for array in arrays]


def _described(variables: Sequence[SavedVariable]) -> list[tuple[str, str]]:
    return [(f"{v.name} {v.dtype}{list(v.shape)}", "") for v in variables]


def _stored(variable: SavedVariable) -> Any:
    if isinstance(variable, ShardedVariable):
        return variable.numpy()
    if shard_dim(variable._handle.parts) is not None:
        return fetch_whole(variable._value, variable.shape)
    return variable._value


def put_back(
    variable: SavedVariable,
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


def _put(variable: SavedVariable, value: np.ndarray) -> None:
    if isinstance(variable, ForeignVariable):
        variable.variable.assign(value)
        return
    if isinstance(variable, ShardedVariable):
        variable.assign(value)
        return
    layout = variable._layout
    variable._value = layout.place(value, variable.dtype, stacked=is_per_replica(variable))
    variable._shared = False
