"""Combines the values of the replicas in a cross-replica context."""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np

from distributary.context import in_global_view
from distributary.devices import (
    JobEvent,
    ProgramKind,
    dispatcher_for,
    for_target,
    inside_jax_trace,
    job_programs,
    local_copy,
    local_replicas,
    put_stacked,
)
from distributary.engine import Placement
from distributary.errors import (
    InvalidTypeError,
    InvalidValueError,
    ReplicaMismatchError,
    UnsupportedError,
    checked_int,
    shown,
)
from distributary.job import consensus
from distributary.options import CommunicationOptions, ReduceOp
from distributary.tracing import current_scope
from distributary.variables import (
    CrossDeviceOps,
    IndexedSlices,
    Mirrored,
    MirroredVariable,
    PerReplica,
    SyncOnReadVariable,
    all_gather,
    check_reducible,
    component_arrays,
    map_leaves,
    over_replicas,
    reduce_nest,
    stack_components,
)
from distributary.xla_cpu import with_exchanged_sums

# The dims within each component that are reduced as well.
_Axes: TypeAlias = tuple[int, ...] | None


@final
@dataclass(frozen=True, eq=False)
class CrossReplica:
    """Reductions and gathers over the replicas of one strategy.

    Args:
        strategy: The strategy, for messages.
        placement: The devices, and where values lie on them.
        ops: The reduction algorithm.
        options: The communication options of the strategy.
    """

    _strategy: Any
    _placement: Placement
    _ops: CrossDeviceOps
    _options: CommunicationOptions
    _jitted: dict[Any, Any] = field(default_factory=dict, init=False)

    @functools.cached_property
    def _mesh(self) -> Any:
        """The mesh of programs that combine values; None on one device."""
        placement = self._placement
        is_one_device = placement.num_replicas == 1 or placement.workers_mesh is not None
        return None if is_one_device else placement.mesh

    @property
    def _num_replicas(self) -> int:
        return 1 if in_global_view() else self._placement.num_replicas

    def reduce(
        self, op: ReduceOp, value: object, axis: object, options: CommunicationOptions | None = None
    ) -> Any:
        """Sums or averages every leaf of a nest over the replicas, see `Strategy.reduce`."""
        axes = _check_axis(axis)
        merged = self._options.merge(options)
        leaves, tree = jax.tree.flatten(
            value,
            is_leaf=lambda x: isinstance(x, (PerReplica, Mirrored, IndexedSlices)) or x is None,
        )
        rows = [self._rows(leaf) for leaf in leaves]
        together = {
            i: row for i, row in enumerate(rows) if row is not None and row.form != "components"
        }
        results: dict[int, Any] = {}
        if together:
            # One collective for all of them.
            key = ("reduce", op, axes, merged)
            reduced = self._on_replicas(
                key,
                lambda nests: [self._reduce_nest(op, axes, nest, merged) for nest in nests],
                list(together.values()),
            )
            results = dict(zip(together, reduced, strict=True))
        for i, leaf in enumerate(leaves):
            row = rows[i]
            if row is not None and i not in results:
                results[i] = self._reduce_uneven(op, axes, row)
            elif row is None:
                results[i] = self._reduce_whole(op, axes, leaf)
        return self._at_home(jax.tree.unflatten(tree, [results[i] for i in range(len(leaves))]))

    def _at_home(self, results: object) -> Any:
        home = self._placement.home
        if home is None or current_scope() is not None or inside_jax_trace():
            return results
        return jax.tree.map(
            lambda x: jax.device_put(x, home) if isinstance(x, jax.Array) else x, results
        )

    def gather(self, value: object, axis: int) -> Any:
        """Concatenates every leaf of a nest in replica order, see `Strategy.gather`."""
        axis = checked_int("gather: axis", axis)
        return self._at_home(map_leaves(lambda leaf: self._gather_leaf(leaf, axis), value))

    def _gather_leaf(self, leaf: object, axis: int) -> Any:
        _refuse_slices(leaf, "gather", "strategy.reduce")
        rows = self._rows(leaf)
        if rows is None:
            if isinstance(leaf, (Mirrored, MirroredVariable)) and self._num_replicas > 1:
                parts = [jnp.asarray(leaf)] * self._num_replicas
                return jnp.concatenate(parts, check_gather_axis(parts[0], axis))
            return leaf.value() if isinstance(leaf, Mirrored) else leaf
        if rows.form == "components":
            parts = [local_copy(part) for part in component_arrays(rows)]
            axis = check_gather_axis(parts[0], axis)
            _check_gathered(parts, axis)
            return jnp.concatenate(parts, axis)
        return self._on_replicas(
            ("gather", axis),
            lambda trees: [gather_nest(tree, axis, self._num_replicas) for tree in trees],
            [rows],
        )[0]

    def _rows(self, leaf: object) -> PerReplica | None:
        """Returns a leaf with one value per replica as a `PerReplica`, stacked if possible."""
        if isinstance(leaf, SyncOnReadVariable):
            scope = current_scope()
            if scope is None:
                return PerReplica.from_stacked(leaf._value, self._num_replicas)
            value = scope.read(leaf._handle)
            make = PerReplica.from_local if scope.kind == "replica" else PerReplica.from_stacked
            return make(value, self._num_replicas)
        if not isinstance(leaf, PerReplica):
            return None
        if leaf.num_replicas != self._num_replicas:
            raise ReplicaMismatchError(
                f"A PerReplica with {leaf.num_replicas} components cannot be combined by"
                f" {shown(self._strategy)}, which has {self._num_replicas} replicas."
            )
        scope = current_scope()
        if scope is not None and scope.kind == "replica" and leaf.form != "local":
            leaf.refuse()  # in `merge_call`
        if leaf.form != "components":
            return leaf
        stacked = stack_components(leaf)
        return leaf if stacked is None else self._placement.place_rows(stacked)

    def _on_replicas(
        self, key: Any, function: Callable[[list[Any]], list[Any]], rows: list[PerReplica]
    ) -> list[Any]:
        """Calls `function` with the trees of one replica, in a program of all replicas."""
        trees = [row.payload for row in rows]
        if rows[0].form == "local":
            return function(trees)
        scope = current_scope()
        is_for_workers = scope is not None and scope.is_for_workers
        mesh = self._placement.workers_mesh if is_for_workers else self._mesh
        if mesh is None and self._num_replicas == 1:
            return function([jax.tree.map(lambda x: x[0], tree) for tree in trees])
        if mesh is None:
            return over_replicas(function, None)(trees)
        make_program = lambda: over_replicas(with_exchanged_sums(function, mesh), mesh)
        if scope is not None or inside_jax_trace():
            return make_program()(trees)
        jitted = self._jitted.get(key)
        if jitted is None:
            kind = ProgramKind(key[0], trains=False)
            jitted = self._jitted[key] = for_target(jax.jit(make_program()), self._mesh, kind)
        if self._mesh.is_multi_process:
            job_programs.begin(_event_of(key, trees))
        result = self._placement.dispatcher.run(
            jitted, lambda result: next(iter(jax.tree.leaves(result)), None), trees
        )
        return jax.tree.map(local_copy, result)

    def _reduce_nest(
        self, op: ReduceOp, axes: _Axes, nest: object, options: CommunicationOptions
    ) -> Any:
        """Reduces this replica's nest over `axes` and the replicas; call in a replica program."""
        ops, num_replicas = self._ops, self._num_replicas
        if axes is None:
            return reduce_nest(ops, op, nest, num_replicas, options)
        nest = _dense(nest)

        def reduce_leaf(leaf: object) -> Any:
            part, num_elements, dtype = _summed(op, axes, leaf)
            if op is ReduceOp.SUM:
                return ops.all_reduce(op, [part], num_replicas, options)[0]
            parts = [part, jnp.int32(num_elements)]
            total, count = ops.all_reduce(ReduceOp.SUM, parts, num_replicas, options)
            return _divide(total, count, dtype)

        return jax.tree.map(reduce_leaf, nest)

    def _reduce_uneven(self, op: ReduceOp, axes: _Axes, row: PerReplica) -> Any:
        components = [jax.tree.map(local_copy, part) for part in component_arrays(row)]
        if axes is None and all(isinstance(c, IndexedSlices) for c in components):
            values = jnp.concatenate([c.values for c in components])
            if op is ReduceOp.MEAN:
                values = values / self._num_replicas
            ids = jnp.concatenate([c.indices for c in components])
            return IndexedSlices(values, ids, components[0].dense_shape)
        texts = [jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", c) for c in components]
        if axes is None:
            raise ReplicaMismatchError(
                f"reduce: the components are {texts}; with axis=None all replicas must"
                " agree. For values with one entry per example give the axis of the examples,"
                " strategy.reduce(op, value, axis=0), which weights every example the same."
            )
        components = [_dense(component) for component in components]

        def total(*leaves: Any) -> Any:
            sums, counts, dtypes = zip(*(_summed(op, axes, leaf) for leaf in leaves), strict=True)
            if len({part.shape for part in sums}) > 1 or len({*dtypes}) > 1:
                raise ReplicaMismatchError(
                    f"reduce: the components are {texts}; they may differ in the dims of axis="
                    f"{axes} only. Give the axis of the examples, or (0, 1) for both."
                )
            result = sum(sums[1:], sums[0])
            return result if op is ReduceOp.SUM else _divide(result, sum(counts), dtypes[0])

        return jax.tree.map(total, *components)

    def _reduce_whole(self, op: ReduceOp, axes: _Axes, leaf: object) -> Any:
        """Reduces a value that is not distributed, or that is the same on all replicas."""
        num_replicas = self._num_replicas
        same_everywhere = isinstance(leaf, (Mirrored, MirroredVariable))
        value = jnp.asarray(leaf) if same_everywhere else leaf
        if axes is None:
            if op is ReduceOp.SUM and num_replicas > 1:
                what = "a mirrored value" if same_everywhere else "not a distributed value"
                raise InvalidValueError(
                    f"reduce: cannot SUM {shown(leaf)} over {num_replicas} replicas: it is {what},"
                    " so it is not clear whether it counts once. Sum what Strategy.run returned, or"
                    " use ReduceOp.MEAN to get it back."
                )
            return value
        total, count, dtype = _summed(op, axes, value)
        return total * num_replicas if op is ReduceOp.SUM else _divide(total, count, dtype)


def _dense(nest: object) -> Any:
    """Returns a nest whose `IndexedSlices` are dense arrays: their indices do not add up."""
    make = lambda leaf: leaf.to_dense() if isinstance(leaf, IndexedSlices) else leaf
    return map_leaves(make, nest)


def _event_of(key: tuple[Any, ...], trees: list[Any]) -> JobEvent:
    name, *options = key
    leaves, tree = jax.tree.flatten(trees)
    return _event(name, repr(options), tree, tuple((x.shape[1:], x.dtype) for x in leaves))


@functools.lru_cache(maxsize=1024)
def _event(name: str, options: str, tree: object, leaves: tuple[Any, ...]) -> JobEvent:
    values = ", ".join(f"{dtype}{list(shape)}" for shape, dtype in leaves)
    return JobEvent(name, lambda: [(f"{name} of {values} with {options}, as {tree}", "")])


def _check_axis(axis: object) -> _Axes:
    if axis is None:
        return None
    axes = axis if isinstance(axis, tuple) else (axis,)
    if not all(isinstance(a, int) and not isinstance(a, bool) for a in axes):
        raise InvalidTypeError(
            f"reduce: axis is {axis!r}, expected None, an int or a tuple of ints."
        )
    return axes


def _summed(op: ReduceOp, axes: tuple[int, ...], value: Any) -> tuple[Any, int, Any]:
    """Sums a component over dims.

    Returns:
        The sum, for a mean in a dtype in which it does not overflow; the number of elements in it;
        and the dtype of the component.
    """
    array = check_reducible(value, "reduce")
    for axis in axes:
        if not -array.ndim <= axis < array.ndim:
            raise InvalidValueError(
                f"reduce: axis {axis} is out of range for a component of shape {array.shape}. Write"
                " axis=None to combine the replicas' values element by element."
            )
    dims = tuple([axis % array.ndim for axis in axes])
    dtype = array.dtype
    is_narrow = dtype in (jnp.float16, jnp.bfloat16) or not jnp.issubdtype(dtype, jnp.inexact)
    wide = jnp.float32 if op is ReduceOp.MEAN and is_narrow else dtype
    return jnp.sum(array, dims, dtype=wide), math.prod([array.shape[dim] for dim in dims]), dtype


def _divide(total: Any, count: Any, dtype: Any) -> Any:
    """Returns the mean of values of `dtype`; float32 for integers."""
    mean = total / jnp.asarray(count, total.dtype)
    return mean.astype(dtype) if jnp.issubdtype(dtype, jnp.inexact) else mean


def check_gather_axis(array: Any, axis: int) -> int:
    """Returns `axis` counted from the start."""
    if array.ndim == 0:
        raise InvalidValueError(
            "gather: a component is a scalar and has no dim to concatenate. Give it one,"
            " value[None], or use reduce."
        )
    if not -array.ndim <= axis < array.ndim:
        raise InvalidValueError(
            f"gather: axis {axis} is out of range for a component of shape {array.shape}."
        )
    return axis % array.ndim


def _refuse_slices(leaf: object, who: str, other: str) -> None:
    if isinstance(leaf, IndexedSlices):
        raise UnsupportedError(
            f"{who}: IndexedSlices cannot be gathered. Use {other}, which concatenates their rows,"
            " or gather .values and .indices."
        )


def _check_gathered(parts: list[Any], axis: int) -> None:
    def others(part: Any) -> Any:
        return part.dtype, part.ndim, *part.shape[:axis], *part.shape[axis + 1 :]

    for i, part in enumerate(parts):
        if others(part) != others(parts[0]):
            raise ReplicaMismatchError(
                f"gather: the component of replica {i} is {part.dtype}{[*part.shape]}, that of"
                f" replica 0 {parts[0].dtype}{[*parts[0].shape]}; only dim {axis} may differ."
            )


def gather_nest(tree: object, axis: int, num_replicas: int) -> Any:
    """Concatenates every array of a nest over the replicas; call in a replica program."""

    def gather(leaf: object) -> Any:
        _refuse_slices(leaf, "all_gather", "all_reduce")
        array = jnp.asarray(leaf)
        return all_gather(array, check_gather_axis(array, axis), num_replicas)

    return map_leaves(gather, tree)


# Up to this size, sending through the host is faster, also because nothing is compiled.
_MAX_HOST_BYTES = 1 << 16
# Every device gets a copy of each piece.
_PIECE_BYTES = 32 << 20
_NOTHING = np.empty(0, np.uint8)


def broadcast(values: list[np.ndarray], what: str, sharding: object) -> list[np.ndarray]:
    """Returns the chief's arrays on every worker.

    Args:
        values: Arrays of the same shapes and dtypes on all workers.
        what: Name of the arrays, for people.
        sharding: Sharding of values `[replica, ...]`.

    Raises:
        WorkerMismatchError: if another worker does something else, or its arrays have other shapes
            or dtypes.
    """
    num_bytes = sum(value.nbytes for value in values)
    place = f"{what}, {', '.join(f'{v.dtype}{list(v.shape)}' for v in values)}"
    job = consensus()
    assert job is not None
    buffers = [_bytes_of(np.ascontiguousarray(value)) for value in values]
    results = [np.empty(value.shape, value.dtype) for value in values]
    targets = [_bytes_of(result) for result in results]
    if num_bytes <= _MAX_HOST_BYTES:
        sent = job.broadcast(place, lambda: np.concatenate([*buffers, _NOTHING]).tobytes())
        _fill(targets, np.frombuffer(sent, np.uint8))
        return results
    job_programs.begin(JobEvent(place))
    for piece in _pieces([target.size for target in targets]):
        sources = [buffers[i][part] for i, part in piece] if job.number == 0 else []
        size = sum(part.stop - part.start for _, part in piece)
        received = _sum(np.concatenate([*sources, _NOTHING]), size, sharding)
        _fill([targets[i][part] for i, part in piece], received)
    return results


def _bytes_of(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def _fill(targets: list[np.ndarray], received: np.ndarray) -> None:
    at = 0
    for target in targets:
        target[...] = received[at : at + target.size]
        at += target.size


def _pieces(sizes: list[int]) -> Iterator[list[tuple[int, slice]]]:
    """Yields groups of parts of arrays with these sizes; each group has at most `_PIECE_BYTES`."""
    piece: list[tuple[int, slice]] = []
    free = _PIECE_BYTES
    for i, size in enumerate(sizes):
        start = 0
        while start < size:
            stop = min(size, start + free)
            piece.append((i, slice(start, stop)))
            free -= stop - start
            start = stop
            if not free:
                yield piece
                piece, free = [], _PIECE_BYTES
    if piece:
        yield piece


def _sum(data: np.ndarray, num_bytes: int, sharding: Any) -> np.ndarray:
    """Sums bytes over workers, of which only the chief has any; returns at least `num_bytes`."""
    # A power of two of words, so that only a few sizes are compiled.
    num_words = 1 << max(4, (max(1, -(-num_bytes // 4)) - 1).bit_length())
    rows = np.zeros((len(local_replicas(sharding)), num_words), np.uint32)
    rows[0].view(np.uint8)[: data.size] = data
    total = dispatcher_for(tuple(sharding.mesh.devices.flat)).run(
        lambda: np.asarray(_sum_of_rows(sharding)(put_stacked(rows, sharding)).addressable_data(0)),
        lambda result: None,
    )
    return total.view(np.uint8)


@functools.lru_cache(maxsize=8)
def _sum_of_rows(sharding: Any) -> Any:
    replicated = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())

    def sum_of_rows(rows: Any) -> Any:
        return rows.sum(axis=0, dtype=rows.dtype)

    return jax.jit(sum_of_rows, out_shardings=replicated)
