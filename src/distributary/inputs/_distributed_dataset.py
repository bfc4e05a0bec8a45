"""Global batches in, one part per replica out."""

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, final

import jax
import numpy as np

from distributary.errors import (
    DistributaryWarning,
    InvalidTypeError,
    InvalidValueError,
    ReplicaMismatchError,
)
from distributary.tracing import current_scope, user_stacklevel
from distributary.values import PerReplica, same_structure, stack_components


class Placer(Protocol):
    """Puts the parts of a batch where the replicas are."""

    def place_rows(self, value: PerReplica) -> PerReplica: ...

    def place_components(self, values: Any) -> PerReplica: ...


@final
class DistributedDataset:
    """Batches for the replicas of a strategy; made by `experimental_distribute_dataset`.

    Iterating gives, per step, a nest like the batch with a `PerReplica` in the place of every
    array; with one replica the arrays themselves. Each `iter()` starts over if the source can.

    Attributes:
        num_steps: Number of batches if the source has a length, else None.

    Source: `tf.distribute.DistributedDataset`.
    """

    def __init__(
        self,
        steps: Callable[[], Iterator[list[Any]]],
        placer: Placer,
        wrap: bool,
        num_steps: int | None = None,
    ) -> None:
        self._steps = steps
        self._placer = placer
        self._wrap = wrap
        self.num_steps = num_steps

    def __iter__(self) -> "DistributedIterator":
        return DistributedIterator(self._steps(), self._placer, self._wrap)


@final
class DistributedIterator:
    """Iterator over a `DistributedDataset`.

    Source: `tf.distribute.DistributedIterator`.
    """

    def __init__(self, steps: Iterator[list[Any]], placer: Placer, wrap: bool) -> None:
        self._steps = steps
        self._placer = placer
        self._wrap = wrap

    def __iter__(self) -> "DistributedIterator":
        return self

    def __next__(self) -> Any:
        if current_scope() is not None:
            raise InvalidValueError(
                "A distributed dataset was iterated inside Strategy.run or distributary.function,"
                " where it would give one batch, once, while the code is traced. Iterate outside"
                " and pass the batches to run; a distributary.function may receive the dataset as"
                " an argument."
            )
        parts = next(self._steps)
        if not self._wrap:
            return parts[0]
        flat = [jax.tree.flatten(part) for part in parts]
        tree = flat[0][1]
        for i, (_, other) in enumerate(flat):
            if not same_structure(other, tree):
                raise ReplicaMismatchError(
                    f"The dataset gave replica {i} an element of structure {other}, and replica 0"
                    f" one of structure {tree}; all elements must have the same structure."
                )
        columns = zip(*(leaves for leaves, _ in flat), strict=True)
        return jax.tree.unflatten(tree, [self._distribute(list(column)) for column in columns])

    def get_next(self) -> Any:
        """The next step's values; raises `StopIteration` at the end, like `next`."""
        return next(self)

    def _distribute(self, parts: list[Any]) -> PerReplica:
        value = PerReplica(parts)
        stacked = stack_components(value)
        if stacked is None:
            return self._placer.place_components(value.values)
        return self._placer.place_rows(stacked)


def global_batches(dataset: Any, num_replicas: int) -> Callable[[], Iterator[list[Any]]]:
    """Steps of a dataset of global batches: each batch split over the replicas.

    Args:
        dataset: Re-iterable or generator of batches (nests of arrays that share the size of
            dim 0), or an array, or a dict of arrays, whose dim 0 counts the batches.
        num_replicas: Number of replicas.

    Returns:
        A function that starts over and yields, per batch, one part per replica: consecutive rows,
        sizes that differ by at most one, larger parts first.

    Raises:
        InvalidTypeError: if the dataset cannot be iterated.
    """
    batches = _iterable(dataset)

    started = False

    def steps() -> Iterator[list[Any]]:
        nonlocal started
        if started and iter(batches) is batches:
            warnings.warn(
                f"The distributed dataset {batches!r} is a generator or iterator and goes on where"
                " it was left, which may be its end. For several epochs distribute something that"
                " starts over, such as a list or an object with __iter__.",
                DistributaryWarning,
                stacklevel=user_stacklevel(),
            )
        started = True
        for number, batch in enumerate(batches):
            yield split_batch(batch, num_replicas, number)

    return steps


