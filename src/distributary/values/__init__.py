"""Immutable values with a component per replica."""

from distributary.values._distributed import (
    DistributedValues,
    Mirrored,
    PerReplica,
    component_arrays,
    same_structure,
    stack_components,
)
from distributary.values._indexed_slices import IndexedSlices
from distributary.values._operators import ArrayOperators
from distributary.values._regroup import (
    is_distributed,
    local_results,
    map_leaves,
    unwrap_mirrored,
)

__all__ = [
    "ArrayOperators",
    "DistributedValues",
    "IndexedSlices",
    "Mirrored",
    "PerReplica",
    "component_arrays",
    "is_distributed",
    "local_results",
    "map_leaves",
    "same_structure",
    "stack_components",
    "unwrap_mirrored",
]
