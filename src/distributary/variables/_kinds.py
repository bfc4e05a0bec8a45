"""Variables of several parts, copies on replicas or shards on servers, and of other libraries."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path
from jax.typing import ArrayLike

from distributary._late import libraries
from distributary.context import current_mode
from distributary.devices import in_device_memory, latest_program
from distributary.errors import (
    InvalidTypeError,
    InvalidValueError,
    UnsupportedError,
    check_type,
    shown,
)
from distributary.options import CommunicationOptions, ReduceOp, VariableAggregation
from distributary.tracing import Handle, TraceScope, check_not_frozen, current_scope
from distributary.variables._assignable import (
    NOT_LINEAR,
    SCATTER,
    Assignable,
    Change,
    GivenChange,
    checked_slices,
    combine,
)
from distributary.variables._cross_device_ops import NcclAllReduce
from distributary.variables._layout import VariableLayout
from distributary.variables._reductions import reduce_arrays
from distributary.variables._values import (
    Array,
    ArrayOperators,
    DistributedValues,
    IndexedSlices,
    Mirrored,
    PerReplica,
)
from distributary.variables._variable import Variable

# Variables with a copy per replica.

_Change = TypeVar("_Change", bound=Change)


class AggregatedVariable(Variable):
    """A variable with one value for all replicas. Values that they assign are combined."""

    def _change_traced(self, scope: TraceScope, kind: str, value: GivenChange) -> jax.Array:
        num_replicas = scope.num_replicas
        if (
            _is_in_replica(scope)
            and num_replicas > 1
            and self._aggregation is VariableAggregation.SUM
            and not isinstance(value, (Variable, jax.core.Tracer, IndexedSlices))
        ):
            raise InvalidValueError(
                f"Variable {self._name!r}: {kind} got {shown(value)}, which is the same on every"
                " replica, and aggregation is SUM: it is not clear whether it counts once or"
                f" {num_replicas} times. Assign an array computed in the step"
                " (jnp.asarray(value) counts once per replica), or use aggregation MEAN or"
                " ONLY_FIRST_REPLICA to count it once."
            )
        return super()._change_traced(scope, kind, value)

    def _combined(self, scope: TraceScope, value: Change) -> Change:
        if not _is_in_replica(scope):
            return value
        return across_replicas(value, self._aggregation, scope)

    def _check_scatter(self, kind: str) -> None:
        aggregated = self._aggregation in (VariableAggregation.SUM, VariableAggregation.MEAN)
        if kind in NOT_LINEAR and aggregated:
            raise UnsupportedError(
                f"Variable {self._name!r}: {kind} is not defined for aggregation"
                f" {self._aggregation.name}. Use aggregation NONE with equal rows on every replica,"
                " or ONLY_FIRST_REPLICA."
            )


def _is_in_replica(scope: TraceScope) -> bool:
    """Returns whether the traced code is that of one replica."""
    return scope.kind == "replica" and current_mode().role == "replica"


class DistributedVariable(Variable, DistributedValues):
    """The base of mirrored and sync-on-read variables."""

    @property
    def values(self) -> tuple["VariableComponent", ...]:
        """The copies of this process's replicas, to look at but not to assign."""
        scope = current_scope()
        if scope is not None:
            self._check_strategy("read")
            return self._components(self._copies_traced(scope))
        check_not_frozen(self._name, "read")
        with latest_program.lock:
            return self._components(self._copies(in_device_memory(self._whole())))

    def _components(self, copies: Sequence[jax.Array]) -> tuple["VariableComponent", ...]:
        return tuple([VariableComponent(self, i, copy) for i, copy in enumerate(copies)])

    def _copies(self, state: jax.Array) -> tuple[Any, ...]:
        raise NotImplementedError

    def _copies_traced(self, scope: TraceScope) -> tuple[Any, ...]:
        return self._copies(scope.read(self._handle))

    def __repr__(self) -> str:
        if current_scope() is not None:
            return self._text_of(self.name, None, type(self).__name__)
        return DistributedValues.__repr__(self)

    __str__ = __repr__


@final
class MirroredVariable(AggregatedVariable, DistributedVariable):
    """A variable with the same value on every replica, created by `Variable` in a scope."""

    def _copies(self, state: jax.Array) -> tuple[Any, ...]:
        return Mirrored(state, self._num_copies()).values

    def _num_copies(self) -> int:
        return len(self._layout.replicated.device_set)

    def __repr__(self) -> str:
        # With one copy for all replicas, as in `CentralStorageStrategy`, nothing is mirrored.
        if self._num_copies() == 1 < self._layout.num_replicas:
            return Variable.__repr__(self)
        return super().__repr__()

    __str__ = __repr__


