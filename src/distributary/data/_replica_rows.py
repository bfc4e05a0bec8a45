"""The rows of a batch for each replica, and the contexts that tell input functions about them."""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import numpy as np

from distributary.data._structure import some_rows
from distributary.devices import Nest
from distributary.errors import InvalidValueError, checked_int


@final
@dataclass(frozen=True)
class WorkerShare:
    """The place of one worker among those that read a dataset together.

    Args:
        num_workers: Number of workers.
        worker: Number of this worker.
        replicas_per_worker: Number of replicas that each worker feeds.
    """

    num_workers: int = 1
    worker: int = 0
    replicas_per_worker: int = 1

    @property
    def num_replicas(self) -> int:
        """Number of replicas of all workers."""
        return self.num_workers * self.replicas_per_worker

    def divides(self, num_rows: int) -> bool:
        """Returns whether every replica gets the same number of rows of a global batch."""
        return num_rows % self.num_replicas == 0

    def ends(self, num_rows: int) -> list[int]:
        """Returns where this worker's rows begin in a global batch, then where each replica's end.

        Each replica gets consecutive rows, in replica order. Their numbers differ by at most one,
        and the larger parts come first.
        """
        small, larger = divmod(num_rows, self.num_replicas)
        first = self.worker * self.replicas_per_worker
        replicas = range(first, first + self.replicas_per_worker + 1)
        return [replica * small + min(replica, larger) for replica in replicas]

    def rows(self, num_rows: int) -> slice:
        """Returns the rows of a global batch that belong to this worker."""
        ends = self.ends(num_rows)
        return slice(ends[0], ends[-1])

    def sizes(self, num_rows: int) -> tuple[int, ...]:
        """Returns the number of rows of a global batch that each replica of this worker gets."""
        return _sizes(self, num_rows)


@functools.lru_cache(maxsize=256)
def _sizes(share: WorkerShare, num_rows: int) -> tuple[int, ...]:
    return tuple(b - a for a, b in itertools.pairwise(share.ends(num_rows)))


@final
@dataclass(frozen=True)
class WorkerBatch:
    """A worker's rows of a global batch.

    Attributes:
        rows: Nest of arrays `[row, ...]`.
        sizes: Number of rows that each of its replicas gets, in order.
    """

    rows: Nest
    sizes: tuple[int, ...]


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OwnRows:
    """The rows of this worker's replicas, for a batch that all replicas split evenly."""

    rows: Any


def split_rows(rows: Nest, sizes: Sequence[int]) -> list[Nest]:
    """Splits a worker's rows into the parts of its replicas."""
    ends = [0, *np.cumsum(sizes).tolist()]
    return [some_rows(rows, slice(a, b)) for a, b in itertools.pairwise(ends)]


# Arguments that tell input functions about the replicas that they feed.


class DistributedInput:
    """Base class of distributed datasets and their iterators."""


@final
@dataclass(frozen=True, eq=False, repr=False)
class ValueContext:
    """Argument of the `value_fn` of `experimental_distribute_values_from_function`.

    Args:
        replica_id_in_sync_group: Number of the replica that the value is for, 0 to
            `num_replicas_in_sync - 1`.
        num_replicas_in_sync: Number of replicas in all processes.

    Source: `tf.distribute.experimental.ValueContext`.
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1

    def __repr__(self) -> str:
        return (
            f"distributary.ValueContext(replica id {self.replica_id_in_sync_group}, total replicas"
            f" in sync: {self.num_replicas_in_sync})"
        )


@final
@dataclass(frozen=True, eq=False, repr=False)
class InputContext:
    """Argument of the `dataset_fn` of `distribute_datasets_from_function`.

    Args:
        num_input_pipelines: Number of times `dataset_fn` is called in the whole job.
        input_pipeline_id: Number of this call.
        num_replicas_in_sync: Number of replicas in the whole job.

    Source: `tf.distribute.InputContext`.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Returns the batch size of one replica.

        Raises:
            InvalidTypeError: if `global_batch_size` is not an int.
            InvalidValueError: if it is not divisible by the number of replicas.
        """
        size = checked_int("get_per_replica_batch_size: global_batch_size", global_batch_size)
        num_replicas = self.num_replicas_in_sync
        if size % num_replicas:
            raise InvalidValueError(
                f"get_per_replica_batch_size: the global batch size {size} is not"
                f" divisible by the {num_replicas} replicas. Choose a multiple of {num_replicas},"
                f" such as {max(1, size // num_replicas) * num_replicas}."
            )
        return size // num_replicas

    def __repr__(self) -> str:
        return (
            f"distributary.InputContext(input pipeline id {self.input_pipeline_id}, total:"
            f" {self.num_input_pipelines}, replicas: {self.num_replicas_in_sync})"
        )
