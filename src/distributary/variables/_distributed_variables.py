"""Variables with a copy per replica, and the aggregations that combine them."""

from collections.abc import Sequence
from typing import Any, TypeVar, final

import jax
import jax.numpy as jnp
import numpy as np

from distributary.context import current_mode
from distributary.devices import in_device_memory, latest_program
from distributary.errors import InvalidValueError, UnsupportedError, shown
from distributary.options import CommunicationOptions, ReduceOp, VariableAggregation
from distributary.tracing import TraceScope, check_not_frozen, current_scope
from distributary.variables._assignable import NOT_LINEAR, Change, GivenChange, combine
from distributary.variables._cross_device_ops import NcclAllReduce
from distributary.variables._operators import ArrayOperators
from distributary.variables._reductions import reduce_arrays
from distributary.variables._values import (
    Array,
    DistributedValues,
    IndexedSlices,
    Mirrored,
    PerReplica,
)
from distributary.variables._variable import Variable

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
            kind = type(self).__name__
            return f"<{kind} '{self.name}' shape={self._shape} dtype={self._dtype.name}>"
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

    def _initial_of_copy(self) -> Any:
        return self._value[0]

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
        if isinstance(self._array, jax.core.Tracer):
            return f"<dist.Variable '{self.name}' shape={self.shape} dtype={self.dtype.name}>"
        return self.variable._component_text(self.name, self._array)


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
