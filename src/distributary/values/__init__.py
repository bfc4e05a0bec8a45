"""Values with a component per replica: immutable ones, variables, and their collectives."""

from distributary.values._aggregation import across_replicas, of_rows
from distributary.values._algorithms import all_gather, all_reduce_of_vectors, over_replicas
from distributary.values._conversion import initial_array
from distributary.values._cross_device_ops import (
    CollectiveAllReduce,
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
    check_pairs,
    default_cross_device_ops,
    reduce_nest,
)
from distributary.values._destinations import at_device, check_destinations, only_device
from distributary.values._distributed import (
    Array,
    ArrayInput,
    DistributedValues,
    Mirrored,
    PerReplica,
    component_arrays,
    same_structure,
    stack_components,
)
from distributary.values._distributed_variables import (
    AggregatedVariable,
    MirroredVariable,
    SyncOnReadVariable,
    VariableComponent,
)
from distributary.values._foreign import ForeignVariable, as_variable
from distributary.values._indexed_slices import IndexedSlices
from distributary.values._key_order import in_order, key_order
from distributary.values._layout import VariableLayout, colocated_with, neighbor
from distributary.values._operators import ArrayOperators
from distributary.values._reduce_op import as_reduce_op, check_reducible, reduce_arrays
from distributary.values._regroup import local_results, map_leaves
from distributary.values._sharded_variable import ShardedVariable, embedding_lookup
from distributary.values._state_list import StateList, joined
from distributary.values._variable import Variable
