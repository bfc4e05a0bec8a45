"""Arguments that tell input functions about the replicas that they feed."""

from dataclasses import dataclass
from typing import final

from distributary.errors import InvalidValueError, checked_int


class DistributedInput:
    """Base class of distributed datasets and their iterators."""


@final
@dataclass(frozen=True, eq=False, repr=False)
class ValueContext:
    """Argument of the `value_fn` of `experimental_distribute_values_from_function`.

    Args:
        replica_id_in_sync_group: Number of the replica that the value is for, 0 to
            `num_replicas_in_sync - 1`.
        num_replicas_in_sync: Number of replicas in all processes.

    Source: `tf.distribute.experimental.ValueContext`.
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1

    def __repr__(self) -> str:
        return (
            f"distributary.ValueContext(replica id {self.replica_id_in_sync_group}, total replicas"
            f" in sync: {self.num_replicas_in_sync})"
        )


@final
@dataclass(frozen=True, eq=False, repr=False)
class InputContext:
    """Argument of the `dataset_fn` of `distribute_datasets_from_function`.

    Args:
        num_input_pipelines: Number of times `dataset_fn` is called in the whole job.
        input_pipeline_id: Number of this call.
        num_replicas_in_sync: Number of replicas in the whole job.

    Source: `tf.distribute.InputContext`.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Returns the batch size of one replica.

        Raises:
            InvalidTypeError: if `global_batch_size` is not an int.
            InvalidValueError: if it is not divisible by the number of replicas.
        """
        size = checked_int("get_per_replica_batch_size: global_batch_size", global_batch_size)
        num_replicas = self.num_replicas_in_sync
        if size % num_replicas:
            raise InvalidValueError(
                f"get_per_replica_batch_size: the global batch size {size} is not"
                f" divisible by the {num_replicas} replicas. Choose a multiple of {num_replicas},"
                f" such as {max(1, size // num_replicas) * num_replicas}."
            )
        return size // num_replicas

    def __repr__(self) -> str:
        return (
            f"distributary.InputContext(input pipeline id {self.input_pipeline_id}, total:"
            f" {self.num_input_pipelines}, replicas: {self.num_replicas_in_sync})"
        )
