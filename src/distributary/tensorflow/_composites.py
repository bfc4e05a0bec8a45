"""Values of several arrays: `tf.nest`, `tf.SparseTensor` and `tf.TensorArray`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from distributary.data import TensorSpec
from distributary.devices import Nest
from distributary.errors import InvalidValueError
from distributary.tensorflow._host import host_array, require_host
from distributary.tensorflow._operations import TensorLike, array, canonical, converted
from distributary.tensorflow.autograph import NOT_YET, is_traced
from distributary.tracing import leave_trace


def map_structure(func: Callable[..., Any], *structure: Nest, **kwargs: Any) -> Any:
    """`tf.nest.map_structure`."""
    return jax.tree.map(func, *structure, is_leaf=_is_none)


def flatten(structure: Nest, expand_composites: bool = False) -> list[Any]:
    """`tf.nest.flatten`."""
    return jax.tree.leaves(structure, is_leaf=_is_none)


def pack_sequence_as(
    structure: Nest, flat_sequence: Sequence[Any], expand_composites: bool = False
) -> Any:
    """`tf.nest.pack_sequence_as`."""
    return jax.tree.unflatten(jax.tree.structure(structure, is_leaf=_is_none), flat_sequence)


def assert_same_structure(
    nest1: Nest, nest2: Nest, check_types: bool = True, expand_composites: bool = False
) -> None:
    """`tf.nest.assert_same_structure`."""
    first, second = (jax.tree.structure(nest, is_leaf=_is_none) for nest in (nest1, nest2))
    if str(first) != str(second):
        raise InvalidValueError(f"tf.nest: the structures differ: {first} and {second}.")


def is_nested(seq: object) -> bool:
    """`tf.nest.is_nested`."""
    return isinstance(seq, (list, tuple, dict))


def _is_none(value: object) -> bool:
    return value is None


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SparseTensor:
    """The elements of an array that are there, by their indices.

    Args:
        indices: Indices `[n, ndim]`.
        values: The elements `[n]`.
        dense_shape: Shape of the array.

    Source: `tf.SparseTensor`.
    """

    indices: Any
    values: Any
    dense_shape: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return tuple(int(size) for size in self.dense_shape)

    @property
    def dtype(self) -> Any:
        """Dtype of the elements."""
        return self.values.dtype


def sparse_rows(rows: list[np.ndarray]) -> SparseTensor:
    """Returns rows of different lengths as one array `[row, longest]`."""
    indices = [(number, place) for number, row in enumerate(rows) for place in range(len(row))]
    return SparseTensor(
        np.array(indices, np.int64).reshape(-1, 2),
        np.concatenate(rows),
        np.array([len(rows), max(map(len, rows))], np.int64),
    )


def to_dense(
    sp_input: SparseTensor,
    default_value: object = None,
    validate_indices: bool = True,
    name: str | None = None,
) -> np.ndarray:
    """`tf.sparse.to_dense`: on the host, in `Dataset.map` or outside of steps.

    Args:
        sp_input: The `SparseTensor`.
        default_value: What the other elements are; None means 0 or empty bytes.
        validate_indices: No effect: indices are checked.
        name: No effect.
    """
    require_host("tf.sparse.to_dense", sp_input)
    indices, values = np.asarray(sp_input.indices), np.asarray(sp_input.values)
    shape = sp_input.shape if np.ndim(sp_input.dense_shape) == 1 else ()
    fits = indices.shape == (len(values), len(shape)) and values.ndim == 1
    if not fits or (indices < 0).any() or (indices >= shape).any():
        raise InvalidValueError(
            f"tf.sparse.to_dense: indices of shape {indices.shape} and values of shape"
            f" {values.shape} do not fit dense_shape {np.asarray(sp_input.dense_shape).tolist()}."
            " Batch records before you parse them with tf.io.parse_example."
        )
    if default_value is None:
        default_value = b"" if values.dtype.kind == "O" else 0
    dense = np.full(shape, default_value, values.dtype)
    dense[tuple(indices.T)] = values
    return host_array(dense)


@final
@jax.tree_util.register_pytree_node_class
class TensorArray:
    """Rows of one shape, which are written one by one and read together.

    It grows if `dynamic_size` is True. A compiled loop has a `size` that stays: a `tf.function` in
    which one could grow is not compiled, and runs its Python code in every call; in a step, `size`
    must be the final one, and a write beyond it makes the last row NaN, if rows are not integers.
    Rows that are not written are zeros.

    Args:
        dtype: Dtype of the rows.
        size: Number of rows.
        dynamic_size: Whether `write` may add rows.
        clear_after_read: No effect: rows stay readable.
        tensor_array_name: No effect.
        handle: No effect.
        flow: No effect.
        infer_shape: No effect: all rows have one shape.
        element_shape: Shape of a row, checked by `write`; None for any size.
        colocate_with_first_write_call: No effect.
        name: No effect.

    Source: `tf.TensorArray`.
    """

    def __init__(
        self,
        dtype: DTypeLike,
        size: int | None = None,
        dynamic_size: bool | None = None,
        clear_after_read: bool | None = None,
        tensor_array_name: str | None = None,
        handle: object = None,
        flow: object = None,
        infer_shape: bool = True,
        element_shape: Sequence[int | None] | None = None,
        colocate_with_first_write_call: bool = True,
        name: str | None = None,
    ) -> None:
        if is_traced(size):
            raise InvalidValueError(
                "tf.TensorArray: size is known only when the step runs. Pass the largest number of"
                " rows, and slice what stack() returns outside of the step."
            )
        #: Dtype of the rows.
        self.dtype = canonical(dtype)
        self._size = 0 if size is None else int(size)
        #: Whether `write` may add rows.
        self.dynamic_size = bool(dynamic_size)
        self._shape = None if element_shape is None else tuple(element_shape)
        self._rows: Any = NOT_YET

    def tree_flatten(self) -> tuple[tuple[Any], tuple[Any, ...]]:
        return (self._rows,), (self.dtype, self._size, self.dynamic_size, self._shape)

    @classmethod
    def tree_unflatten(cls, fixed: tuple[Any, ...], rows: Sequence[Any]) -> "TensorArray":
        result = cls.__new__(cls)
        result.dtype, result._size, result.dynamic_size, result._shape = fixed
        (result._rows,) = rows
        return result

    def _with(self, rows: jax.Array, size: int | None = None) -> "TensorArray":
        fixed = self.dtype, len(rows) if size is None else size, self.dynamic_size, self._shape
        return TensorArray.tree_unflatten(fixed, (rows,))

    @property
    def element_shape(self) -> tuple[int | None, ...] | None:
        """Shape of a row; None if nothing is known about it."""
        return self._shape if self._rows is NOT_YET else tuple(self._rows.shape[1:])

    def write(self, index: TensorLike, value: TensorLike, name: str | None = None) -> "TensorArray":
        """Returns the rows with one of them set."""
        row, place = converted("tf.TensorArray", value, self.dtype), array(index)
        if not TensorSpec(self._shape).accepts(row):
            raise InvalidValueError(
                f"tf.TensorArray: a row has shape {row.shape}, expected {self._shape}."
            )
        rows = self._rows
        if rows is NOT_YET:
            rows = jnp.zeros((self._size, *row.shape), self.dtype)
        if rows.shape[1:] != row.shape:
            raise InvalidValueError(
                f"tf.TensorArray: a row has shape {row.shape}, but others have {rows.shape[1:]}."
                " All rows have one shape; pad them."
            )
        if is_traced(place) and self.dynamic_size:
            leave_trace()
        if is_traced(place) and not self._size:
            raise InvalidValueError(
                "tf.TensorArray: a compiled loop writes to an array of size 0. Pass the number of"
                " rows, tf.TensorArray(dtype, size=n)."
            )
        size = self._size
        if not is_traced(place):
            size = max(size, int(place) + 1)
            if int(place) < 0 or (size > self._size and not self.dynamic_size):
                raise InvalidValueError(
                    f"tf.TensorArray: write to row {int(place)} of {self._size}. Pass a larger"
                    " size, or dynamic_size=True."
                )
            if size > len(rows):  # room for more, because JAX compiles for every length
                rows = jnp.pad(rows, [(0, size)] + [(0, 0)] * row.ndim)
        elif jnp.issubdtype(self.dtype, jnp.inexact):
            # JAX drops a write beyond the end, for which TensorFlow raises or grows.
            row = jnp.where((place >= 0) & (place < size), row, jnp.nan)
            place = jnp.clip(place, 0, size - 1)
        return self._with(rows.at[place].set(row), size)

    def read(self, index: TensorLike, name: str | None = None) -> jax.Array:
        """Returns a row."""
        return self.stack()[array(index)]

    def stack(self, name: str | None = None) -> jax.Array:
        """Returns all rows, `[size, ...]`."""
        if self._rows is not NOT_YET:
            return self._rows[: self._size]
        if self._shape is None or None in self._shape:
            raise InvalidValueError(
                "tf.TensorArray: nothing has been written, so there is no shape. Write a row, or"
                " pass element_shape."
            )
        return jnp.zeros((self._size, *self._shape), self.dtype)

    def gather(self, indices: TensorLike, name: str | None = None) -> jax.Array:
        """Returns some rows, `[n, ...]`."""
        return self.stack()[array(indices)]

    def concat(self, name: str | None = None) -> jax.Array:
        """Returns the rows one after the other along their dim 0."""
        rows = self.stack()
        return rows.reshape(-1, *rows.shape[2:])

    def unstack(self, value: TensorLike, name: str | None = None) -> "TensorArray":
        """Returns these rows: all of `value` along dim 0."""
        return self._with(converted("tf.TensorArray", value, self.dtype))

    def scatter(
        self, indices: TensorLike, value: TensorLike, name: str | None = None
    ) -> "TensorArray":
        """Returns the rows with several of them set."""
        written, rows = self, converted("tf.TensorArray", value, self.dtype)
        for index, row in zip(np.asarray(indices), rows, strict=True):
            written = written.write(index, row)
        return written

    def split(
        self, value: TensorLike, lengths: ArrayLike, name: str | None = None
    ) -> "TensorArray":
        """Returns these rows: parts of `value` of one length."""
        sizes = set(np.asarray(lengths).tolist())
        if len(sizes) != 1:
            raise InvalidValueError(
                f"tf.TensorArray.split: lengths are {sorted(sizes)}, expected one. Pad the parts."
            )
        values = converted("tf.TensorArray", value, self.dtype)
        return self._with(values.reshape(-1, *sizes, *values.shape[1:]))

    def identity(self) -> "TensorArray":
        """Returns the same rows."""
        return self

    def size(self, name: str | None = None) -> np.ndarray:
        """Returns the number of rows."""
        return host_array(self._size, np.int32)

    def close(self, name: str | None = None) -> None:
        """Has no effect."""
