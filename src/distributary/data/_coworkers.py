"""Exchange between workers that read different data."""

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import PyTreeDef
from numpy.typing import DTypeLike

from distributary.devices import JobEvent, dispatcher_for, job_programs
from distributary.errors import ReplicaMismatchError
from distributary.job import Consensus
from distributary.variables import PerReplica

_ROWS = JobEvent("the rows of an uneven step")


@final
@dataclass(frozen=True)
class Coworkers:
    """All workers that read data for the same steps.

    Args:
        job: Lets the workers agree.
        num_parts: Number of replicas of each worker.
        place_rows: Puts stacked values on the devices of the replicas.
    """

    job: Consensus
    num_parts: int
    place_rows: Callable[[PerReplica], PerReplica]

    def gather(
        self, what: str, specs: Sequence[tuple[str, "Shape"]], arrays: Sequence[Any]
    ) -> list[jax.Array]:
        """Returns arrays of all replicas, on every worker; all workers call it together.

        Args:
            what: Name of the arrays, for error messages.
            specs: Dtype and shape of the array of every replica.
            arrays: The arrays of this worker's replicas, in order; empty if they have no rows.

        Raises:
            ReplicaMismatchError: if the arrays differ in dtype or in the number of dims.
        """
        dtypes, shapes = {dtype for dtype, _ in specs}, tuple(shape for _, shape in specs)
        if len(dtypes) > 1 or len({len(shape) for shape in shapes}) > 1:
            raise ReplicaMismatchError(
                f"{what}: the replicas get arrays {[f'{d}{list(shape)}' for d, shape in specs]};"
                " dtype and number of dims must agree."
            )
        largest = tuple(max(sizes) for sizes in zip(*shapes, strict=True))
        rows = np.zeros((self.num_parts, *largest), dtypes.pop())
        for row, array in zip(rows, arrays, strict=False):
            row[tuple(map(slice, array.shape))] = np.asarray(array)
        stacked = PerReplica.from_stacked(rows, self.num_parts)
        placed = self.place_rows(stacked).payload
        mesh = placed.sharding.mesh
        job_programs.begin(_ROWS)
        dispatcher = dispatcher_for(tuple(mesh.devices.flat))
        return dispatcher.run(_cutter(mesh), lambda parts: parts[0], placed, shapes)


@functools.lru_cache(maxsize=8)
def _cutter(mesh: jax.sharding.Mesh) -> Callable[..., list[jax.Array]]:
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.jit(_cut, static_argnums=1, out_shardings=replicated)


def _cut(rows: jax.Array, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    return [rows[(i, *map(slice, shape))] for i, shape in enumerate(shapes)]


Shape: TypeAlias = tuple[int, ...]
Leaves: TypeAlias = tuple[tuple[str, Shape], ...]
"""Dtype and shape of every leaf."""


@functools.lru_cache(maxsize=1024)
def signature(tree: PyTreeDef, parts: tuple[tuple[tuple[Any, Shape], ...], ...]) -> str:
    """Returns the shapes of a worker's part of a step, as text.

    Args:
        tree: Structure of the part of each replica.
        parts: For every replica, dtype and shape of every leaf.
    """
    named = [[[_dtype_name(dtype), shape] for dtype, shape in leaves] for leaves in parts]
    return json.dumps([str(tree), named])


def spec_of(value: Any) -> tuple[str, Shape]:
    """Returns the dtype and shape of an array or number, as it is on the devices."""
    return _dtype_name(jnp.result_type(value)), np.shape(value)


def _dtype_name(dtype: DTypeLike) -> str:
    # Devices may hold a shorter dtype.
    return str(jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True))


@functools.lru_cache(maxsize=1024)
def parts_of(text: str) -> tuple[str, tuple[Leaves, ...]]:
    """Returns the structure in a signature, and every replica's dtypes and shapes."""
    tree, parts = json.loads(text)
    return tree, tuple(tuple((dtype, tuple(shape)) for dtype, shape in leaves) for leaves in parts)
