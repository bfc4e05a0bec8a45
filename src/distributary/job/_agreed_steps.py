"""Steps of workers that read different data, where some workers may have less of it."""

import functools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import PyTreeDef
from numpy.typing import DTypeLike

from distributary.devices import JobEvent, Nest, dispatcher_for, job_programs
from distributary.errors import InvalidValueError, ReplicaMismatchError
from distributary.job._consensus import Consensus
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


@final
@dataclass(frozen=True)
class Ready:
    """The data that a worker has for a step.

    Attributes:
        signature: Signature of the parts.
        tree: Structure of a part.
        parts: Returns nests of arrays, one per replica of this worker.
        values: The values of the step if the parts of all replicas of all workers have the same
            shapes; None if not even the parts of this worker do.
    """

    signature: str
    tree: PyTreeDef
    parts: Callable[[], Iterable[Any]]
    values: Any


@final
@dataclass(eq=False)
class AgreedSteps:
    """The steps of one pass: as many as the worker with the most data has.

    Before each step, in the thread that takes it, every worker learns the shapes of all parts.
    Workers that have no data left get parts without rows.

    Attributes:
        coworkers: All workers that take the steps.
        place: Name of the pass.
        number: Number of the next step.
        spec: Returns the specs of a part.
        finish: Turns the parts of all replicas, on every worker, into the values of a step.
    """

    coworkers: Coworkers
    place: str
    number: int
    spec: Callable[[], Nest]
    finish: Callable[[list[Nest]], Any]

    def __post_init__(self) -> None:
        self._first = self.number
        self._tree: PyTreeDef = None
        self._over = False

    def next(self, take: Callable[[], Ready]) -> Any:
        """Returns the values of the next step; `take` returns this worker's data for it.

        Raises:
            StopIteration: when no worker has data left.
            ClusterError: if another worker failed, or takes other steps.
            ReplicaMismatchError: if the parts do not fit together.
        """
        if self._over:
            raise StopIteration
        ready: Ready | None = None

        def signature() -> str:
            nonlocal ready
            try:
                ready = take()
            except StopIteration:
                return ""
            self._tree = ready.tree
            return ready.signature

        # Invariant: every worker agrees once per step, also one whose data has ended or failed. So
        # all see the same texts, and take the same way below: a differing one is a deadlock.
        texts = self.coworkers.job.agree(f"step {self.number} of {self.place}", signature)
        self.number += 1
        first = max(texts)
        if not first:
            self._over = True
            raise StopIteration
        if ready is not None and ready.values is not None and texts.count(first) == len(texts):
            return ready.values
        return self._uneven(texts, ready)

    def _uneven(self, texts: list[str], ready: Ready | None) -> Any:
        if self.number == self._first + 1 and "" in texts:
            # Workers that never had data must learn the structure of a part.
            self.coworkers.job.agree(f"the structure of {self.place}", self._find_tree)
        tree, parts = parts_of(max(texts))
        for name, text in zip(self.coworkers.job.names, texts, strict=True):
            other = parts_of(text)[0] if text else tree
            if other != tree:
                raise ReplicaMismatchError(
                    f"Step {self.number - 1} of {self.place}: {name} has elements of structure"
                    f" {other}, another worker has {tree}; all must have the same structure."
                )
        nothing: tuple[Leaves, ...] = ()
        if "" in texts:
            nothing = (self._without_rows(parts[0]),) * self.coworkers.num_parts
        leaves = [part for text in texts for part in (parts_of(text)[1] if text else nothing)]
        replicas: list[list[Any]] = []
        if ready is not None:
            replicas = [jax.tree.leaves(part) for part in ready.parts()]
        what = f"step {self.number - 1} of {self.place}"
        columns = [
            self.coworkers.gather(
                what, [part[i] for part in leaves], [arrays[i] for arrays in replicas]
            )
            for i in range(len(leaves[0]))
        ]
        return self.finish(
            [jax.tree.unflatten(self._tree, part) for part in zip(*columns, strict=True)]
        )

    def _find_tree(self) -> None:
        self._tree = jax.tree.structure(self.spec())

    def _without_rows(self, leaves: Leaves) -> Leaves:
        if any(not shape for _, shape in leaves):
            raise InvalidValueError(
                f"Step {self.number - 1} of {self.place}: a worker has no data left, and the"
                " elements are scalars, which cannot be empty. Batch them, or give every worker the"
                " same number of elements."
            )
        return tuple((dtype, (0, *shape[1:])) for dtype, shape in leaves)
