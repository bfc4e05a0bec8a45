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

# Imported on first use: many programs never distribute a dataset, and importing takes a while.
if not TYPE_CHECKING:  # or type checkers accept any name
    __getattr__ = late_names(
        __name__,
        {
            "_coworkers": "Coworkers spec_of",
            "_distributed_dataset": "DistributedDataset DistributedIterator PerReplicaSpec",
            "_step_data": "Batches Elements checked",
        },
    )
