"""Distributed datasets: one dataset per worker, one part of each batch per replica."""

from typing import TYPE_CHECKING

from distributary._late import late_names
from distributary.inputs._contexts import DistributedInput, InputContext, ValueContext
from distributary.inputs._statistics import Loop, StepCounts, StepStatistics

if TYPE_CHECKING:
    from distributary.inputs._coworkers import Coworkers, spec_of
    from distributary.inputs._distributed_dataset import (
        DistributedDataset,
        DistributedIterator,
        PerReplicaSpec,
    )
    from distributary.inputs._step_data import Batches, Elements, checked

__all__ = [
    "Batches",
    "Coworkers",
    "DistributedDataset",
    "DistributedInput",
    "DistributedIterator",
    "Elements",
    "InputContext",
    "Loop",
    "PerReplicaSpec",
    "StepCounts",
    "StepStatistics",
    "ValueContext",
    "checked",
    "spec_of",
]

# Imported on first use: many programs never distribute a dataset, and importing takes a while.
if not TYPE_CHECKING:  # or type checkers accept any name
    __getattr__ = late_names(
        __name__,
        {
            "Batches": "_step_data",
            "Coworkers": "_coworkers",
            "DistributedDataset": "_distributed_dataset",
            "DistributedIterator": "_distributed_dataset",
            "Elements": "_step_data",
            "PerReplicaSpec": "_distributed_dataset",
            "checked": "_step_data",
            "spec_of": "_coworkers",
        },
    )
