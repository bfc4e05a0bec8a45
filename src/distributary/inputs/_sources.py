"""Sources that can be distributed: global batches, or elements for single replicas."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import jax
import numpy as np

from distributary.datasets import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    AutoShardPolicy,
    Dataset,
    Node,
    Once,
    OneShot,
    Prefetch,
    TensorSpec,
    WithOptions,
    WorkerBatches,
    WorkerShare,
    check_dense,
    describe,
    drawn_seeds,
    foreign,
    from_list,
    runs_of,
    with_drawn_seeds,
)
from distributary.errors import ClusterError, InvalidTypeError, InvalidValueError
from distributary.inputs._coworkers import Coworkers

_WHAT = "experimental_distribute_dataset: got"


@final
class Batches:
    """Global batches, split over the replicas.

    Args:
        dataset: A `Dataset` of batches, a dataset of another library, an iterable of batches, or
            arrays whose dim 0 counts the batches.
        share: Number of replicas here and elsewhere.
        what: Start of error messages about it: the function and the origin of the dataset.
        coworkers: All workers, if there are several.

    Attributes:
        coworkers: All workers if they see different batches, else None.
        prefetch_depth: Number of batches that the dataset wants to have ready.

    Raises:
        InvalidTypeError: if the dataset cannot be iterated over.
        InvalidValueError: if it is not batched, or its policy cannot be followed.
        ClusterError: if another worker has such an error, or the workers' datasets do not match.
    """

    is_global = True

    def __init__(
        self,
        dataset: Any,
        share: WorkerShare,
        what: str = _WHAT,
        coworkers: Coworkers | None = None,
    ) -> None:
        self._share = share
        self.coworkers: Coworkers | None = None

        def prepare() -> Any:
            self.node, self.prefetch_depth = _without_prefetch(_batches(dataset, what))
            own = self._of_worker
            # Workers may read their data under different names, unless all read the same data.
            name = f" {describe(self.node)}" if own.policy is AutoShardPolicy.DATA else ""
            return own.policy.name + name, own.node.cardinality(), drawn_seeds(self.node)

        if coworkers is None:
            prepare()
            return
        self.place = coworkers.new_name()
        told = coworkers.job.agree(self.place, prepare)
        ways, cardinalities, seeds = zip(*told, strict=True)
        if len({(way, len(own)) for way, _, own in told}) > 1:
            seen = ", ".join(
                f"{n}: {way}" for n, way in zip(coworkers.job.names, ways, strict=True)
            )
            raise ClusterError(
                f"{what} datasets that differ between the workers, or are read in different ways:"
                f" {seen}. Distribute the same dataset on every worker, or set its"
                " auto_shard_policy."
            )
        self._longest = _longest(cardinalities)
        # Every worker needs the same order of shuffles without a seed.
        self.node = with_drawn_seeds(self.node, seeds[0])
        if self._of_worker.policy is not AutoShardPolicy.DATA:
            self.coworkers = coworkers

    @property
    def node(self) -> Node:
        """The dataset."""
        return self._node

    @node.setter
    def node(self, node: Node) -> None:
        self._node = node
        self._of_worker = WorkerBatches(node, self._share)

    @property
    def once(self) -> OneShot | None:
        """The iterator of a source that cannot start over, or else None."""
        return self.node.items if isinstance(self.node, Once) else None

    def is_in_memory(self) -> bool:
        """Returns whether the data are made of arrays in memory; see `Node.is_in_memory`."""
        return self._node.is_in_memory()

    def cardinality(self) -> int:
        """Returns the number of steps, which is that of the worker with the most batches."""
        return self._of_worker.node.cardinality() if self.coworkers is None else self._longest

    def spec(self) -> Any:
        """Returns a nest of `TensorSpec` that describes a batch."""
        return self.node.spec()

    def stream(self, path: tuple[int, ...]) -> Any:
        """Starts a pass over this worker's part of the batches."""
        # Workers compute an uneven batch together, so each needs all of it.
        return self._of_worker.stream(path, checked, whole_if_uneven=True)

    def runs(self) -> list[tuple[int | None, Any]] | None:
        """Returns the shapes of the batches, see `WorkerBatches.runs`."""
        return self._of_worker.runs()


