"""All-reduce and all-gather over the replicas, as functions of values."""

from distributary.collectives._algorithms import all_gather, all_reduce_of_vectors, over_replicas
from distributary.collectives._cross_device_ops import (
    CollectiveAllReduce,
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
    default_cross_device_ops,
    reduce_nest,
)
from distributary.collectives._destinations import at_device, check_destinations, only_device
from distributary.collectives._reduce_op import as_reduce_op, check_reducible, reduce_arrays
