"""Distributed datasets: one dataset per worker, one part of each batch per replica."""

from distributary.inputs._contexts import DistributedInput, InputContext, ValueContext
from distributary.inputs._coworkers import Coworkers, spec_of
from distributary.inputs._distributed_dataset import (
    DistributedDataset,
    DistributedIterator,
    PerReplicaSpec,
)
from distributary.inputs._statistics import Loop, StepCounts, StepStatistics
from distributary.inputs._step_data import Batches, Elements, checked
