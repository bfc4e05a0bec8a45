"""Values with a component per replica: immutable ones, variables, and their collectives."""

from distributary.variables._assignable import TracedInitialValueError, computed, initial_array
from distributary.variables._cross_device_ops import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
    at_device,
    check_destinations,
    check_pairs,
    default_cross_device_ops,
    only_device,
    reduce_nest,
)
from distributary.variables._kinds import (
    AggregatedVariable,
    ForeignVariable,
    MirroredVariable,
    ShardedVariable,
    SyncOnReadVariable,
    VariableComponent,
    across_replicas,
    as_variable,
    assign,
    embedding_lookup,
    of_rows,
    values,
)
from distributary.variables._layout import (
    StateList,
    VariableLayout,
    colocated_with,
    joined,
    neighbor,
)
from distributary.variables._reductions import (
    all_gather,
    all_reduce_of_vectors,
    as_reduce_op,
    check_reducible,
    over_replicas,
)
from distributary.variables._values import (
    Array,
    ArrayInput,
    DistributedValues,
    IndexedSlices,
    Mirrored,
    PerReplica,
    component_arrays,
    component_of_traced,
    flat_parts,
    in_order,
    key_order,
    local_results,
    map_leaves,
    stack_components,
)
from distributary.variables._variable import Variable