def split_batch(batch: Any, num_replicas: int, number: int) -> list[Any]:
    """The parts of one global batch, in replica order.

    Raises:
        InvalidValueError: if the arrays have no rows to split or disagree in their number.
        InvalidTypeError: if the batch holds no arrays.
    """
    leaves, tree = jax.tree.flatten(batch)
    if not leaves:
        raise InvalidTypeError(f"Batch {number} of the dataset is {batch!r} and holds no arrays.")
    arrays = [_array(leaf, number) for leaf in leaves]
    sizes = {array.shape[0] for array in arrays}
    if len(sizes) > 1:
        raise InvalidValueError(
            f"Batch {number} of the dataset holds arrays with {sorted(sizes)} rows; all arrays of a"
            " batch must have the same number of rows (dim 0), which is split over the replicas."
        )
    if num_replicas == 1:
        return [jax.tree.unflatten(tree, arrays)]
    small, larger = divmod(sizes.pop(), num_replicas)
    starts = [i * small + min(i, larger) for i in range(num_replicas + 1)]
    return [
        jax.tree.unflatten(tree, [array[a:b] for array in arrays])
        for a, b in itertools.pairwise(starts)
    ]


def _array(leaf: Any, number: int) -> Any:
    array = leaf if isinstance(leaf, (np.ndarray, jax.Array)) else np.asarray(leaf)
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


def _iterable(dataset: Any) -> Iterable[Any]:
    if isinstance(dataset, (DistributedDataset, DistributedIterator)):
        raise InvalidTypeError(
            "experimental_distribute_dataset: the dataset is distributed already. Iterate over it,"
            " or distribute the dataset it was made from."
        )
    if isinstance(dataset, tuple) and dataset and all(hasattr(x, "shape") for x in dataset):
        raise InvalidTypeError(
            "experimental_distribute_dataset: got a tuple of arrays with shapes"
            f" {[tuple(x.shape) for x in dataset]}. If it is one batch, pass a list with it, [(x,"
            " y)]; if each array is a batch, pass a list of them."
        )
    if isinstance(dataset, (np.ndarray, jax.Array, dict)):
        leaves = jax.tree.leaves(dataset)
        if not leaves or not all(hasattr(leaf, "shape") for leaf in leaves):
            kinds = sorted({type(leaf).__name__ for leaf in leaves})
            raise InvalidTypeError(
                "experimental_distribute_dataset: got a dict that holds"
                f" {', '.join(kinds) or 'nothing'}, expected arrays [batch, row, ...]. Pass a list"
                " for other iterables of batches."
            )
        if any(leaf.ndim < 2 for leaf in leaves):
            raise InvalidValueError(
                "experimental_distribute_dataset: an array is taken as [batch, row, ...], its dim 0"
                f" counting the batches, but one has shape"
                f" {next(leaf.shape for leaf in leaves if leaf.ndim < 2)}. Reshape it to"
                " (num_batches, global_batch_size, ...), or pass a list of batches."
            )
        lengths = {len(leaf) for leaf in leaves}
        if len(lengths) > 1:
            raise InvalidValueError(
                "experimental_distribute_dataset: the arrays hold different numbers of batches,"
                f" {sorted(lengths)} (dim 0)."
            )
        return [jax.tree.map(lambda a, i=i: a[i], dataset) for i in range(lengths.pop())]
    if not hasattr(dataset, "__iter__"):
        raise InvalidTypeError(
            f"experimental_distribute_dataset: got {dataset!r}, a {type(dataset).__name__}, which"
            " cannot be iterated. Pass an iterable of global batches."
        )
    return dataset


def per_replica_elements(
    datasets: list[Any], num_replicas: int
) -> Callable[[], Iterator[list[Any]]]:
    """Steps of datasets whose elements are already those of one replica.

    Args:
        datasets: One dataset of which each step takes `num_replicas` consecutive elements, or one
            per replica.
        num_replicas: Number of replicas.

    Returns:
        A function that starts over and yields one element per replica. When the elements end in
        the middle of a step, the remaining replicas receive arrays without rows.
    """
    for dataset in datasets:
        if not hasattr(dataset, "__iter__"):
            raise InvalidTypeError(
                f"distribute_datasets_from_function: dataset_fn returned {dataset!r}, a"
                f" {type(dataset).__name__}, which cannot be iterated. Return an iterable of"
                " per-replica batches."
            )

    def steps() -> Iterator[list[Any]]:
        iterators = [iter(dataset) for dataset in datasets]
        if len(iterators) == 1:
            iterators *= num_replicas
        while True:
            parts = []
            for iterator in iterators:
                element = next(iterator, _END)
                if element is not _END:
                    element = jax.tree.map(np.asarray, element)
                parts.append(element)
            present = [part for part in parts if part is not _END]
            if not present:
                return
            yield [_without_rows(present[0]) if part is _END else part for part in parts]

    return steps


_END: Any = object()


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