@final
class SyncOnReadVariable(DistributedVariable):
    """A variable with a value per replica, aggregated when it is read outside of `run`.

    Its state is one array `[replica, *shape]`.
    """

    def _initial_state(self, initial: Array) -> jax.Array:
        num = self._layout.num_replicas
        rows = jnp.broadcast_to(jnp.asarray(initial), (num, *self._shape))
        return self._layout.place(rows, self._dtype, stacked=True)

    def _of_rows(self, state: Any) -> jax.Array:
        """Returns the aggregated value of the state, for a step that sees the whole batch."""
        return of_rows(state, self._aggregation, self._name)

    def _parts_of(self, value: jax.Array) -> jax.Array:
        """Returns state whose aggregated value is `value`."""
        return _rows_of(value, self._aggregation, self._layout.num_replicas)

    def _copies(self, state: jax.Array) -> tuple[Any, ...]:
        return PerReplica.from_stacked(state, self._layout.num_replicas).values

    def _copies_traced(self, scope: TraceScope) -> tuple[Any, ...]:
        value = scope.read(self._handle)
        if scope.kind == "function":
            return self._copies(value)
        num_replicas = scope.num_replicas
        return (value,) if num_replicas == 1 else PerReplica.from_local(value, num_replicas).values

    def _read_traced(self, scope: TraceScope) -> jax.Array:
        value = scope.read(self._handle)
        if scope.kind == "function":
            return self._of_rows(value)
        if current_mode().role == "cross":
            _check_readable(self._aggregation, self._name)
            return across_replicas(value, self._aggregation, scope)
        return value

    def _read_eager(self) -> jax.Array:
        return self._peek()

    def _peek(self) -> jax.Array:
        _check_readable(self._aggregation, self._name)
        with latest_program.lock:
            rows = PerReplica.from_stacked(self._value, self._layout.num_replicas)
            if self._aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
                return self._layout.bring(rows.values[0])
            # This is a program of all replicas, so it must go through the strategy's dispatcher.
            op = ReduceOp.from_variable_aggregation(self._aggregation)
            return self._layout.strategy.extended.combine.reduce(op, rows, None)

    def _check_cross_change(self, kind: str) -> None:
        # Checked before anything changes, because assign returns the new aggregated value.
        _check_readable(self._aggregation, self._name)
        if self._aggregation is VariableAggregation.SUM and kind != "assign":
            raise InvalidValueError(
                f"Variable {self._name!r}: {kind} in a cross-replica context is not defined for"
                " synchronization ON_READ with aggregation SUM, since each replica holds a part of"
                " the sum. Use assign, or call it inside Strategy.run."
            )

    def _change_eager(self, kind: str, value: Array) -> None:
        self._check_cross_change(kind)
        num = self._layout.num_replicas
        value = self._layout.bring(value, self._dtype, stacked=True)
        with latest_program.lock:
            if kind == "assign":
                rows = _rows_of(value, self._aggregation, num)
                self._value = self._layout.place(rows, self._dtype, stacked=True)
            else:
                self._value = combine(kind, self._value, value)
            self._shared = False

    def _change_traced(self, scope: TraceScope, kind: str, value: GivenChange) -> jax.Array:
        if scope.kind == "replica" and current_mode().role != "cross":
            return super()._change_traced(scope, kind, value)
        self._check_cross_change(kind)
        is_replica = scope.kind == "replica"
        num = scope.num_replicas if is_replica else self._layout.num_replicas
        converted = jnp.asarray(self._convert(kind, value), self._dtype)
        if kind == "assign":
            new = _rows_of(converted, self._aggregation, num)
            new = new[scope.replica_id()] if is_replica else new
        else:
            new = combine(kind, scope.read(self._handle), converted)
        scope.write(self._handle, new)
        return self._read_traced(scope)

    def _check_scatter(self, kind: str) -> None:
        raise UnsupportedError(
            f"Variable {self._name!r}: {kind} is not defined for synchronization ON_READ. Read it,"
            " change the array with .at[...] and assign it."
        )


Variable._of_replicas = MirroredVariable, SyncOnReadVariable


