"""The part of a dataset that a worker reads, and the rows of it that each replica gets."""

import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import jax
import numpy as np

from distributary._types import Nest
from distributary.datasets._batching import Batch, BatchedStream
from distributary.datasets._nodes import FileSource, Node
from distributary.datasets._options import AutoShardPolicy
from distributary.datasets._order import Shard, WithOptions, options_of
from distributary.datasets._prefetch import Prefetch
from distributary.datasets._several import Interleave
from distributary.datasets._streams import Path, Stream
from distributary.datasets._structure import Block, num_rows, sized_spec, some_rows
from distributary.errors import InvalidValueError

_log = logging.getLogger(__name__)


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
    def alone(self) -> "WorkerShare":
        """The same replicas' share of batches that only this worker reads."""
        return WorkerShare(replicas_per_worker=self.replicas_per_worker)

    @property
    def num_replicas(self) -> int:
        """Number of replicas of all workers."""
        return self.num_workers * self.replicas_per_worker

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


Check: TypeAlias = Callable[[Nest, int, bool], tuple[Nest, int]]
"""A function of a batch, its number, and whether its source may use its arrays again. It returns a
nest of arrays and their number of rows."""


@final
class WorkerBatches:
    """The global batches of a dataset as one of its workers sees them.

    Args:
        node: Dataset of global batches.
        share: The worker.

    Attributes:
        policy: The policy in effect, never AUTO; DATA if there is only one worker. With DATA, and
            with no other policy, all workers see the same batches.
        node: The dataset that this worker reads.

    Raises:
        InvalidValueError: if the policy of the dataset cannot be followed.
    """

    def __init__(self, node: Node, share: WorkerShare) -> None:
        self._share = share
        self.policy = _policy_of(node, share)
        if self.policy is AutoShardPolicy.FILE:
            node = _sharded_by_file(node, share)
        elif self.policy is AutoShardPolicy.HINT:
            node = node.rewrite(lambda own: _with_hint(own, share))
        if self.policy is not AutoShardPolicy.DATA:
            node = _with_batches_of_worker(node, share)
        self.node = node

    def runs(self) -> list[tuple[int | None, list[Nest]]] | None:
        """Returns how many consecutive batches have parts of the same shapes on this worker.

        Each run is a number of batches, None for no end, and for every replica a nest of
        `TensorSpec`. Returns None if only reading would tell. Not for DATA.
        """

        def parts(spec: Nest) -> list[Nest]:
            num_rows = jax.tree.leaves(spec)[0].shape[0]
            return [sized_spec(spec, size) for size in self._share.alone.sizes(num_rows)]

        runs = self.node.runs()
        return None if runs is None else [(count, parts(spec)) for count, spec in runs]

    def stream(self, path: Path, check: Check, whole_if_uneven: bool = False) -> "WorkerStream":
        """Starts a pass over the batches, each of which goes through `check`.

        With `whole_if_uneven`, if the parts of a batch are not equal, the worker gets all of its
        rows and the sizes of the parts of all replicas.
        """
        node, share = self.node, self._share
        if self.policy is not AutoShardPolicy.DATA:
            share = share.alone
        last = node
        while isinstance(last, (Prefetch, WithOptions)):
            last = last.input
        if share.num_workers > 1 and isinstance(last, Batch):
            # It fetches only the rows of this worker.
            node = last
        return WorkerStream(
            node.stream(path), share, check, not node.makes_arrays(), whole_if_uneven
        )


@final
class WorkerStream:
    """One pass over a worker's batches; yields `WorkerBatch`.

    Args:
        stream: The batches.
        share: The rows of a batch that are this worker's.
        check: Turns a batch into arrays.
        reused: Whether the source of the batches may write to their arrays again.
        whole_if_uneven: Whether to yield all rows of a batch if the replicas' parts are not equal.
    """

    def __init__(
        self, stream: Stream, share: WorkerShare, check: Check, reused: bool, whole_if_uneven: bool
    ) -> None:
        self._stream = stream
        self._share = share
        self._check = check
        self._reused = reused
        self._whole_if_uneven = whole_if_uneven
        self._number = -1

    def __iter__(self) -> Iterator[WorkerBatch]:
        return self

    def __next__(self) -> WorkerBatch:
        share = self._share
        self._number += 1
        if share.num_workers > 1 and isinstance(self._stream, BatchedStream):
            rows, size = self._stream.part(self._wanted)
            rows, _ = self._check(rows, self._number, self._reused)
        else:
            rows, size = self._check(next(self._stream), self._number, self._reused)
            if share.num_workers > 1:
                rows = some_rows(rows, self._wanted(size))
        if self._is_whole(size):
            share = WorkerShare(replicas_per_worker=share.num_replicas)
        return WorkerBatch(rows, share.sizes(size))

    def _is_whole(self, size: int) -> bool:
        return self._whole_if_uneven and size % self._share.num_replicas != 0

    def _wanted(self, size: int) -> slice:
        return slice(0, size) if self._is_whole(size) else self._share.rows(size)

    def advance(self, count: int) -> int:
        """Skips batches, and returns how many."""
        skipped = self._stream.advance(count)
        self._number += skipped
        return skipped


