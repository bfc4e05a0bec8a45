"""Arguments that tell input functions about the replicas that they feed."""

from typing import final

import numpy as np

from distributary.errors import InvalidTypeError, InvalidValueError


class DistributedInput:
    """Base class of distributed datasets and their iterators."""


@final
class ValueContext:
    """Argument of the `value_fn` of `experimental_distribute_values_from_function`.

    Args:
        replica_id_in_sync_group: Number of the replica that the value is for.
        num_replicas_in_sync: Number of replicas.

    Source: `tf.distribute.experimental.ValueContext`.
    """

    def __init__(self, replica_id_in_sync_group: int = 0, num_replicas_in_sync: int = 1) -> None:
        self._replica_id = replica_id_in_sync_group
        self._num_replicas = num_replicas_in_sync

    @property
    def replica_id_in_sync_group(self) -> int:
        """Number of the replica, 0 to `num_replicas_in_sync - 1`."""
        return self._replica_id

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas in all processes."""
        return self._num_replicas

    def __repr__(self) -> str:
        return (
            f"distributary.ValueContext(replica id {self._replica_id}, total replicas in sync:"
            f" {self._num_replicas})"
        )


@final
class InputContext:
    """Argument of the `dataset_fn` of `distribute_datasets_from_function`.

    Args:
        num_input_pipelines: Number of times `dataset_fn` is called in the whole job.
        input_pipeline_id: Number of this call.
        num_replicas_in_sync: Number of replicas in the whole job.

    Source: `tf.distribute.InputContext`.
    """

    def __init__(
        self,
        num_input_pipelines: int = 1,
        input_pipeline_id: int = 0,
        num_replicas_in_sync: int = 1,
    ) -> None:
        self._num_input_pipelines = num_input_pipelines
        self._input_pipeline_id = input_pipeline_id
        self._num_replicas = num_replicas_in_sync

    @property
    def num_input_pipelines(self) -> int:
        """Number of input pipelines in the job."""
        return self._num_input_pipelines

    @property
    def input_pipeline_id(self) -> int:
        """Number of this input pipeline."""
        return self._input_pipeline_id

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas in the job."""
        return self._num_replicas

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Returns the batch size of one replica.

        Raises:
            InvalidTypeError: if `global_batch_size` is not an int.
            InvalidValueError: if it is not divisible by the number of replicas.
        """
        is_int = isinstance(global_batch_size, (int, np.integer))
        if not is_int or isinstance(global_batch_size, bool):
            raise InvalidTypeError(
                f"get_per_replica_batch_size: global_batch_size is {global_batch_size!r}, expected"
                " an int."
            )
        if global_batch_size % self._num_replicas:
            raise InvalidValueError(
                f"get_per_replica_batch_size: the global batch size {global_batch_size} is not"
                f" divisible by the {self._num_replicas} replicas. Choose a multiple of"
                f" {self._num_replicas}, such as"
                f" {max(1, global_batch_size // self._num_replicas) * self._num_replicas}."
            )
        return int(global_batch_size) // self._num_replicas

    def __repr__(self) -> str:
        return (
            f"distributary.InputContext(input pipeline id {self._input_pipeline_id}, total:"
            f" {self._num_input_pipelines}, replicas: {self._num_replicas})"
        )
