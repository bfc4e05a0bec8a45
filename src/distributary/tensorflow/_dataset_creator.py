"""`tf.keras.utils.experimental.DatasetCreator`, with which one `fit` serves every strategy."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from distributary.context import get_strategy
from distributary.data import DistributedInput
from distributary.errors import check_type
from distributary.options import InputOptions


@final
@dataclass(frozen=True)
class DatasetCreator(DistributedInput):
    """A function that makes the dataset of each worker, for `fit` and `evaluate`.

    Args:
        dataset_fn: Function from an `InputContext` to a dataset of per-replica batches.
        input_options: Options for distributing the dataset.

    Source: `tf.keras.utils.experimental.DatasetCreator`.
    """

    dataset_fn: Callable[..., Any]
    input_options: InputOptions | None = None

    def __post_init__(self) -> None:
        expected = "a function from an InputContext to a dataset"
        check_type("DatasetCreator: dataset_fn", self.dataset_fn, Callable, expected)

    def __call__(self) -> Any:
        """Distributes the dataset with the current strategy, in whose scope `fit` calls this."""
        strategy = get_strategy()
        dataset = strategy.distribute_datasets_from_function(self.dataset_fn, self.input_options)
        remote = strategy.extended.remote_steps
        return dataset if remote is None else remote.per_worker_dataset(strategy, dataset)
