"""The division of a variable into shards."""

import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from distributary.errors import InvalidValueError

__all__ = ["initial_shards", "num_shards_of", "sizes_of"]


def num_shards_of(partitioner: Callable[..., Any], shape: Sequence[int], dtype: Any) -> int:
    """Returns the number of shards that a partitioner chooses for a variable.

    Raises:
        InvalidValueError: if the partitioner divides a dim other than 0.
    """
    if not shape:
        return 1
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
    return max(1, min(first, shape[0]))


def sizes_of(shape: Sequence[int], num_shards: int) -> list[int]:
    """Returns the number of rows of every shard. If they differ, the first shards have one more."""
    if num_shards == 1:
        return [0]
    size, num_larger = divmod(shape[0], num_shards)
    return [size + (i < num_larger) for i in range(num_shards)]


def initial_shards(initial: Any, shape: Sequence[int], sizes: Sequence[int]) -> Iterator[Any]:
    """Yields the initial values of the shards.

    Args:
        initial: The whole value, or a function. A function that takes `partition_shape` and
            `partition_offset` is called with them for every shard; any other is called once,
            without arguments, and returns the whole value.
        shape: Shape of the whole value.
        sizes: Number of rows of each shard.
    """
    takes_part = callable(initial) and _takes_part(initial)
    whole = initial() if callable(initial) and not takes_part else initial
    start = 0
    for size in sizes:
        yield (
            initial(
                partition_shape=(size, *shape[1:]),
                partition_offset=(start, *[0] * (len(shape) - 1)),
            )
            if takes_part
            else whole[start : start + size]
        )
        start += size


def _takes_part(initial: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(initial).parameters
    except (TypeError, ValueError):
        return False
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return takes_any or {"partition_shape", "partition_offset"} <= parameters.keys()
