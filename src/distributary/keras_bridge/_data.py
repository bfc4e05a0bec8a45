"""Data of `fit`, `evaluate` and `predict`: distributed datasets, and arrays in memory."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from keras.src.trainers.data_adapters import array_slicing
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.data_adapter_utils import class_weight_to_sample_weights

from distributary.context import get_strategy
from distributary.datasets import INFINITE_CARDINALITY, Dataset, WorkerShare, is_hugging_face
from distributary.errors import InvalidValueError
from distributary.inputs import Batches, DistributedDataset
from distributary.options import InputOptions


def get_data_adapter(original: Callable[..., Any]) -> Callable[..., Any]:
    """Accepts datasets of ours, of Hugging Face, and what `Strategy` distributed."""

    def get_data_adapter(x: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(x, Dataset) or is_hugging_face(x):
            strategy = get_strategy()
            alone = WorkerShare()
            x = DistributedDataset(
                Batches(x, alone, "fit, evaluate or predict: x is"),
                None,
                alone,
                InputOptions().experimental_per_replica_buffer_size,
                strategy.extended.input_statistics,
            )
        if not isinstance(x, DistributedDataset):
            return original(x, *args, **kwargs)
        for name, value in zip(("y", "sample_weight"), args, strict=False):
            kwargs[name] = value
        for name in ("y", "sample_weight"):
            if kwargs.get(name) is not None:
                raise InvalidValueError(
                    f"x is a dataset, so {name} cannot be given next to it: let the dataset yield"
                    " (x, y) or (x, y, sample_weight)."
                )
        if x.cardinality == INFINITE_CARDINALITY and not kwargs.get("steps_per_epoch"):
            raise InvalidValueError(
                "The dataset is infinite, so an epoch would never end. Give steps_per_epoch to fit,"
                " steps to evaluate and predict, or a count to repeat."
            )
        return DatasetAdapter(x, kwargs.get("class_weight"))

    return get_data_adapter


def interrupted_warning(original: Callable[..., Any]) -> Callable[..., Any]:
    """The end of a dataset whose length nobody knew before is no interruption."""

    def _interrupted_warning(self: Any) -> None:
        if not isinstance(self.data_adapter, DatasetAdapter) or self.steps_per_epoch:
            original(self)

    return _interrupted_warning


@final
class DatasetAdapter(DataAdapter):
    """Yields the global batches of a distributed dataset, which steps split in the same way."""

    def __init__(self, dataset: DistributedDataset, class_weight: Any) -> None:
        self._dataset = dataset
        self._class_weight = class_weight

    def get_numpy_iterator(self) -> Iterator[Any]:
        """Global batches as NumPy arrays."""
        return (jax.tree.map(np.asarray, batch) for batch in self.get_jax_iterator())

    def get_jax_iterator(self) -> Iterator[Any]:
        """Global batches, on the host unless the dataset has them elsewhere."""
        batches = self._dataset.global_batches()
        return batches if self._class_weight is None else map(self._weighted, batches)

    def _weighted(self, batch: Any) -> Any:
        if not isinstance(batch, tuple) or len(batch) != 2:
            raise InvalidValueError(
                "class_weight needs a dataset that yields (x, y); of (x, y, sample_weight) give the"
                " weights of the classes with the others."
            )
        x, y = batch
        return x, y, class_weight_to_sample_weights(y, self._class_weight)

    @property
    def num_batches(self) -> int | None:
        """Number of steps, if it is known."""
        count = self._dataset.cardinality
        return count if count >= 0 else None

    @property
    def batch_size(self) -> int | None:
        """Unknown, and may differ between batches."""
        return None

    @property
    def has_partial_batch(self) -> bool | None:
        """Unknown."""
        return None

    @property
    def partial_batch_size(self) -> int | None:
        """Unknown."""
        return None


def batches_of(adapter: Any) -> Iterator[Any]:
    """The batches of an epoch, on the host."""
    if type(adapter) is ArrayDataAdapter and adapter._shuffle != "batch":
        sliceables = array_slicing.convert_to_sliceable(adapter._inputs, target_backend="jax")
        leaves, tree = jax.tree.flatten(sliceables)
        if leaves and all(type(leaf) is array_slicing.NumpySliceable for leaf in leaves):
            arrays = [leaf.array for leaf in leaves]
            return ArrayBatches(arrays, tree, adapter.batch_size, bool(adapter._shuffle))
    iterator: Iterator[Any] = iter(adapter.get_jax_iterator())
    return iterator


@final
class ArrayBatches:
    """Batches of NumPy arrays, in the order in which Keras' own adapter yields them.

    Args:
        arrays: Arrays `[row, ...]` with the same number of rows.
        tree: Structure of a batch.
        batch_size: Rows per batch; the last one has what is left.
        shuffle: Whether the rows come in random order, drawn from NumPy's global generator.
    """

    def __init__(self, arrays: list[Any], tree: Any, batch_size: int, shuffle: bool) -> None:
        self._arrays = arrays
        self._tree = tree
        self._batch_size = batch_size
        self._num_rows = len(arrays[0])
        self._shuffle = shuffle
        self._order: Any = None
        self._start = 0

    def __iter__(self) -> "ArrayBatches":
        return self

    def __next__(self) -> Any:
        if self._start >= self._num_rows:
            raise StopIteration
        return jax.tree.unflatten(self._tree, self._rows(self._batch_size))

    def take(self, count: int) -> tuple[Any, int]:
        """Up to `count` full batches as one nest `[batch, row, ...]`, and how many they are."""
        size = self._batch_size
        count = min(count, (self._num_rows - self._start) // size)
        if count < 1:
            return None, 0
        rows = self._rows(count * size)
        stacked = [part.reshape(count, size, *part.shape[1:]) for part in rows]
        return jax.tree.unflatten(self._tree, stacked), count

    def _rows(self, count: int) -> list[Any]:
        if self._shuffle and self._order is None:
            # Not before it is needed: Keras makes iterators that it does not use.
            self._order = np.random.permutation(self._num_rows)
        part = slice(self._start, self._start + count)
        self._start += count
        if self._order is None:
            return [array[part] for array in self._arrays]
        order = self._order[part]
        return [array.take(order, axis=0) for array in self._arrays]


def take(iterator: Any, count: int) -> Iterator[tuple[Any, int]]:
    """Up to `count` batches, stacked where their shapes are equal, with their numbers."""
    if isinstance(iterator, ArrayBatches):
        stacked, taken = iterator.take(count)
        if taken:
            yield stacked, taken
        if taken == count:
            return
        count -= taken
    batches = list(itertools.islice(iterator, count))
    for run in _runs_of_equal_shape(batches):
        yield jax.tree.map(_stack, *run), len(run)


def _runs_of_equal_shape(batches: list[Any]) -> Iterator[list[Any]]:
    run: list[Any] = []
    shapes = None
    for batch in batches:
        leaves, tree = jax.tree.flatten(batch)
        own = tree, [(np.shape(leaf), leaf.dtype) for leaf in leaves]
        if run and own != shapes:
            yield run
            run = []
        run.append(batch)
        shapes = own
    if run:
        yield run


def _stack(*leaves: Any) -> Any:
    if all(isinstance(leaf, np.ndarray) for leaf in leaves):
        return np.stack(leaves)
    return jnp.stack(leaves)
