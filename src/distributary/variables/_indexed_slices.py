"""Sparse rows of a table, the form of gradients of `sparse_read`."""

from collections.abc import Iterable
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from distributary.errors import InvalidValueError


@final
@jax.tree_util.register_pytree_node_class
class IndexedSlices:
    """Rows of a larger array: row `values[i]` belongs at index `indices[i]` of dim 0.

    Rows with equal indices add up. Reductions over replicas concatenate the rows; they never create
    the dense array.

    Args:
        values: Rows `[num_rows, *row_shape]`.
        indices: Integer row numbers `[num_rows]`.
        dense_shape: Shape of the array that the rows belong to, a tuple of ints, or None.

    Raises:
        InvalidValueError: if `indices` is not one-dimensional, or not as long as `values`.

    Source: `tf.IndexedSlices`.
    """

    __slots__ = ("dense_shape", "indices", "values")

    def __init__(
        self, values: ArrayLike, indices: ArrayLike, dense_shape: Iterable[int] | None = None
    ) -> None:
        shapes = [getattr(part, "shape", None) for part in (values, indices)]
        if None not in shapes and (len(shapes[1]) != 1 or shapes[0][:1] != shapes[1]):  # type: ignore[index,arg-type]
            raise InvalidValueError(
                f"IndexedSlices: values has shape {shapes[0]} and indices {shapes[1]}; expected"
                " values [num_rows, ...] and indices [num_rows]."
            )
        self.values: Any = values
        self.indices: Any = indices
        self.dense_shape = None if dense_shape is None else tuple(int(d) for d in dense_shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the rows."""
        return self.values.dtype

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The same as `dense_shape`."""
        return self.dense_shape

    def to_dense(self) -> jax.Array:
        """Returns the dense array of shape `dense_shape`, with rows of equal indices added up.

        Raises:
            InvalidValueError: if `dense_shape` is not known.
        """
        if self.dense_shape is None:
            raise InvalidValueError(
                "IndexedSlices.to_dense: dense_shape is None. Pass it to IndexedSlices(values,"
                " indices, dense_shape)."
            )
        return jnp.zeros(self.dense_shape, self.values.dtype).at[self.indices].add(self.values)

    def tree_flatten(self) -> tuple[tuple[Any, Any], tuple[int, ...] | None]:
        return (self.values, self.indices), self.dense_shape

    @classmethod
    def tree_unflatten(
        cls, dense_shape: tuple[int, ...] | None, children: tuple[Any, Any]
    ) -> "IndexedSlices":
        new = object.__new__(cls)
        new.values, new.indices = children
        new.dense_shape = dense_shape
        return new

    def __repr__(self) -> str:
        return (
            f"IndexedSlices(values={self.values!r}, indices={self.indices!r},"
            f" dense_shape={self.dense_shape})"
        )
