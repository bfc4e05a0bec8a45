"""The methods with which variables change, whole or in shards, and the values that they take."""

import enum
import math
from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from distributary.errors import InvalidTypeError, InvalidValueError, UnsupportedError, shown
from distributary.tracing import current_scope
from distributary.variables._layout import array_of
from distributary.variables._values import (
    Array,
    ArrayInput,
    ArrayOperators,
    IndexedSlices,
    PerReplica,
)

# The operand of an assignment or of a scatter method, as it is given and converted.
GivenChange: TypeAlias = ArrayInput | IndexedSlices
Change: TypeAlias = jax.Array | IndexedSlices


class Assignable(ArrayOperators):
    """The base of everything that you can assign: `Variable` and `ShardedVariable`."""

    _name: str
    _shape: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value; for ON_READ, of one replica's value."""
        return self._shape

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self._shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self._shape)

    def _refuse(self, *_: object) -> NoReturn:
        raise InvalidTypeError(
            f"Variable {self._name!r} does not take +=, -=, *=, /= and items, which would leave its"
            " value. Write v.assign_add(x) or v.assign_sub(x), v.assign(v * x), and"
            " v.assign(v.value().at[i].set(x)) for an item."
        )

    __iadd__ = __isub__ = __imul__ = __itruediv__ = __ipow__ = __setitem__ = _refuse

    def read_value(self) -> jax.Array:
        """Returns the same as `value()`."""
        return self.value()

    def assign(
        self,
        value: ArrayInput,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        """Sets the value; that of a `ShardedVariable`, one shard after the other.

        In `run`, a mirrored variable first combines the replicas' values by its aggregation. With
        aggregation NONE, all replicas must assign the same value. An ON_READ variable changes only
        this replica's value.

        Args:
            value: Array or number of the variable's shape.
            use_locking: Has no effect.
            name: Has no effect.
            read_value: False makes this return None.

        Returns:
            Inside `run` and `function`, the new value; elsewhere, the variable. A `ShardedVariable`
            always returns itself.

        Raises:
            InvalidValueError: if the shape differs.
            InvalidTypeError: if the dtype cannot be converted without loss of kind.
            ReplicaDivergenceError: if the copies of a mirrored variable would differ.
            ContextError: under another strategy.

        Source: `tf.Variable.assign` under `tf.distribute`.
        """
        return self._change("assign", value, read_value)

    def assign_add(
        self,
        delta: ArrayInput,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        """Adds `delta`; otherwise like `assign`."""
        return self._change("assign_add", delta, read_value)

    def assign_sub(
        self,
        delta: ArrayInput,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        """Subtracts `delta`; otherwise like `assign`."""
        return self._change("assign_sub", delta, read_value)

    def scatter_add(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Any:
        """Adds rows: `self[indices[i]] += values[i]`. Rows with equal indices add up.

        In `run`, the rows of all replicas are first combined by the aggregation: SUM and MEAN
        concatenate them. Negative indices count from the end, and rows out of range are dropped.
        The rows of a `ShardedVariable` are numbered as in the whole variable.

        Args:
            sparse_delta: `IndexedSlices` of the variable's row shape.
            use_locking: Has no effect.
            name: Has no effect.

        Returns:
            The same as `assign`.

        Raises:
            InvalidValueError: if the rows do not have the variable's row shape.
            InvalidTypeError: if the dtype cannot be converted without loss of kind.
            UnsupportedError: for ON_READ variables, and for min, max and update with aggregation
                SUM or MEAN.

        Source: `tf.Variable.scatter_add` under `tf.distribute`.
        """
        return self._change("scatter_add", sparse_delta, True)

    def scatter_sub(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Any:
        """Subtracts rows; otherwise like `scatter_add`."""
        return self._change("scatter_sub", sparse_delta, True)

    def scatter_mul(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Any:
        """Multiplies rows; otherwise like `scatter_add`."""
        return self._change("scatter_mul", sparse_delta, True)

    def scatter_div(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Any:
        """Divides rows; otherwise like `scatter_add`."""
        return self._change("scatter_div", sparse_delta, True)

    def scatter_min(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Any:
        """Keeps the smaller of row and value; otherwise like `scatter_add`."""
        return self._change("scatter_min", sparse_delta, True)

    def scatter_max(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Any:
        """Keeps the larger of row and value; otherwise like `scatter_add`."""
        return self._change("scatter_max", sparse_delta, True)

    def scatter_update(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Any:
        """Sets rows; if indices are equal, any one wins. Otherwise like `scatter_add`."""
        return self._change("scatter_update", sparse_delta, True)

    def get_shape(self) -> tuple[int, ...]:
        """Returns `shape`."""
        return self._shape

    def _change(self, kind: str, value: GivenChange, read_value: bool) -> Any:
        """Carries out the method `kind`, one of those above."""
        raise NotImplementedError


# For each method, a function from `array.at[ids]` and the rows to the new array.
SCATTER: dict[str, Callable[[Any, jax.Array], jax.Array]] = {
    "scatter_add": lambda at, rows: at.add(rows, mode="drop"),
    "scatter_sub": lambda at, rows: at.add(-rows, mode="drop"),
    "scatter_mul": lambda at, rows: at.multiply(rows, mode="drop"),
    "scatter_div": lambda at, rows: _divide_rows(at, rows),
    "scatter_min": lambda at, rows: at.min(rows, mode="drop"),
    "scatter_max": lambda at, rows: at.max(rows, mode="drop"),
    "scatter_update": lambda at, rows: at.set(rows, mode="drop"),
}
# Not defined for rows that are summed or averaged over replicas.
NOT_LINEAR = ("scatter_min", "scatter_max", "scatter_update")


def combine(kind: str, current: Any, value: Change) -> Any:
    """Returns the new value after `assign`, `assign_add`, `assign_sub` or a scatter method."""
    if isinstance(value, IndexedSlices):
        return SCATTER[kind](current.at[value.indices], value.values)
    if kind == "assign":
        return value
    return current + value if kind == "assign_add" else current - value


def _divide_rows(at: Any, rows: jax.Array) -> jax.Array:
    divisors = jnp.ones_like(at.array).at[at.index].multiply(rows, mode="drop")
    # Not `/`: integers are divided as integers, rounded towards zero.
    return jax.lax.div(at.array, divisors)


def same_kind(source: np.dtype[Any], target: np.dtype[Any]) -> bool:
    """Returns whether dtype `source` fits `target` without losing a fraction or imaginary part."""
    kinds = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)

    def rank(dtype: np.dtype[Any]) -> int:
        return next((i for i, kind in enumerate(kinds) if jnp.issubdtype(dtype, kind)), 4)

    return source == target or rank(source) <= rank(target) < 4


class TracedInitialValueError(InvalidValueError):
    """An error about the first variable that a function creates, with a value computed there."""


def initial_array(initial_value: ArrayInput | Callable[[], ArrayInput] | None, what: str) -> Array:
    """Returns the initial value of a variable as an array.

    Raises:
        InvalidValueError: if it is missing or traced.
        InvalidTypeError: if it is not an array of numbers.
    """
    if initial_value is None:
        raise InvalidValueError(
            f"{what}: initial_value is missing. Pass an array, a number or a function that gives"
            " one."
        )
    value = initial_value() if callable(initial_value) else initial_value
    if isinstance(value, ArrayOperators):
        value = value.__jax_array__()
    if isinstance(value, PerReplica):
        raise InvalidTypeError(
            f"{what}: initial_value is a PerReplica. Variables start with one value on all"
            " replicas; take strategy.reduce(...) or one of its components."
        )
    if isinstance(value, jax.core.Tracer):
        scope = current_scope()
        is_first = scope is not None and scope.kind == "function" and scope.num_created == 1
        raise (TracedInitialValueError if is_first else InvalidValueError)(
            f"{what}: initial_value is computed by the traced function {shown(value)}. Create the"
            " variable outside of Strategy.run, or give a function: initial_value=lambda:"
            " jnp.zeros(...)."
        )
    return array_of(value, what)


def checked_slices(what: str, slices: object) -> IndexedSlices:
    """Returns the operand of a scatter method after checking its type."""
    if isinstance(slices, IndexedSlices):
        return slices
    raise InvalidTypeError(
        f"{what} needs distributary.IndexedSlices(values, indices), got {type(slices).__name__}."
    )


def computed(what: str, value: Any) -> Any:
    """Returns a value that a variable keeps, without the gradient that an eager `jax.grad` traces.

    Raises:
        UnsupportedError: if there is no value, as in `jax.vmap`.
    """
    if not _is_traced(value):
        return value
    value = jax.lax.stop_gradient(value)
    if _is_traced(value):
        raise UnsupportedError(
            f"{what} got a value traced by jax.vmap or another transformation. Return it from the"
            " transformed function and assign it afterwards."
        )
    return value


def _is_traced(value: object) -> bool:
    return any(isinstance(array, jax.core.Tracer) for array in jax.tree.leaves(value))


def check_member(what: str, field: str, value: object, kind: type[enum.Enum]) -> None:
    """Checks that a value is a member of the enumeration `kind`."""
    if not isinstance(value, kind):
        name = str(getattr(value, "name", value)).upper()
        hint = f" Write distributary.{kind.__name__}.{name}." if name in kind.__members__ else ""
        raise InvalidValueError(
            f"{what}: {field} is {shown(value)}, expected a member of distributary.{kind.__name__}:"
            f" {', '.join(kind.__members__)}.{hint}"
        )
