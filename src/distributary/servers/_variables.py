"""Variables on servers, their division into shards, and partitioners, which choose how many."""

import inspect
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from numpy.typing import DTypeLike

from distributary.context import current_mode
from distributary.errors import InvalidValueError
from distributary.servers._cluster import Session, check_positive
from distributary.servers._split import Shard
from distributary.variables import (
    AggregatedVariable,
    ShardedVariable,
    Variable,
    colocated_with,
    initial_array,
    neighbor,
)


class Partitioner:
    """A choice of the number of shards of a variable. Define `__call__` in your own subclass.

    Source: `tf.distribute.experimental.partitioners.Partitioner`.
    """

    def __call__(self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0) -> list[int]:
        """Returns the number of shards along every axis.

        Args:
            shape: Shape of the variable.
            dtype: Dtype of the variable.
            axis: The axis that may be split; strategies split only axis 0.

        Returns:
            One number per axis: 1 or more for `axis`, 1 for all others.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not define __call__(shape, dtype, axis=0), which returns"
            " the number of shards along every axis."
        )


@final
class FixedShardsPartitioner(Partitioner):
    """A partitioner that splits every variable into the same number of shards.

    A variable with fewer rows than that is split into one shard per row.

    Args:
        num_shards: Number of shards.

    Raises:
        InvalidValueError: if the number is not positive.

    Source: `tf.distribute.experimental.partitioners.FixedShardsPartitioner`, which accepts 0.
    """

    def __init__(self, num_shards: int) -> None:
        check_positive("FixedShardsPartitioner", num_shards=num_shards)
        self._num_shards = num_shards

    def __call__(self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0) -> list[int]:
        """Returns `min(num_shards, shape[axis])` for `axis`, and 1 for the others."""
        return _partitions(shape, axis, self._num_shards)


@final
class MinSizePartitioner(Partitioner):
    """A partitioner that makes as many shards of a minimum size as it can.

    The number of shards is rounded up, so shards may be a little smaller than the minimum.

    Args:
        min_shard_bytes: Minimum size of a shard in bytes.
        max_shards: Maximum number of shards. With the default of 1, nothing is split.
        bytes_per_string: Assumed size of an element of a dtype for strings or objects.

    Raises:
        InvalidValueError: if a number is not positive.

    Source: `tf.distribute.experimental.partitioners.MinSizePartitioner`.
    """

    def __init__(
        self, min_shard_bytes: int = 256 << 10, max_shards: int = 1, bytes_per_string: int = 16
    ) -> None:
        limits = {"min_shard_bytes": min_shard_bytes, "max_shards": max_shards}
        check_positive("MinSizePartitioner", **limits, bytes_per_string=bytes_per_string)
        self._min_shard_bytes = min_shard_bytes
        self._max_shards = max_shards
        self._bytes_per_string = bytes_per_string

    def __call__(self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0) -> list[int]:
        """Returns `ceil(size / min_shard_bytes)` or `max_shards` if less for `axis`, else 1."""
        num_bytes = math.prod(shape) * _element_bytes(dtype, self._bytes_per_string)
        num_shards = min(self._max_shards, -(-num_bytes // self._min_shard_bytes))
        return _partitions(shape, axis, num_shards)


@final
class MaxSizePartitioner(Partitioner):
    """A partitioner that makes as few shards as it can, none larger than a maximum size.

    A shard has at least one row, even if that row is larger than the maximum. `max_shards` takes
    precedence over the size.

    Args:
        max_shard_bytes: Maximum size of a shard in bytes.
        max_shards: Maximum number of shards; None for no limit.
        bytes_per_string: Assumed size of an element of a dtype for strings or objects.

    Raises:
        InvalidValueError: if a number is not positive.

    Source: `tf.distribute.experimental.partitioners.MaxSizePartitioner`.
    """

    def __init__(
        self, max_shard_bytes: int, max_shards: int | None = None, bytes_per_string: int = 16
    ) -> None:
        limit = {} if max_shards is None else {"max_shards": max_shards}
        limit |= {"max_shard_bytes": max_shard_bytes, "bytes_per_string": bytes_per_string}
        check_positive("MaxSizePartitioner", **limit)
        self._max_shard_bytes = max_shard_bytes
        self._max_shards = max_shards
        self._bytes_per_string = bytes_per_string

    def __call__(self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0) -> list[int]:
        """Returns the number of shards that `max_shard_bytes` requires for `axis`, 1 elsewhere."""
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


def _sizes_of(partitioner: Callable[..., Any], shape: Sequence[int], dtype: DTypeLike) -> list[int]:
    """Returns the number of rows of every shard that a partitioner chooses for a variable.

    If they differ, the first shards have one row more.

    Raises:
        InvalidValueError: if the partitioner divides a dim other than 0.
    """
    if not shape:
        return [1]
    partitions = partitioner(shape=tuple(shape), dtype=dtype)
    try:
        first, *others = map(operator.index, partitions)
    except (TypeError, ValueError):
        first, others = 0, []
    if first < 1 or others != [1] * (len(shape) - 1):
        raise InvalidValueError(
            f"variable_partitioner returned {partitions!r} for a variable of shape {tuple(shape)},"
            " expected one number for every dim: 1 or more for dim 0, and 1 for the others."
        )
    num_shards = max(1, min(first, shape[0]))
    size, num_larger = divmod(shape[0], num_shards)
    return [size + (i < num_larger) for i in range(num_shards)]


def _initial_shards(
    initial: Any, shape: tuple[int, ...], sizes: Sequence[int], what: str
) -> Iterator[Any]:
    """Yields the initial values of the shards.

    Args:
        initial: The whole value, or a function. A function that takes `partition_shape` and
            `partition_offset` is called with them for every shard; any other is called once,
            without arguments, and returns the whole value.
        shape: Shape of the whole value.
        sizes: Number of rows of each shard.
        what: The variable, for messages.

    Raises:
        InvalidValueError: if a value has another shape.
    """
    takes_part = callable(initial) and _takes_part(initial)
    whole: Any = None if takes_part else initial() if callable(initial) else initial
    start = 0
    for size in sizes:
        part = size, *shape[1:]
        if takes_part:
            value = initial(partition_shape=part, partition_offset=(start, *[0] * len(part[1:])))
        else:
            value = whole[start : start + size]
        found, wanted = (value, part) if takes_part else (whole, shape)
        if np.shape(found) != wanted:
            raise InvalidValueError(
                f"{what}: initial_value has shape {np.shape(found)}, expected {wanted}, which is"
                f" {'its partition_shape' if takes_part else 'the shape of the variable'}."
            )
        yield value
        start += size


def _takes_part(initial: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(initial).parameters
    except (TypeError, ValueError):
        return False
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return takes_any or {"partition_shape", "partition_offset"} <= parameters.keys()


class ServerVariable(AggregatedVariable):
    """A variable on a parameter server."""

    _stores_array = False
    _place: Shard
    _first: Any = None  # the initial value, if it was computed to know the shape

    @classmethod
    def _new(cls, *args: Any, **kwargs: Any) -> Any:
        """Creates the result of `Variable(...)`: a `ShardedVariable` if it is to be divided."""
        options = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
        strategy = current_mode().strategy
        beside, partitioner = neighbor(), strategy._variable_partitioner
        if isinstance(beside, Variable) or (beside is None and partitioner is None):
            return object.__new__(cls)
        name = options.pop("name", None) or "Variable"
        first, shape = options.pop("initial_value", None), options.pop("shape", None)
        dtype = options.get("dtype")
        whole = object.__new__(cls)
        if not callable(first) or shape is None or dtype is None:
            first = whole._first = initial_array(first, f"Variable {name!r}")
            shape = first.shape if shape is None else shape
            dtype = first.dtype if dtype is None else dtype
        shape = tuple(shape)
        if beside is None:
            sizes = _sizes_of(partitioner, shape, dtype)
            places: list[Any] = [None] * len(sizes)
        else:
            places, sizes = beside.variables, [shard.shape[0] for shard in beside]
            if shape[:1] != beside.shape[:1]:
                return whole
        if len(sizes) == 1:
            return whole
        shards = []
        for i, value in enumerate(_initial_shards(first, shape, sizes, f"Variable {name!r}")):
            with colocated_with(places[i]):
                shard = object.__new__(cls)
                cls.__init__(shard, value, name=f"{name}/part_{i}", **options)
            shards.append(shard)
        return ShardedVariable(shards, name)

    def __init__(self, initial_value: Any = None, *args: Any, **kwargs: Any) -> None:
        super().__init__(initial_value if self._first is None else self._first, *args, **kwargs)
        self._first = None

    @property
    def device(self) -> str:
        """Name of the device of the server that keeps the variable."""
        return f"/job:ps/replica:0/task:{self._place.server}/device:CPU:0"

    @property
    def _shards(self) -> list["ServerVariable"]:
        return [self]

    @property
    def _remote_store(self) -> Session:
        session: Session = self._layout.strategy._cluster
        return session

    def _initial_state(self, initial: ArrayLike) -> Any:
        beside = getattr(neighbor(), "_place", None)
        self._place = self._remote_store.create(np.asarray(initial, self._dtype), beside)
        return None

    @property
    def _value(self) -> Any:
        return jnp.asarray(self._remote_store.read(self._place, self._shape, self._dtype))

    @_value.setter
    def _value(self, value: object) -> None:
        if value is not None:
            self._remote_store.assign(self._place, "assign", np.asarray(value))

    def _change_eager(self, kind: str, value: ArrayLike) -> None:
        self._remote_store.assign(self._place, kind, np.asarray(value, self._dtype))


# The arguments of `Variable`, in order.
_ARGUMENTS = tuple(inspect.signature(Variable.__init__).parameters)[1:]
