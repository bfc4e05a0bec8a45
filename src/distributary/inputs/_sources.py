"""What may be distributed, as global batches or as elements of the replicas."""

from collections.abc import Callable, Iterator
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
    WithOptions,
    WorkerBatches,
    WorkerShare,
    drawn_seeds,
    foreign,
    from_list,
    policy_of,
    with_drawn_seeds,
)
from distributary.errors import InvalidTypeError, InvalidValueError, UnsupportedError

_WHAT = "experimental_distribute_dataset: got"


@final
class Batches:
    """Global batches, split over the replicas.

    Args:
        dataset: A `Dataset` of batches, a dataset of another library, an iterable of batches, or
            arrays whose dim 0 counts the batches.
        share: Number of replicas here and elsewhere.
        what: Beginning of errors about it: the function and where the dataset comes from.
        agree: Gives all workers the chief's arrays.

    Raises:
        InvalidTypeError: if the dataset cannot be iterated over.
        InvalidValueError: if it is not batched.
    """

    is_global = True

    def __init__(
        self,
        dataset: Any,
        share: WorkerShare,
        what: str = _WHAT,
        agree: Callable[[list[np.ndarray]], list[np.ndarray]] | None = None,
    ) -> None:
        node, self.prefetch_depth = _without_prefetch(_batches(dataset, what))
        if share.num_workers > 1:
            _check_policy(node, what)
            seeds = drawn_seeds(node)
            if agree is not None and seeds:
                # Shuffles without a seed must have the same order on every worker.
                (agreed,) = agree([np.array(seeds, np.int64)])
                node = with_drawn_seeds(node, agreed.tolist())
        self._share = share
        self.node = node

    @property
    def node(self) -> Node:
        """The dataset."""
        return self._node

    @node.setter
    def node(self, node: Node) -> None:
        self._node = node
        self._of_worker = WorkerBatches(node, self._share, AutoShardPolicy.DATA)

    @property
    def once(self) -> OneShot | None:
        """The iterator, if the source is one that cannot start over."""
        return self.node.items if isinstance(self.node, Once) else None

    def cardinality(self) -> int:
        """Number of batches."""
        return self.node.cardinality()

    def spec(self) -> Any:
        """Nest of `TensorSpec` of the batches."""
        return self.node.spec()

    def stream(self, path: tuple[int, ...]) -> Any:
        """A pass over this worker's part of the batches."""
        # Workers compute an uneven batch together, for which each needs all of it.
        return self._of_worker.stream(path, checked, whole_if_uneven=True)


@final
class Elements:
    """Elements that belong to one replica each.

    Args:
        datasets: One dataset of which each step takes as many consecutive elements as there are
            replicas, or one per replica.
        num_replicas: Number of replicas of this worker.

    Raises:
        InvalidTypeError: if a dataset cannot be iterated over.
    """

    is_global = False

    def __init__(self, datasets: list[Any], num_replicas: int) -> None:
        what = "distribute_datasets_from_function: dataset_fn returned"
        found = [_without_prefetch(as_node(dataset, what)) for dataset in datasets]
        self._nodes = [node for node, _ in found]
        self.prefetch_depth = max(depth for _, depth in found)
        self._num_replicas = num_replicas

    @property
    def once(self) -> OneShot | None:
        """The iterator, if the source is one that cannot start over."""
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

    def cardinality(self) -> int:
        """Number of steps."""
        sizes = [node.cardinality() for node in self._nodes]
        for unusual in (UNKNOWN_CARDINALITY, INFINITE_CARDINALITY):
            if unusual in sizes:
                return unusual
        return max(sizes) if len(sizes) > 1 else -(-sizes[0] // self._num_replicas)

    def spec(self) -> Any:
        """Nest of `TensorSpec` of the elements."""
        return self._nodes[0].spec()

    def stream(self, path: tuple[int, ...]) -> Any:
        """A pass over the steps: lists with an element per replica."""
        streams = [node.stream(path) for node in self._nodes]
        return _ElementSteps(streams, self._num_replicas)


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
        """Skips steps."""
        if not self._shared:
            return max(stream.advance(count) for stream in self._streams)
        num_replicas = len(self._streams)
        return -(-self._streams[0].advance(count * num_replicas) // num_replicas)


def _on_host(leaf: Any) -> Any:
    # Copied: the source may use the array again.
    return np.array(leaf)


def _without_rows(element: Any) -> Any:
    def empty(array: Any) -> Any:
        if array.ndim == 0:
            raise InvalidValueError(
                "distribute_datasets_from_function: the dataset ended in the middle of a step and"
                " its elements are scalars, of which there is no empty version. Make their number a"
                " multiple of the number of replicas, or batch them."
            )
        return array[:0]

    return jax.tree.map(empty, element)


def as_node(dataset: Any, what: str) -> Node:
    """A dataset of this or another library, or any iterable."""
    return dataset.node if isinstance(dataset, Dataset) else foreign(dataset, what)


def _check_policy(node: Node, what: str) -> None:
    """Every worker takes its rows of every batch; other policies do not work yet."""
    policy = policy_of(node)
    if policy not in (AutoShardPolicy.AUTO, AutoShardPolicy.DATA):
        raise UnsupportedError(
            f"{what} a dataset with AutoShardPolicy.{policy.name}, which does not work across"
            " workers yet. Use AutoShardPolicy.DATA: every worker takes its rows of each batch."
        )


def _without_prefetch(node: Node) -> tuple[Node, int]:
    """The dataset without `prefetch` at its end, which the distributed dataset does itself."""
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
            f"{what} the dataset {dataset!r} which yields single examples, which would be cut along"
            " their own first dim. Call .batch(global_batch_size) first. If its elements are"
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
            f"{what} an array that is taken as [batch, row, ...], its dim 0"
            f" counting the batches, but one has shape"
            f" {next(leaf.shape for leaf in leaves if leaf.ndim < 2)}. Reshape it to"
            " (num_batches, global_batch_size, ...), or pass a list of batches."
        )
    lengths = {len(leaf) for leaf in leaves}
    if len(lengths) > 1:
        raise InvalidValueError(
            f"{what} arrays that hold different numbers of batches, {sorted(lengths)} (dim 0)."
        )
    return [jax.tree.map(lambda a, i=i: a[i], dataset) for i in range(lengths.pop())]


def checked(batch: Any, number: int, may_be_reused: bool) -> tuple[Any, int]:
    """A batch as a nest of arrays that can be split and go to devices, and its number of rows.

    Args:
        batch: Nest of arrays.
        number: Of the batch, for errors.
        may_be_reused: Whether its source may write to the arrays again; they are copied then.

    Raises:
        InvalidValueError: if the arrays have no rows to split or disagree in their number.
        InvalidTypeError: if the batch holds no arrays.
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