def _policy_of(node: Node, share: WorkerShare) -> AutoShardPolicy:
    asked = options_of(node).experimental_distribute.auto_shard_policy
    if share.num_workers == 1:
        return AutoShardPolicy.DATA
    if asked is not None and asked is not AutoShardPolicy.AUTO:
        return asked
    fewest = min((len(source.files) for source in _file_sources(node)), default=0)
    by_file = fewest >= share.num_workers
    _log.info("Dataset %s is sharded by %s.", node.describe(), "file" if by_file else "data")
    return AutoShardPolicy.FILE if by_file else AutoShardPolicy.DATA


def _file_sources(node: Node) -> list[FileSource]:
    return [own for own in node.tree() if isinstance(own, FileSource)]


def _sharded_by_file(node: Node, share: WorkerShare) -> Node:
    def with_own_files(own: Node) -> Node:
        if not isinstance(own, FileSource):
            return own
        return own.replace(files=own.files[share.worker :: share.num_workers])

    for source in _file_sources(node):
        if len(source.files) < share.num_workers:
            raise InvalidValueError(
                f"AutoShardPolicy.FILE: {len(source.files)} files are too few for"
                f" {share.num_workers} workers: {list(source.files)[:3]}. Write at least"
                f" {share.num_workers} files, or use AutoShardPolicy.DATA."
            )
    if _file_sources(node):
        return node.rewrite(with_own_files)
    # The names of files come from elsewhere, and the contents of the files are interleaved.
    for own in node.tree():
        if isinstance(own, Interleave) and any(map(_file_sources, own.first_part())):
            break
    else:
        raise InvalidValueError(
            f"AutoShardPolicy.FILE: the dataset {node.describe()} reads no files. Use"
            " AutoShardPolicy.DATA, which gives every worker its rows of each batch."
        )
    sharded = own.replace(input=Shard(own.input, share.num_workers, share.worker))
    return node.rewrite(lambda node: sharded if node is own else node)


def _with_hint(node: Node, share: WorkerShare) -> Node:
    if isinstance(node, Shard) and node.is_hint:
        return Shard(node.input, share.num_workers, share.worker)
    return node


def _with_batches_of_worker(node: Node, share: WorkerShare) -> Node:
    """Returns the dataset with every global batch size replaced by this worker's share of it."""
    if isinstance(node, (Prefetch, WithOptions)):
        return node.replace(input=_with_batches_of_worker(node.input, share))
    if isinstance(node, Batch):
        return node.replace(size=_share_of(node.size, share))
    return _Cut(node, share)


def _share_of(size: int, share: WorkerShare) -> int:
    own = WorkerShare(share.num_workers, share.worker).rows(size)
    count = own.stop - own.start
    if not count:
        raise InvalidValueError(
            f"A global batch of {size} examples is less than one example for each of the"
            f" {share.num_workers} workers, which read different data. Choose a larger batch, or"
            " AutoShardPolicy.DATA."
        )
    return int(count)


@final
@dataclass(frozen=True, eq=False)
class _Cut(Node):
    """Batches of one worker's size, cut from global batches that other operations make."""

    input: Node
    share: WorkerShare

    def cardinality(self) -> int:
        size = self.input.cardinality()
        return size if size < 0 else size * self.share.num_workers

    def elements(self, path: Path) -> Stream:
        return _CutStream(self.input.stream(path), self.share)

    def label(self) -> str:
        return f"cut({self.share.num_workers})"


@final
class _CutStream(Stream):
    def __init__(self, upstream: Stream, share: WorkerShare) -> None:
        self._upstream = upstream
        self._share = share
        self._pieces: list[Block] = []

    def __next__(self) -> Block:
        while not self._pieces:
            batch = next(self._upstream)
            size = num_rows(batch)
            step = max(1, -(-size // self._share.num_workers))
            self._pieces = [some_rows(batch, slice(i, i + step)) for i in range(0, size, step)]
        return self._pieces.pop(0)


def split_rows(rows: Nest, sizes: Sequence[int]) -> list[Nest]:
    """Splits a worker's rows into the parts of its replicas."""
    ends = [0, *np.cumsum(sizes).tolist()]
    return [some_rows(rows, slice(a, b)) for a, b in itertools.pairwise(ends)]
