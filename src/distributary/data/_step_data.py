"""Data of distributed datasets: the part that each worker reads, and its rows for each replica."""

import abc
import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, final

import jax
import numpy as np

from distributary.data._making import Batch, BatchedStream, Generated, Interleave
from distributary.data._nodes import (
    FileSource,
    Node,
    NumberedNode,
    Prefetch,
    ShardHint,
    Slice,
    Stream,
    WithOptions,
    combined,
    options_of,
)
from distributary.data._sources import Once, OneShot, RandomAccess, node_of
from distributary.data._structure import Block, check_dense, num_rows, some_rows
from distributary.devices import Nest
from distributary.errors import ClusterError, InvalidTypeError, InvalidValueError, shown
from distributary.job import Coworkers, check_same_data, fingerprint
from distributary.options import AutoShardPolicy
from distributary.tracing import narrowed, native

# The rows of a batch for each replica.


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

    @functools.lru_cache(maxsize=256)  # noqa: B019 (a share is three numbers)
    def sizes(self, num_rows: int) -> tuple[int, ...]:
        """Returns the number of rows of a global batch that each replica of this worker gets."""
        return tuple([b - a for a, b in itertools.pairwise(self.ends(num_rows))])


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


# The part of a dataset that each worker reads.


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


# Global batches, or elements for single replicas.


_T = TypeVar("_T")

_MAX_COMPARED_ROWS = 32


class StepData(abc.ABC):
    """Base class of the data of distributed datasets.

    Attributes:
        is_global: True if an element holds the rows of all replicas.
        coworkers: All workers if they see different data, else None.
        place: Name of the data, the same on all workers.
        prefetch_depth: Number of steps that the datasets want to have ready.
        nodes: The dataset, or one for each replica.
    """

    is_global: ClassVar[bool]
    coworkers: Coworkers | None = None
    place: str = ""
    prefetch_depth: int
    nodes: list[Node]
    _longest: int

    def _agree(self, coworkers: Coworkers | None, prepare: Callable[[], _T]) -> list[_T]:
        """Returns the results of `prepare` on all workers; an error of one is raised on all."""
        if coworkers is None:
            return [prepare()]
        self.place = f"distributed dataset {coworkers.job.count('distributed dataset') + 1}"
        return coworkers.job.agree(self.place, prepare)

    def node(self) -> Node:
        """Returns the dataset."""
        if len(self.nodes) > 1:
            raise InvalidValueError(
                "The state of an iterator over one dataset per replica cannot be saved: use"
                " InputReplicationMode.PER_WORKER."
            )
        return self.nodes[0]

    def set_node(self, node: Node) -> None:
        """Replaces the dataset by one in another order."""
        self.nodes = [node]

    @property
    def once(self) -> OneShot | None:
        """The iterator of a source that cannot start over, or else None."""
        first = self.nodes[0]
        return first.items if len(self.nodes) == 1 and isinstance(first, Once) else None

    def spec(self) -> Nest:
        """Returns a nest of `TensorSpec` that describes a batch, or an element of a replica."""
        return self.nodes[0].spec()

    def cardinality(self) -> int:
        """Returns the number of steps, which is that of the worker with the most."""
        return self._own_cardinality() if self.coworkers is None else self._longest

    @abc.abstractmethod
    def _own_cardinality(self) -> int: ...

    @abc.abstractmethod
    def stream(self, path: tuple[int, ...]) -> Stream:
        """Starts a pass over this worker's part of the steps."""


@final
class Batches(StepData):
    """Global batches, split over the replicas.

    Args:
        dataset: A `Dataset` of batches, a dataset of another library, or an iterable of batches.
        share: Number of replicas here and elsewhere.
        what: Start of error messages about it: the function and the origin of the dataset.
        coworkers: All workers, if there are several.

    Raises:
        InvalidTypeError: if the dataset cannot be iterated over.
        InvalidValueError: if it is not batched, its policy cannot be followed, or workers that each
            take rows of the same batches have other data in memory.
        ClusterError: if another worker has such an error, or the workers' datasets do not match.
    """

    is_global = True

    def __init__(
        self,
        dataset: object,
        share: WorkerShare,
        what: str = "experimental_distribute_dataset: got",
        coworkers: Coworkers | None = None,
    ) -> None:
        def prepare() -> tuple[str, int, list[int], int]:
            node, self.prefetch_depth = _without_prefetch(_batches(dataset, what))
            self.set_node(node)
            # Workers may read their data under different names, unless all read the same data.
            reads_all = self._policy is AutoShardPolicy.DATA
            way = self._policy.name + (f" {node.describe()}" if reads_all else "")
            seen = fingerprint(_first_in_memory(node)) if reads_all and coworkers else 0
            return way, self._own_cardinality(), node.drawn_seeds(), seen

        self._share = share
        reports = self._agree(coworkers, prepare)
        if coworkers is None:
            return
        ways, cardinalities, seeds, seen = zip(*reports, strict=True)
        if len({(way, len(worker_seeds)) for way, _, worker_seeds, _ in reports}) > 1:
            names = zip(coworkers.job.names, ways, strict=True)
            raise ClusterError(
                f"{what} datasets that differ between the workers, or are read in different ways:"
                f" {', '.join(f'{name}: {way}' for name, way in names)}. Distribute the same"
                " dataset on every worker, or set its auto_shard_policy."
            )
        check_same_data("The data in memory of a distributed dataset", seen)
        self._longest = combined(cardinalities)
        # Every worker needs the same order of shuffles without a seed.
        self.set_node(self.node().with_drawn_seeds(seeds[0]))
        if self._policy is not AutoShardPolicy.DATA:
            self.coworkers = coworkers

    def set_node(self, node: Node) -> None:
        super().set_node(node)
        self._policy, self._read = worker_dataset(node, self._share)

    def _own_cardinality(self) -> int:
        return self._read.cardinality()

    def stream(self, path: tuple[int, ...]) -> Stream:
        share = self._share
        if self._policy is not AutoShardPolicy.DATA:
            share = WorkerShare(replicas_per_worker=share.replicas_per_worker)
        return _BatchSteps(self._read.stream(path), share, not self._read.trait("own_arrays"))


