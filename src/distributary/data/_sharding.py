"""The part of a dataset that each worker reads."""

import logging
from collections.abc import Iterator

from distributary.data._batching import Batch
from distributary.data._nodes import FileSource, Node
from distributary.data._order import ShardHint, Slice, WithOptions, options_of
from distributary.data._replica_rows import WorkerShare
from distributary.data._several import Generated, Interleave
from distributary.data._streams import Stream
from distributary.data._structure import Block, num_rows, some_rows
from distributary.errors import InvalidValueError
from distributary.options import AutoShardPolicy

_log = logging.getLogger(__name__)


def worker_dataset(node: Node, share: WorkerShare) -> tuple[AutoShardPolicy, Node]:
    """Returns how a worker reads a dataset of global batches, and the dataset that it reads.

    The policy is never AUTO, and DATA if there is only one worker. With DATA, and with no other
    policy, all workers see the same batches.

    Raises:
        InvalidValueError: if the policy of the dataset cannot be followed.
    """
    policy = _policy_of(node, share)
    if policy is AutoShardPolicy.FILE:
        node = _sharded_by_file(node, share)
    elif policy is AutoShardPolicy.HINT:
        own_shard = lambda part: Slice.shard(part.input, share.num_workers, share.worker)
        node = node.rewrite(lambda part: own_shard(part) if isinstance(part, ShardHint) else part)
    if policy is not AutoShardPolicy.DATA:
        node = _with_batches_of_worker(node, share)
    return policy, node


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
    return [part for part in node.tree() if isinstance(part, FileSource)]


def _sharded_by_file(node: Node, share: WorkerShare) -> Node:
    def with_own_files(part: Node) -> Node:
        if not isinstance(part, FileSource):
            return part
        return part.replace(files=part.files[share.worker :: share.num_workers])

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
    for interleave in node.tree():
        if isinstance(interleave, Interleave) and any(map(_file_sources, interleave.first_part())):
            break
    else:
        raise InvalidValueError(
            f"AutoShardPolicy.FILE: the dataset {node.describe()} reads no files. Use"
            " AutoShardPolicy.DATA, which gives every worker its rows of each batch."
        )
    sharded = interleave.replace(
        input=Slice.shard(interleave.input, share.num_workers, share.worker)
    )
    return node.rewrite(lambda node: sharded if node is interleave else node)


def _with_batches_of_worker(node: Node, share: WorkerShare) -> Node:
    """Returns the dataset with every global batch size replaced by this worker's share of it."""
    if isinstance(node, WithOptions):
        return node.replace(input=_with_batches_of_worker(node.input, share))
    if isinstance(node, Batch):
        return node.replace(size=_share_of(node.size, share))
    return _cut(node, share)


def _share_of(size: int, share: WorkerShare) -> int:
    rows = WorkerShare(share.num_workers, share.worker).rows(size)
    count = rows.stop - rows.start
    if not count:
        raise InvalidValueError(
            f"A global batch of {size} examples is less than one example for each of the"
            f" {share.num_workers} workers, which read different data. Choose a larger batch, or"
            " AutoShardPolicy.DATA."
        )
    return int(count)


def _cut(node: Node, share: WorkerShare) -> Node:
    """Returns batches of one worker's size, cut from global batches that other operations make."""

    def pieces(batches: Stream) -> Iterator[Block]:
        for batch in batches:
            size = num_rows(batch)
            step = max(1, -(-size // share.num_workers))
            for start in range(0, size, step):
                yield some_rows(batch, slice(start, start + step))

    count = lambda size: size if size < 0 else size * share.num_workers
    return Generated((node,), pieces, f"cut({share.num_workers})", count, in_memory=None)