@final
class VariableComponent(ArrayOperators):
    """One replica's copy of a variable at the time of reading. It cannot be assigned."""

    def __init__(self, variable: Variable, replica: int, value: jax.Array) -> None:
        suffix = f"/replica_{replica}" if replica else ""
        self.name = f"{variable._name}{suffix}:0"
        self.variable = variable
        self._array = value
        variable._shared = True

    @property
    def device(self) -> jax.Device:
        """The JAX device that holds the copy."""
        return next(iter(self._array.devices()))

    def value(self) -> jax.Array:
        """Returns the copy as a JAX array."""
        return self._array

    read_value = value

    def numpy(self) -> np.ndarray:
        """Returns the copy as a NumPy array."""
        return np.array(self._array)

    def __repr__(self) -> str:
        return self.variable._text_of(self.name, self._array)


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


def _check_readable(aggregation: VariableAggregation, name: str) -> None:
    """Checks that an ON_READ variable has an aggregation, without which it cannot be read."""
    if aggregation is VariableAggregation.NONE:
        raise InvalidValueError(
            f"Variable {name!r} has synchronization ON_READ and aggregation NONE, so it has no"
            " single value outside of Strategy.run. Create it with aggregation SUM, MEAN or"
            " ONLY_FIRST_REPLICA, or look at strategy.experimental_local_results(v)."
        )


def of_rows(rows: jax.Array, aggregation: VariableAggregation, name: str) -> jax.Array:
    """Returns the aggregated value of an array `[replica, *shape]`."""
    _check_readable(aggregation, name)
    if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        return rows[0]
    op = ReduceOp.from_variable_aggregation(aggregation)
    return reduce_arrays(
        op, [rows], rows.shape[0], lambda parts: [p.sum(0, p.dtype) for p in parts]
    )[0]


def _rows_of(value: jax.Array, aggregation: VariableAggregation, num_replicas: int) -> jax.Array:
    """Returns rows `[replica, *shape]` whose aggregated value is `value`."""
    rows = jnp.broadcast_to(value, (num_replicas, *value.shape))
    if aggregation is not VariableAggregation.SUM:
        return rows
    if jnp.issubdtype(value.dtype, jnp.inexact):
        return rows / jnp.asarray(num_replicas, value.dtype)
    # With integers, replica 0 takes the remainder, so that nothing is lost.
    quotients = rows // num_replicas
    return quotients.at[0].add(value % num_replicas)


# Variables that are divided into shards.


