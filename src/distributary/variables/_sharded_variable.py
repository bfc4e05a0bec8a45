"""Variables that are divided into shards, each a variable on some server."""

from collections.abc import Iterator, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from distributary.errors import InvalidTypeError, InvalidValueError, check_type
from distributary.tracing import current_scope
from distributary.variables._assignable import SCATTER, Assignable, GivenChange, checked_slices
from distributary.variables._operators import ArrayOperators
from distributary.variables._values import IndexedSlices
from distributary.variables._variable import Variable


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
