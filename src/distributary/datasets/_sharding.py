"""The part of a dataset that a worker reads, and the rows of it that each replica gets."""

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final, runtime_checkable

import jax
import numpy as np

from distributary.datasets._elements import Batch, Prefetch
from distributary.datasets._nodes import Node, all_nodes, describe, rewrite
from distributary.datasets._options import AutoShardPolicy
from distributary.datasets._order import Shard, WithOptions, options_of
from distributary.datasets._runs import runs_of
from distributary.datasets._several import Interleave
from distributary.datasets._streams import Batched, Path, Stream
from distributary.datasets._structure import Block, TensorSpec, num_rows, some_rows
from distributary.errors import InvalidValueError

_log = logging.getLogger(__name__)


@runtime_checkable
class FileSource(Protocol):
    """A node that reads files, or lists them."""

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files."""


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


@final
@dataclass(frozen=True)
class WorkerBatch:
    """A worker's rows of a global batch.

    Attributes:
        rows: Nest of arrays `[row, ...]`.
        sizes: Number of rows that each of its replicas gets, in order.
    """

    rows: Any
    sizes: tuple[int, ...]


# A function of a batch, its number, and whether its source may use its arrays again. It returns a
# nest of arrays and their number of rows.
Check = Callable[[Any, int, bool], tuple[Any, int]]


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
            node = rewrite(node, lambda own: _with_hint(own, share))
        if self.policy is not AutoShardPolicy.DATA:
            node = _with_batches_of_worker(node, share)
        self.node = node

    def runs(self) -> list[tuple[int | None, Any]] | None:
        """Returns how many consecutive batches have parts of the same shapes on this worker.

        Each run is a number of batches, None for no end, and for every replica a nest of
        `TensorSpec`. Returns None if only reading would tell. Not for DATA.
        """
        runs = runs_of(self.node)
        alone = WorkerShare(replicas_per_worker=self._share.replicas_per_worker)

        def parts(spec: Any) -> list[Any]:
            size = jax.tree.leaves(spec)[0].shape[0]
            return [
                jax.tree.map(lambda leaf, n=n: TensorSpec((n, *leaf.shape[1:]), leaf.dtype), spec)
                for n in _sizes(alone, size)
            ]

        return None if runs is None else [(count, parts(spec)) for count, spec in runs]

    def stream(self, path: Path, check: Check, whole_if_uneven: bool = False) -> "WorkerStream":
        """Starts a pass over the batches, each of which goes through `check`.

        With `whole_if_uneven`, if the parts of a batch are not equal, the worker gets all of its
        rows and the sizes of the parts of all replicas.
        """
        node, share = self.node, self._share
        reused = not node.makes_arrays()
        if self.policy is not AutoShardPolicy.DATA:
            return WorkerStream(node.stream(path), share, "cut", check, reused)
        if share.num_workers > 1:
            inner = node
            while isinstance(inner, (Prefetch, WithOptions)):
                inner = inner.input
            if isinstance(inner, Batch):
                # The rows of other workers are then never fetched.
                return WorkerStream(
                    inner.elements(path), share, "part", check, reused, whole_if_uneven
                )
        return WorkerStream(node.stream(path), share, "split", check, reused, whole_if_uneven)


@final
class WorkerStream:
    """One pass over a worker's batches; yields `WorkerBatch`.

    Args:
        stream: The batches.
        share: The worker.
        how: "split" takes the worker's rows of global batches. "part" does the same and never
            fetches the other rows. "cut" takes all rows.
        check: Turns a batch into arrays.
        reused: Whether the source of the batches may write to their arrays again.
    """

    def __init__(
        self,
        stream: Stream,
        share: WorkerShare,
        how: str,
        check: Check,
        reused: bool,
        whole_if_uneven: bool = False,
    ) -> None:
        self._whole_if_uneven = whole_if_uneven
        self._stream = stream
        self._share = share
        self._how = how
        self._check = check
        self._reused = reused
        self._number = -1

    def __iter__(self) -> Iterator[WorkerBatch]:
        return self

    def __next__(self) -> WorkerBatch:
        share = self._share
        self._number += 1
        if self._how == "part":
            assert isinstance(self._stream, Batched)
            rows, size = self._stream.part(self._wanted)
            return self._batch(self._check(rows, self._number, False)[0], size)
        batch, size = self._check(next(self._stream), self._number, self._reused)
        if self._how == "cut":
            alone = WorkerShare(replicas_per_worker=share.replicas_per_worker)
            return WorkerBatch(batch, _sizes(alone, size))
        if share.num_workers > 1:
            batch = some_rows(batch, self._wanted(size))
        return self._batch(batch, size)

    def _is_whole(self, size: int) -> bool:
        return self._whole_if_uneven and size % self._share.num_replicas != 0

    def _wanted(self, size: int) -> slice:
        return slice(0, size) if self._is_whole(size) else self._share.rows(size)

    def _batch(self, rows: Any, size: int) -> WorkerBatch:
        share = self._share
        if self._is_whole(size):
            share = WorkerShare(replicas_per_worker=share.num_replicas)
        return WorkerBatch(rows, _sizes(share, size))

    def advance(self, count: int) -> int:
        """Skips batches, and returns how many."""
        skipped = self._stream.advance(count)
        self._number += skipped
        return skipped


@functools.lru_cache(maxsize=256)
def _sizes(share: WorkerShare, size: int) -> tuple[int, ...]:
    return tuple(b - a for a, b in itertools.pairwise(share.ends(size)))


def _policy_of(node: Node, share: WorkerShare) -> AutoShardPolicy:
    asked = options_of(node).experimental_distribute.auto_shard_policy
    if share.num_workers == 1:
        return AutoShardPolicy.DATA
    if asked is not None and asked is not AutoShardPolicy.AUTO:
        return asked
    by_file = _num_files(node) >= share.num_workers
    _log.info("Dataset %s is sharded by %s.", describe(node), "file" if by_file else "data")
    return AutoShardPolicy.FILE if by_file else AutoShardPolicy.DATA


def _num_files(node: Node) -> int:
    """Returns the number of files of the source with the fewest; 0 if there is none."""
    counts = [len(source.files) for source in _file_sources(node)]
    return min(counts, default=0)


def _file_sources(node: Node) -> list[Any]:
    return [own for own in all_nodes(node) if isinstance(own, FileSource)]


def _sharded_by_file(node: Node, share: WorkerShare) -> Node:
    sources = _file_sources(node)
    if sources:
        for source in sources:
            if len(source.files) < share.num_workers:
                raise InvalidValueError(
                    f"AutoShardPolicy.FILE: {len(source.files)} files are too few for"
                    f" {share.num_workers} workers: {list(source.files)[:3]}. Write at least"
                    f" {share.num_workers} files, or use AutoShardPolicy.DATA."
                )

        def change(own: Node) -> Node:
            if not isinstance(own, FileSource):
                return own
            files = own.files[share.worker :: share.num_workers]
            return dataclasses.replace(own, files=files)  # type: ignore[type-var]

        return rewrite(node, change)
    # The names of files come from elsewhere, and the contents of the files are interleaved.
    for own in all_nodes(node):
        first = own.first() if isinstance(own, Interleave) else None
        if first is not None and _file_sources(first):
            return rewrite(
                node,
                lambda n, own=own: (
                    dataclasses.replace(  # type: ignore[misc]
                        n, input=Shard(n.input, share.num_workers, share.worker)
                    )
                    if n is own
                    else n
                ),
            )
    raise InvalidValueError(
        f"AutoShardPolicy.FILE: the dataset {describe(node)} reads no files. Use"
        " AutoShardPolicy.DATA, which gives every worker its rows of each batch."
    )


def _with_hint(node: Node, share: WorkerShare) -> Node:
    if isinstance(node, Shard) and node.is_hint:
        return Shard(node.input, share.num_workers, share.worker)
    return node


def _with_batches_of_worker(node: Node, share: WorkerShare) -> Node:
    """Returns the dataset with every global batch size replaced by this worker's share of it."""
    if isinstance(node, (Prefetch, WithOptions)):
        return dataclasses.replace(node, input=_with_batches_of_worker(node.input, share))
    if isinstance(node, Batch):
        return dataclasses.replace(node, size=_share_of(node.size, share))
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
class _CutStream(Stream):
    def __init__(self, upstream: Stream, share: WorkerShare) -> None:
        self._upstream = upstream
        self._share = share
        self._pieces: list[Block] = []

    def __next__(self) -> Any:
        while not self._pieces:
            batch = next(self._upstream)
            size = num_rows(batch)
            step = max(1, -(-size // self._share.num_workers))
            self._pieces = [some_rows(batch, slice(i, i + step)) for i in range(0, size, step)]
        return self._pieces.pop(0)


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


def split_rows(rows: Any, sizes: Sequence[int]) -> list[Any]:
    """Splits a worker's rows into the parts of its replicas."""
    ends = [0, *np.cumsum(sizes).tolist()]
    return [some_rows(rows, slice(a, b)) for a, b in itertools.pairwise(ends)]
