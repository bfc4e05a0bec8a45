"""The methods that whole variables and variables in shards share."""

import math
from typing import Any, NoReturn

import jax

from distributary.errors import InvalidTypeError
from distributary.variables._conversion import GivenChange
from distributary.variables._operators import ArrayOperators
from distributary.variables._values import ArrayInput, IndexedSlices


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
        concatenate them. Rows out of range are dropped. The rows of a `ShardedVariable` are
        numbered as in the whole variable.

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
