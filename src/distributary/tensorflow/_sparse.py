"""`tf.SparseTensor` on the host: what `tf.io.VarLenFeature` parses."""

from dataclasses import dataclass
from typing import Any, final

import jax
import numpy as np

from distributary.errors import InvalidValueError
from distributary.tensorflow._host import host_array, require_host


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