@final
class ShardedVariable(Assignable):
    """A variable that is divided along dim 0 into shards.

    It behaves like the whole array in expressions; `for shard in v` iterates over the shards. If a
    step only looks up rows, by `v[ids]`, `jnp.take(v.value(), ids, axis=0)` or `embedding_lookup`,
    only these rows are fetched from the servers. Take gradients with respect to `v.variables`; each
    shard has its own optimizer state.

    Args:
        variables: The shards, in order. All have the same dtype, and the same shape except for
            dim 0.
        name: Name used in messages.

    Raises:
        InvalidTypeError: if a shard is not a variable.
        InvalidValueError: if there are no shards, or they differ in dtype or in other dims.

    Source: `tf.distribute.experimental.ShardedVariable`.
    """

    def __init__(self, variables: Sequence[Variable], name: str = "ShardedVariable") -> None:
        self._shards = list(variables)
        self._name = name
        if not self._shards:
            raise InvalidValueError(f"ShardedVariable {name!r}: variables is empty.")
        first = self._shards[0]
        for i, shard in enumerate(self._shards):
            check_type(f"ShardedVariable {name!r}: shard {i}", shard, Variable, "a Variable")
            if not shard.shape or (shard.dtype, shard.shape[1:]) != (first.dtype, first.shape[1:]):
                raise InvalidValueError(
                    f"ShardedVariable {name!r}: shard {i} is {shard.dtype}{list(shard.shape)} and"
                    f" shard 0 {first.dtype}{list(first.shape)}. All shards need the same"
                    " dtype, and the same shape except for dim 0."
                )
        sizes = [shard.shape[0] for shard in self._shards]
        self._starts = [int(start) for start in np.cumsum([0, *sizes])]
        self._shape = (self._starts[-1], *first.shape[1:])

    # Attributes

    @property
    def variables(self) -> list[Variable]:
        """The shards."""
        return list(self._shards)

    @property
    def name(self) -> str:
        """Name used in messages."""
        return self._name

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of all shards."""
        return self._shards[0].dtype

    @property
    def trainable(self) -> bool:
        """True if `GradientTape` watches the shards automatically."""
        return self._shards[0].trainable

    # Reading

    def value(self) -> jax.Array:
        """Returns the whole variable as a JAX array; raises the same errors as `Variable.value`."""
        return jnp.concatenate([shard.value() for shard in self._shards])

    def _peek(self) -> jax.Array:
        return jnp.concatenate([shard._peek() for shard in self._shards])

    def numpy(self) -> np.ndarray:
        """Returns the whole variable as a NumPy array; raises as `Variable.numpy` does."""
        return np.concatenate([shard.numpy() for shard in self._shards])

    def sparse_read(self, indices: ArrayLike, name: str | None = None) -> jax.Array:
        """Returns rows, `[*indices.shape, *shape[1:]]`; see `embedding_lookup`.

        Args:
            indices: Integer numbers of rows along dim 0.
            name: Has no effect.
        """
        return embedding_lookup(self, indices)

    def __getitem__(self, index: object) -> Any:
        for part, size in zip(_dims_of(index), self._shape, strict=False):
            if isinstance(part, int | np.integer) and not -size <= part < size:
                raise IndexError(
                    f"ShardedVariable {self._name!r}: index {index!r} is out of range for shape"
                    f" {self._shape}."
                )
        return self.value()[index]

    def __iter__(self) -> Iterator[Variable]:
        return iter(self._shards)

    def __len__(self) -> int:
        return self._shape[0]

    # Assigning

    def _change(self, kind: str, value: GivenChange, read_value: bool) -> "ShardedVariable":
        if kind in SCATTER:
            return self._scatter(kind, value)
        if isinstance(value, ArrayOperators):
            value = value.value()
        array: Any = value if hasattr(value, "shape") else np.asarray(value, self.dtype)
        if tuple(array.shape) != self._shape:
            raise InvalidValueError(
                f"ShardedVariable {self._name!r}: {kind} got a value of shape"
                f" {tuple(array.shape)}, but the variable has shape {self._shape}."
            )
        for shard, start, end in self._ranges():
            shard._change(kind, array[start:end], read_value)
        return self

    def _scatter(self, kind: str, slices: Any) -> "ShardedVariable":
        slices = checked_slices(f"ShardedVariable {self._name!r}: {kind}", slices)
        array_module: Any = np if current_scope() is None else jnp
        ids = array_module.asarray(slices.indices)
        if ids.dtype.itemsize < 4:  # cannot count all rows
            ids = ids.astype(np.int32)
        ids = array_module.where(ids < 0, ids + len(self), ids)
        for shard, start, end in self._ranges():
            is_own = (ids >= start) & (ids < end)
            # Rows of other shards get an index out of range, so that they are dropped.
            cut = IndexedSlices(slices.values, array_module.where(is_own, ids - start, end - start))
            shard._change(kind, cut, True)
        return self

    def _ranges(self) -> Iterator[tuple[Variable, int, int]]:
        return zip(self._shards, self._starts, self._starts[1:], strict=False)

    def __repr__(self) -> str:
        shards = ", ".join(str(shard.shape[0]) for shard in self._shards)
        return (
            f"<dist.ShardedVariable '{self._name}' shape={self._shape} dtype={self.dtype.name},"
            f" shards of {shards} rows>"
        )

    __hash__ = object.__hash__  # type: ignore[assignment]


def embedding_lookup(
    params: "ArrayLike | ShardedVariable | Variable | Sequence[Any]",
    ids: ArrayLike,
    max_norm: float | None = None,
    name: str | None = None,
) -> jax.Array:
    """Looks up rows of a table, which may be divided into shards.

    In a scheduled function, only these rows are fetched from the servers. The gradient with respect
    to the table, or to its shards, is also sent as rows.

    Args:
        params: The table `[num_rows, *row]`: a `ShardedVariable`, `Variable` or array, or a list of
            shards along dim 0.
        ids: Integer numbers of rows. Negative ones count from the end. For numbers out of range,
            the rows are NaN, or the dtype's extreme value for integers.
        max_norm: Largest Euclidean norm of a row; rows with a larger norm are scaled down to it.
        name: No effect.

    Returns:
        The rows, `[*ids.shape, *row]`.

    Raises:
        InvalidTypeError: if the ids are not integers.

    Source: `tf.nn.embedding_lookup` (which on CPUs raises for ids out of range).
    """
    ids = jnp.asarray(ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise InvalidTypeError(f"embedding_lookup: ids are {ids.dtype}, expected integers.")
    if isinstance(params, list | tuple):
        table = jnp.concatenate([jnp.asarray(shard) for shard in params])
    else:
        table = jnp.asarray(params)
    rows = jnp.take(table, ids, axis=0)
    if max_norm is None:
        return rows
    norms = jnp.sqrt(jnp.sum(rows * rows, axis=range(ids.ndim, rows.ndim), keepdims=True))
    return rows * (max_norm / jnp.maximum(norms, max_norm))


def _dims_of(index: object) -> Sequence[object]:
    """Returns the leading indices that stand for one dim each."""
    indices = index if isinstance(index, tuple) else (index,)
    known = [isinstance(part, int | np.integer | slice) for part in indices]
    return indices[: known.index(False)] if False in known else indices


# Variables of other libraries, as programs and tapes see them.


class ForeignVariable:
    """A stand-in for a variable of another library, which keeps the value.

    Attributes:
        holder: A weak reference to that variable, which has the stored array as its `_value`.
    """

    holder: Callable[[], Any]
    _handle: Handle
    _layout: VariableLayout
    _stores_array = False

    @property
    def variable(self) -> Any:
        """The variable of the other library."""
        return self.holder()

    @property
    def trainable(self) -> bool:
        """True if `GradientTape` watches it automatically."""
        return bool(self.variable.trainable)

    @property
    def _value(self) -> Any:
        return self.holder()._value

    @_value.setter
    def _value(self, value: object) -> None:
        self.holder()._value = value

    @property
    def _shared(self) -> bool:
        return getattr(self.holder(), "_shared", False)

    @_shared.setter
    def _shared(self, value: bool) -> None:
        self.holder()._shared = value

    def begin_with(self, array: object) -> bool:
        """Makes an array the first value of a new variable; returns False if it has a value."""
        return False

    @property
    def name(self) -> str:
        """Name used in messages."""
        return self._handle.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        return self._handle.shape

    @property
    def dtype(self) -> Any:
        """Dtype of the value."""
        return self._handle.dtype


def as_variable(value: object) -> Variable | ForeignVariable | None:
    """Returns `value`, or a stand-in for it, with a handle; None if it is not a variable."""
    if isinstance(value, Variable):
        return value
    for library in libraries():
        stand_in: ForeignVariable | None = library.variable(value)
        if stand_in is not None:
            return stand_in
    return None


# Trees of variables: the parameters of a JAX library, and the state of its optimizer.


def values(tree: Any) -> Any:
    """Returns a tree with the value of every variable in its place.

    Together with `assign`, it applies functions on trees of arrays, such as those of optax, to
    variables, which you create with `jax.tree.map(distributary.Variable, parameters)`.

    Args:
        tree: Nest of tuples, lists, dicts or other nodes that JAX knows. Its leaves are variables
            of distributary or Keras; other leaves stay as they are.

    Returns:
        The same structure. In a step, the values of the replica.
    """
    return jax.tree.map(_value, tree)


def assign(tree: Any, values: Any) -> None:
    """Assigns to every variable of a tree the value at its place in another tree.

    Args:
        tree: Nest of variables of distributary or Keras, see `values`.
        values: The same structure, with arrays or numbers that have the shapes of the variables.
            What replicas may assign in a step is that of `Variable.assign`.

    Raises:
        InvalidValueError: if the structures differ. Nothing is assigned.
        InvalidTypeError: if a leaf of `tree` is not a variable. Nothing is assigned.
    """
    expected: Any = jax.tree.structure(tree)
    structure: Any = jax.tree.structure(values)
    if structure != expected:
        raise InvalidValueError(
            f"assign got values of another structure than the variables: {structure}, expected"
            f" {expected}. Pass a tree that has the structure of distributary.values(tree)."
        )
    variables = tree_leaves_with_path(tree)
    for path, variable in variables:
        if as_variable(variable) is None:
            raise InvalidTypeError(
                f"assign got {type(variable).__name__} at tree{keystr(path)}, expected a variable."
                " Create it in the scope of the strategy:"
                " jax.tree.map(distributary.Variable, tree)."
            )
    for (_, variable), value in zip(variables, jax.tree.leaves(values), strict=True):
        variable.assign(value)


def _value(leaf: Any) -> Any:
    variable = as_variable(leaf)
    if variable is None:
        return leaf
    # Of Keras' variables, `value` is an attribute.
    return variable.value() if isinstance(variable, Variable) else leaf.value
