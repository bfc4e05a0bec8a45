"""Into how many shards a variable is split."""

import math
from collections.abc import Sequence
from typing import final

import numpy as np
from numpy.typing import DTypeLike

from distributary.errors import InvalidTypeError, InvalidValueError

__all__ = ["FixedShardsPartitioner", "MaxSizePartitioner", "MinSizePartitioner", "Partitioner"]


class Partitioner:
    """Says into how many shards a variable is split; a class of your own defines `__call__`.

    Source: `tf.distribute.experimental.partitioners.Partitioner`.
    """

    def __call__(self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0) -> list[int]:
        """The number of shards along every axis.

        Args:
            shape: Shape of the variable.
            dtype: Its dtype.
            axis: The axis that may be split; strategies split axis 0 only.

        Returns:
            One number per axis, 1 or more; 1 along every axis but `axis`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not define __call__(shape, dtype, axis=0), which returns"
            " the number of shards along every axis."
        )


@final
class FixedShardsPartitioner(Partitioner):
    """Splits every variable into the same number of shards, if it has as many rows.

    Args:
        num_shards: Number of shards.

    Raises:
        InvalidValueError: if the number is not positive.

    Source: `tf.distribute.experimental.partitioners.FixedShardsPartitioner`, which accepts 0.
    """

    def __init__(self, num_shards: int) -> None:
        self._num_shards = _positive("FixedShardsPartitioner", "num_shards", num_shards)

    def __call__(self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0) -> list[int]:
        """`min(num_shards, shape[axis])` along `axis`, 1 along the others."""
        return _partitions(shape, axis, self._num_shards)


@final
class MinSizePartitioner(Partitioner):
    """Splits a variable into shards of a size at least, as many as there may be.

    The number of shards is rounded up, so they may be smaller than the minimum by a part.

    Args:
        min_shard_bytes: Smallest size of a shard in bytes.
        max_shards: Most shards; with the default of 1 nothing is split.
        bytes_per_string: Assumed size of an element of a dtype for strings or objects.

    Raises:
        InvalidValueError: if a number is not positive.

    Source: `tf.distribute.experimental.partitioners.MinSizePartitioner`.
    """

    def __init__(
        self, min_shard_bytes: int = 256 << 10, max_shards: int = 1, bytes_per_string: int = 16
    ) -> None:
        name = "MinSizePartitioner"
        self._min_shard_bytes = _positive(name, "min_shard_bytes", min_shard_bytes)
        self._max_shards = _positive(name, "max_shards", max_shards)
        self._bytes_per_string = _positive(name, "bytes_per_string", bytes_per_string)

    def __call__(self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0) -> list[int]:
        """`ceil(size / min_shard_bytes)` along `axis`, `max_shards` at most; 1 on other axes."""
        num_bytes = math.prod(shape) * _element_bytes(dtype, self._bytes_per_string)
        num_shards = min(self._max_shards, -(-num_bytes // self._min_shard_bytes))
        return _partitions(shape, axis, num_shards)


@final
class MaxSizePartitioner(Partitioner):
    """Splits a variable into shards of a size at most, as few as will do.

    A shard has one row at least, whatever its size. `max_shards` comes before the size.

    Args:
        max_shard_bytes: Largest size of a shard in bytes.
        max_shards: Most shards; None for any number.
        bytes_per_string: Assumed size of an element of a dtype for strings or objects.

    Raises:
        InvalidValueError: if a number is not positive.

    Source: `tf.distribute.experimental.partitioners.MaxSizePartitioner`.
    """

    def __init__(
        self, max_shard_bytes: int, max_shards: int | None = None, bytes_per_string: int = 16
    ) -> None:
        name = "MaxSizePartitioner"
        self._max_shard_bytes = _positive(name, "max_shard_bytes", max_shard_bytes)
        self._max_shards = None if max_shards is None else _positive(name, "max_shards", max_shards)
        self._bytes_per_string = _positive(name, "bytes_per_string", bytes_per_string)

    def __call__(self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0) -> list[int]:
        """As many shards along `axis` as rows of `max_shard_bytes` need; 1 on other axes."""
        axis = _checked_axis(shape, axis)
        row_shape = (*shape[:axis], *shape[axis + 1 :])
        row_bytes = math.prod(row_shape) * _element_bytes(dtype, self._bytes_per_string)
        rows_per_shard = max(1, self._max_shard_bytes // max(1, row_bytes))
        num_shards = -(-shape[axis] // rows_per_shard)
        if self._max_shards is not None:
            num_shards = min(self._max_shards, num_shards)
        return _partitions(shape, axis, num_shards)


def _partitions(shape: Sequence[int], axis: int, num_shards: int) -> list[int]:
    axis = _checked_axis(shape, axis)
    partitions = [1] * len(shape)
    partitions[axis] = max(1, min(num_shards, shape[axis]))
    return partitions


def _checked_axis(shape: Sequence[int], axis: int) -> int:
    if not -len(shape) <= axis < len(shape):
        raise InvalidValueError(
            f"A variable of shape {tuple(shape)} has no axis {axis} to be split along."
        )
    return axis % len(shape)


def _element_bytes(dtype: DTypeLike, bytes_per_string: int) -> int:
    numpy_dtype = np.dtype(dtype)
    return bytes_per_string if numpy_dtype.kind in "OSTU" else numpy_dtype.itemsize


def _positive(partitioner: str, name: str, number: int) -> int:
    if isinstance(number, bool) or not isinstance(number, int):
        raise InvalidTypeError(
            f"{partitioner}: {name} is {number!r} ({type(number).__name__}), expected an int."
        )
    if number < 1:
        raise InvalidValueError(f"{partitioner}: {name} is {number}, expected 1 or more.")
    return number
