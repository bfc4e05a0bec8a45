"""Saving and restoring the state of variables."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from distributary.dispatch import JobEvent, dispatcher_for, fetch_whole, job_programs
from distributary.files import SavedRows
from distributary.job import copies
from distributary.topology import local_copy, shard_dim
from distributary.variables._aggregation import of_rows
from distributary.variables._enums import VariableAggregation
from distributary.variables._foreign import ForeignVariable
from distributary.variables._sharded_variable import ShardedVariable
from distributary.variables._variable import Variable

SavedVariable: TypeAlias = Variable | ForeignVariable | ShardedVariable


class Keeper(Protocol):
    """Other processes that keep variables, and save and restore their values themselves."""

    def at_rest(self) -> AbstractContextManager[None]:
        """Returns a context in which nobody changes the variables; raises why training failed."""
        ...

    def copy(self, variables: Mapping[str, SavedVariable]) -> "KeptCopy":
        """Copies the current values of variables, which are given under any names."""
        ...

    def load(
        self,
        path: Path,
        variables: Mapping[str, SavedVariable],
        rows: Mapping[str, Sequence[SavedRows]],
    ) -> "KeptCopy":
        """Loads values for variables from a checkpoint, without assigning them.

        Args:
            path: Path of the checkpoint.
            variables: The variables, by any names.
            rows: All rows that the values consist of, by the same names.
        """
        ...


class KeptCopy(Protocol):
    """A second set of values for variables, kept beside their current values."""

    def save(self, path: Path) -> Mapping[str, Sequence[SavedRows]]:
        """Writes the values to files in a folder, and returns the places of their rows."""
        ...

    def adopt(self) -> None:
        """Assigns the values to the variables."""
        ...

    def drop(self) -> None:
        """Frees the memory. It is called once, at the end."""
        ...


def keeper_of(variable: SavedVariable) -> Keeper | None:
    """Returns the keeper of a variable's value; None if it is kept here or has no elements."""
    shards = getattr(variable, "_shards", ())
    keeper: Keeper | None = getattr(shards[0], "_keeper", None) if shards else None
    return None if 0 in variable.shape else keeper


def is_per_replica(variable: SavedVariable) -> bool:
    """Returns whether each replica has its own value, so that the state is `[replica, *shape]`."""
    return not isinstance(variable, ShardedVariable) and bool(variable._handle.per_replica)


def stored_arrays(variables: Sequence[SavedVariable]) -> list[Any]:
    """Returns the stored arrays; `[replica, *shape]` for variables with a value per replica.

    This process can read all of them. If devices hold parts of a value, its array is a NumPy array.
    With several workers, all of them must call this, because it fetches values from other workers'
    devices. Steps may donate the arrays, so hold `topology.latest_program.lock` while you use them.
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
        # No other program may be running on the devices when this one gets to its collectives.
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
    """Restores the saved state of a variable.

    Args:
        variable: The variable.
        value: Array of the variable's shape, or `[replica, *shape]`.
        rows_of: None if `value` is a single value. Otherwise, the aggregation of the saved variable
            whose rows these are.

    If there are as many replicas as rows, each replica gets its own row back. Otherwise, the
    aggregated value stays the same. With SUM, replica 0 then holds all of it and the others hold
    zero, so that the sum is exactly the same.

    Raises:
        InvalidValueError: for rows with aggregation NONE and another number of replicas.
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
