"""A dataset per worker, a batch per replica."""

from distributary.inputs._contexts import InputContext, ValueContext
from distributary.inputs._distributed_dataset import (
    DistributedDataset,
    DistributedIterator,
    global_batches,
    per_replica_elements,
    split_batch,
)

__all__ = [
    "DistributedDataset",
    "DistributedIterator",
    "InputContext",
    "ValueContext",
    "global_batches",
    "per_replica_elements",
    "split_batch",
]
