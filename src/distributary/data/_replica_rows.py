"""The rows of a batch for each replica."""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import numpy as np

from distributary.data._structure import some_rows
from distributary.devices import Nest


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


class DistributedInput:
    """Base class of distributed datasets and their iterators."""
