"""A dataset per worker, a batch per replica."""

from distributary.inputs._contexts import InputContext, ValueContext
from distributary.inputs._distributed_dataset import (
    DistributedDataset,
    DistributedIterator,
    PerReplicaSpec,
)
from distributary.inputs._sources import Batches, Elements, checked
from distributary.inputs._statistics import InputStatistics, StepStatistics

__all__ = [
    "Batches",
    "DistributedDataset",
    "DistributedIterator",
    "Elements",
    "InputContext",
    "InputStatistics",
    "PerReplicaSpec",
    "StepStatistics",
    "ValueContext",
    "checked",
]
