"""The data of `fit`, `evaluate` and `predict` that workers read themselves."""

from collections.abc import Iterator
from typing import Any, final

import jax

from distributary.errors import InvalidValueError
from distributary.keras_bridge import UnknownSizes, check_given
from distributary.variables import PerReplica, map_leaves


@final
class WorkerBatches(Iterator[Any]):
    """A stand-in for batches that the workers read themselves.

    Args:
        of_workers: The iterators of the workers.

    An iterator over it yields the shapes and dtypes of the first worker's next batch.
    """

    def __init__(self, of_workers: Any) -> None:
        self.of_workers = of_workers

    def __next__(self) -> Any:
        return map_leaves(_spec_of_whole, self.of_workers.element_spec)


@final
class PerWorkerAdapter(UnknownSizes):
    """An adapter for a per-worker dataset; all passes continue with the same iterators.

    Args:
        dataset: Dataset from `ClusterCoordinator.create_per_worker_dataset`.
        arguments: Other arguments of `fit`, `evaluate` or `predict`.

    Raises:
        InvalidValueError: without `steps_per_epoch`, or with arguments that are only for arrays.
    """

    def __init__(self, dataset: Any, arguments: dict[str, Any]) -> None:
        if not arguments.get("steps_per_epoch"):
            raise InvalidValueError(
                "x is a per-worker dataset, whose end nobody knows: give steps_per_epoch to fit,"
                " steps to evaluate and predict."
            )
        check_given("per-worker dataset", arguments, "y", "sample_weight", "class_weight")
        self._batches = WorkerBatches(iter(dataset))

    def get_jax_iterator(self) -> Iterator[Any]:
        """Returns the `WorkerBatches`."""
        return self._batches


def _spec_of_whole(leaf: Any) -> Any:
    if not isinstance(leaf, PerReplica):
        return leaf
    first = leaf.values[0]
    size = sum(value.shape[0] for value in leaf.values)
    return jax.ShapeDtypeStruct((size, *first.shape[1:]), first.dtype)
