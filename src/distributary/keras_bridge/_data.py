"""Distributed datasets as data of `fit`, `evaluate` and `predict`."""

from collections.abc import Callable, Iterator
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from keras.src.trainers.data_adapters.data_adapter import DataAdapter

from distributary.errors import InvalidValueError
from distributary.inputs import DistributedDataset
from distributary.values import PerReplica


def get_data_adapter(original: Callable[..., Any]) -> Callable[..., Any]:
    """Accepts what `Strategy.experimental_distribute_dataset` returns."""

    def get_data_adapter(x: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(x, DistributedDataset):
            return original(x, *args, **kwargs)
        for name, value in zip(("y", "sample_weight"), args, strict=False):
            kwargs[name] = value
        for name in ("y", "sample_weight", "class_weight"):
            if kwargs.get(name) is not None:
                raise InvalidValueError(
                    f"x is a distributed dataset, so {name} cannot be given next to it: let the"
                    " dataset yield (x, y) or (x, y, sample_weight)."
                )
        return DistributedDatasetAdapter(x)

    return get_data_adapter


@final
class DistributedDatasetAdapter(DataAdapter):
    """Yields the global batches of a distributed dataset, which steps split in the same way."""

    def __init__(self, dataset: DistributedDataset) -> None:
        self._dataset = dataset

    def get_numpy_iterator(self) -> Iterator[Any]:
        """Global batches as NumPy arrays."""
        for batch in self.get_jax_iterator():
            yield jax.tree.map(np.asarray, batch)

    def get_jax_iterator(self) -> Iterator[Any]:
        """Global batches, their rows on the devices of the replicas."""
        for batch in self._dataset:
            yield jax.tree.map(_joined, batch, is_leaf=lambda x: isinstance(x, PerReplica))

    @property
    def num_batches(self) -> int | None:
        """Number of steps, if the source of the dataset has a length."""
        return self._dataset.num_steps

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


def _joined(leaf: Any) -> Any:
    if not isinstance(leaf, PerReplica):
        return leaf
    if leaf.form == "stacked":
        rows = leaf.payload
        return jnp.reshape(rows, (rows.shape[0] * rows.shape[1], *rows.shape[2:]))
    return np.concatenate([np.asarray(part) for part in leaf.values])