@final
class Elements(StepData):
    """Elements that each belong to one replica.

    Args:
        make: Returns a list with one dataset per replica, or with a single dataset, of which each
            step takes consecutive elements, one per replica.
        num_replicas: Number of replicas of this worker.
        coworkers: All workers, if there are several.

    Raises:
        InvalidTypeError: if a dataset cannot be iterated over.
        ClusterError: if `make` failed on another worker.
    """

    is_global = False

    def __init__(
        self, make: Callable[[], list[Any]], num_replicas: int, coworkers: Coworkers | None = None
    ) -> None:
        def prepare() -> int:
            what = "distribute_datasets_from_function: dataset_fn returned"
            nodes = [_without_prefetch(node_of(dataset, what)) for dataset in make()]
            self.nodes = [node for node, _ in nodes]
            self.prefetch_depth = max(depth for _, depth in nodes)
            return self._own_cardinality()

        self._num_replicas = num_replicas
        self.coworkers = coworkers
        self._longest = combined(self._agree(coworkers, prepare))

    def _own_cardinality(self) -> int:
        size = combined([node.cardinality() for node in self.nodes])
        return size if len(self.nodes) > 1 or size < 0 else -(-size // self._num_replicas)

    def stream(self, path: tuple[int, ...]) -> Stream:
        return _ElementSteps([node.stream(path) for node in self.nodes], self._num_replicas)


@final
class _BatchSteps(Stream):
    """Steps with a worker's rows of global batches.

    If the parts of a batch are not equal, the worker gets all of its rows and the sizes of the
    parts of all replicas, because the workers compute such a batch together.

    Args:
        stream: The batches.
        share: The rows of a batch that are this worker's.
        reused: Whether the source of the batches may write to their arrays again.
    """

    def __init__(self, stream: Stream, share: WorkerShare, reused: bool) -> None:
        self._stream = stream
        self._share = share
        self._reused = reused
        self._number = -1

    def __next__(self) -> WorkerBatch:
        share = self._share
        self._number += 1
        if share.num_workers > 1 and isinstance(self._stream, BatchedStream):
            # It fetches only the rows of this worker.
            rows, size = self._stream.part(self._wanted)
            rows, _ = checked(rows, self._number, self._reused)
        else:
            rows, size = checked(next(self._stream), self._number, self._reused)
            if share.num_workers > 1:
                rows = some_rows(rows, self._wanted(size))
        if not share.divides(size):
            share = WorkerShare(replicas_per_worker=share.num_replicas)
        return WorkerBatch(rows, share.sizes(size))

    def _wanted(self, size: int) -> slice:
        return self._share.rows(size) if self._share.divides(size) else slice(0, size)

    def advance(self, count: int) -> int:
        skipped = self._stream.advance(count)
        self._number += skipped
        return skipped


_END: Any = object()


@final
class _ElementSteps(Stream):
    """Steps with one element per replica, as lists of arrays on the host."""

    def __init__(self, streams: list[Stream], num_replicas: int) -> None:
        self._streams = streams
        self._per_stream = num_replicas // len(streams)

    def __next__(self) -> list[Nest]:
        parts = [next(stream, _END) for stream in self._streams for _ in range(self._per_stream)]
        # A copy, because the source may use its arrays again.
        arrays = [part if part is _END else jax.tree.map(np.array, part) for part in parts]
        first = next(part for part in arrays if part is not _END)  # StopIteration at the end
        return [_without_rows(first) if part is _END else part for part in arrays]

    def advance(self, count: int) -> int:
        each = self._per_stream
        return max(-(-stream.advance(count * each) // each) for stream in self._streams)


def _without_rows(element: Nest) -> Nest:
    def empty(array: np.ndarray) -> np.ndarray:
        if array.ndim == 0:
            raise InvalidValueError(
                "distribute_datasets_from_function: the dataset ended in the middle of a step and"
                " its elements are scalars, which cannot be empty. Make their number a multiple of"
                " the number of replicas, or batch them."
            )
        return array[:0]

    return jax.tree.map(empty, element)


def _without_prefetch(node: Node) -> tuple[Node, int]:
    """Returns a dataset without `prefetch` at its end, and the depth of that `prefetch`.

    The distributed dataset prefetches by itself.
    """
    if isinstance(node, Prefetch):
        inner, depth = _without_prefetch(node.input)
        return inner, max(depth, node.depth)
    if isinstance(node, WithOptions):
        inner, depth = _without_prefetch(node.input)
        return WithOptions(inner, node.options), depth
    return node, 0


def _first_in_memory(node: Node) -> list[Nest]:
    """Returns the first elements of the arrays, and of the lists of batches, that a dataset has."""
    firsts = []
    for part in node.tree():
        if isinstance(part, NumberedNode) and part.in_memory:
            firsts += [part.row(i) for i in range(min(part.cardinality(), _MAX_COMPARED_ROWS))]
        elif isinstance(part, RandomAccess) and isinstance(part.items, (list, tuple)):
            firsts += [part.row(i) for i in range(min(part.cardinality(), 1))]
    return firsts


def _batches(dataset: object, what: str) -> Node:
    is_batch = isinstance(dataset, tuple) and dataset and all(hasattr(x, "shape") for x in dataset)
    is_array = hasattr(dataset, "shape") and hasattr(dataset, "dtype")  # of any library
    if is_batch or is_array or isinstance(dataset, dict):
        raise InvalidTypeError(
            f"{what} {shown(dataset)}, not batches. For batches of its rows, pass"
            " Dataset.from_tensor_slices(data).batch(global_batch_size). If it is one batch, pass"
            " [data]; if dim 0 counts batches, list(data)."
        )
    node = node_of(dataset, what)
    if node.trait("batched") is False:
        raise InvalidValueError(
            f"{what} the dataset {shown(dataset)}, which yields single examples; they would be"
            " split along their own first dim. Call .batch(global_batch_size) first. If its"
            " elements are batches already, pass a list of them."
        )
    return node


def checked(batch: Nest, number: int, may_be_reused: bool) -> tuple[Nest, int]:
    """Returns a batch as a nest of arrays that can be split and placed, and its number of rows.

    Args:
        batch: Nest of arrays.
        number: Number of the batch, for errors.
        may_be_reused: Whether its source may write to the arrays again. They are then copied.

    Raises:
        InvalidValueError: if the arrays have no rows to split, or different numbers of rows.
        InvalidTypeError: if the batch contains no arrays.
    """
    leaves, tree = jax.tree.flatten(batch)
    if not all(isinstance(leaf, (np.ndarray, jax.Array)) for leaf in leaves):
        leaves, tree = jax.tree.flatten(batch, is_leaf=_is_list_of_numbers)
    if not leaves:
        raise InvalidTypeError(
            f"Batch {number} of the dataset is {shown(batch)} and holds no arrays."
        )
    arrays = [_array(leaf, number, may_be_reused) for leaf in leaves]
    sizes = {array.shape[0] for array in arrays}
    if len(sizes) > 1:
        raise InvalidValueError(
            f"Batch {number} of the dataset holds arrays with {sorted(sizes)} rows; all arrays of a"
            " batch must have the same number of rows (dim 0), which is split over the replicas."
        )
    return jax.tree.unflatten(tree, arrays), sizes.pop()


_WIDE = [np.dtype(name) for name in ("int64", "uint64", "float64", "complex128")]


def _is_list_of_numbers(value: object) -> bool:
    if type(value) is not list or not value:
        return False
    first = value[0]
    while type(first) is list and first:
        first = first[0]
    return isinstance(first, (bool, int, float, complex))


def _array(leaf: Any, number: int, may_be_reused: bool) -> np.ndarray | jax.Array:
    array = leaf
    if not isinstance(leaf, jax.Array):
        check_dense(leaf)
        array = native(np.array(leaf) if may_be_reused else np.asarray(leaf))
        if not number and array.dtype in _WIDE:  # to look at every batch would take too long
            narrowed(array, "Batch 0 of the dataset")
    if array.dtype == object or getattr(array.dtype, "kind", "") in ("U", "S"):
        raise InvalidTypeError(
            f"Batch {number} of the dataset holds {shown(leaf)}; strings and objects cannot go to a"
            " device. Map them to numbers first: dataset.map(lambda text: layer(text)), with a"
            " layer such as keras.layers.StringLookup."
        )
    if array.ndim == 0:
        raise InvalidValueError(
            f"Batch {number} of the dataset holds the scalar {shown(leaf)}: the dataset is not"
            " batched. Distribute batches, whose dim 0 is split over the replicas."
        )
    return array