@final
class Elements:
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
        self._num_replicas = num_replicas
        self.coworkers = coworkers

        def prepare() -> int:
            what = "distribute_datasets_from_function: dataset_fn returned"
            found = [_without_prefetch(as_node(dataset, what)) for dataset in make()]
            self._nodes = [node for node, _ in found]
            self.prefetch_depth = max(depth for _, depth in found)
            return self._own_cardinality()

        if coworkers is None:
            prepare()
        else:
            self.place = coworkers.new_name()
            self._longest = _longest(coworkers.job.agree(self.place, prepare))

    @property
    def once(self) -> OneShot | None:
        """The iterator of a source that cannot start over, or else None."""
        first = self._nodes[0]
        return first.items if len(self._nodes) == 1 and isinstance(first, Once) else None

    @property
    def node(self) -> Node:
        """The dataset."""
        if len(self._nodes) > 1:
            raise InvalidValueError(
                "The state of an iterator over one dataset per replica cannot be saved: use"
                " InputReplicationMode.PER_WORKER."
            )
        return self._nodes[0]

    @node.setter
    def node(self, node: Node) -> None:
        self._nodes = [node]

    def is_in_memory(self) -> bool:
        """Returns whether the data are made of arrays in memory; see `Node.is_in_memory`."""
        return all(node.is_in_memory() for node in self._nodes)

    def cardinality(self) -> int:
        """Returns the number of steps, which is that of the worker with the most."""
        return self._own_cardinality() if self.coworkers is None else self._longest

    def _own_cardinality(self) -> int:
        sizes = [node.cardinality() for node in self._nodes]
        size = _longest(sizes)
        return size if len(sizes) > 1 or size < 0 else -(-size // self._num_replicas)

    def runs(self) -> list[tuple[int | None, Any]] | None:
        """Returns the shapes of the steps, see `WorkerBatches.runs`."""
        runs, num = runs_of(self._nodes[0]), self._num_replicas
        if runs is None:
            return None
        grouped: list[tuple[int | None, Any]] = []
        step: list[Any] = []  # parts of the replicas so far
        for count, spec in runs:
            if count is None:
                return [(None, [spec] * num)]
            taken = min(count, -len(step) % num)
            step += [spec] * taken
            if len(step) == num:
                grouped.append((1, step))
                step = []
            whole, rest = divmod(count - taken, num)
            if whole:
                grouped.append((whole, [spec] * num))
            step += [spec] * rest
        if step:
            if any(not leaf.shape for leaf in jax.tree.leaves(step[0])):
                return None  # because the step will fail
            empty = jax.tree.map(lambda leaf: TensorSpec((0, *leaf.shape[1:]), leaf.dtype), step[0])
            grouped.append((1, step + [empty] * (num - len(step))))
        return grouped

    def spec(self) -> Any:
        """Returns a nest of `TensorSpec` that describes an element."""
        return self._nodes[0].spec()

    def stream(self, path: tuple[int, ...]) -> Any:
        """Starts a pass over the steps, which are lists with one element per replica."""
        streams = [node.stream(path) for node in self._nodes]
        return _ElementSteps(streams, self._num_replicas)


def _longest(cardinalities: Sequence[int]) -> int:
    """Returns the number of steps until the last of several datasets ends."""
    for unusual in (INFINITE_CARDINALITY, UNKNOWN_CARDINALITY):
        if unusual in cardinalities:
            return unusual
    return max(cardinalities)


_END: Any = object()


@final
class _ElementSteps:
    def __init__(self, streams: list[Any], num_replicas: int) -> None:
        self._streams = streams if len(streams) > 1 else streams * num_replicas
        self._shared = len(streams) == 1

    def __iter__(self) -> Iterator[list[Any]]:
        return self

    def __next__(self) -> list[Any]:
        parts = [next(stream, _END) for stream in self._streams]
        present = [part for part in parts if part is not _END]
        if not present:
            raise StopIteration
        arrays = [part if part is _END else jax.tree.map(_on_host, part) for part in parts]
        first = next(part for part in arrays if part is not _END)
        return [_without_rows(first) if part is _END else part for part in arrays]

    def advance(self, count: int) -> int:
        """Skips steps, and returns how many."""
        if not self._shared:
            return max(stream.advance(count) for stream in self._streams)
        num_replicas = len(self._streams)
        return -(-self._streams[0].advance(count * num_replicas) // num_replicas)


def _on_host(leaf: Any) -> Any:
    # A copy, because the source may use the array again.
    return np.array(leaf)


def _without_rows(element: Any) -> Any:
    def empty(array: Any) -> Any:
        if array.ndim == 0:
            raise InvalidValueError(
                "distribute_datasets_from_function: the dataset ended in the middle of a step and"
                " its elements are scalars, which cannot be empty. Make their number a multiple of"
                " the number of replicas, or batch them."
            )
        return array[:0]

    return jax.tree.map(empty, element)


def as_node(dataset: Any, what: str) -> Node:
    """Returns the node of a dataset of this or another library, or of any iterable."""
    return dataset.node if isinstance(dataset, Dataset) else foreign(dataset, what)


def _without_prefetch(node: Node) -> tuple[Node, int]:
    """Returns a dataset without `prefetch` at its end, and the depth of that `prefetch`.

    The distributed dataset prefetches by itself.
    """
    depth = 0
    while isinstance(node, Prefetch) or (
        isinstance(node, WithOptions) and isinstance(node.input, Prefetch)
    ):
        if isinstance(node, Prefetch):
            depth = max(depth, node.depth)
            node = node.input
        else:
            node = WithOptions(node.input.input, node.options)  # type: ignore[attr-defined]
    return node, depth


def _batches(dataset: Any, what: str) -> Node:
    if isinstance(dataset, tuple) and dataset and all(hasattr(x, "shape") for x in dataset):
        raise InvalidTypeError(
            f"{what} a tuple of arrays with shapes"
            f" {[tuple(x.shape) for x in dataset]}. If it is one batch, pass a list with it, [(x,"
            " y)]; if each array is a batch, pass a list of them."
        )
    if isinstance(dataset, (np.ndarray, jax.Array, dict)):
        return from_list(_rows_of(dataset, what), batched=True)
    node = as_node(dataset, what)
    if node.is_batched() is False:
        raise InvalidValueError(
            f"{what} the dataset {dataset!r}, which yields single examples; they would be split"
            " along their own first dim. Call .batch(global_batch_size) first. If its elements are"
            " batches already, pass the array [batch, row, ...] itself, or a list of batches."
        )
    return node


def _rows_of(dataset: Any, what: str) -> list[Any]:
    leaves = jax.tree.leaves(dataset)
    if not leaves or not all(hasattr(leaf, "shape") for leaf in leaves):
        kinds = sorted({type(leaf).__name__ for leaf in leaves})
        raise InvalidTypeError(
            f"{what} a dict that holds"
            f" {', '.join(kinds) or 'nothing'}, expected arrays [batch, row, ...]. Pass a list"
            " for other iterables of batches."
        )
    if any(leaf.ndim < 2 for leaf in leaves):
        raise InvalidValueError(
            f"{what} an array of shape"
            f" {next(leaf.shape for leaf in leaves if leaf.ndim < 2)}, expected [batch, row, ...]:"
            " dim 0 counts the batches. Reshape it to (num_batches, global_batch_size, ...), or"
            " pass a list of batches."
        )
    lengths = {len(leaf) for leaf in leaves}
    if len(lengths) > 1:
        raise InvalidValueError(
            f"{what} arrays that hold different numbers of batches, {sorted(lengths)} (dim 0)."
        )
    return [jax.tree.map(lambda a, i=i: a[i], dataset) for i in range(lengths.pop())]


def checked(batch: Any, number: int, may_be_reused: bool) -> tuple[Any, int]:
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
        raise InvalidTypeError(f"Batch {number} of the dataset is {batch!r} and holds no arrays.")
    arrays = [_array(leaf, number, may_be_reused) for leaf in leaves]
    sizes = {array.shape[0] for array in arrays}
    if len(sizes) > 1:
        raise InvalidValueError(
            f"Batch {number} of the dataset holds arrays with {sorted(sizes)} rows; all arrays of a"
            " batch must have the same number of rows (dim 0), which is split over the replicas."
        )
    return jax.tree.unflatten(tree, arrays), sizes.pop()


def _is_list_of_numbers(value: Any) -> bool:
    if type(value) is not list or not value:
        return False
    first = value[0]
    while type(first) is list and first:
        first = first[0]
    return isinstance(first, (bool, int, float, complex))


def _array(leaf: Any, number: int, may_be_reused: bool) -> Any:
    array = leaf
    if not isinstance(leaf, jax.Array):
        check_dense(leaf)
        array = np.array(leaf) if may_be_reused else np.asarray(leaf)
    if array.dtype == object or getattr(array.dtype, "kind", "") in ("U", "S"):
        raise InvalidTypeError(
            f"Batch {number} of the dataset holds {leaf!r}; strings and objects cannot go to a"
            " device. Map them to numbers first."
        )
    if array.ndim == 0:
        raise InvalidValueError(
            f"Batch {number} of the dataset holds the scalar {leaf!r}: the dataset is not batched."
            " Distribute batches, whose dim 0 is split over the replicas."
        )
    return array
