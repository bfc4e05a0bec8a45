"""Immutable values with a component per replica."""

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
from distributary.values._indexed_slices import IndexedSlices
from distributary.values._key_order import in_order, key_order
from distributary.values._operators import ArrayOperators
from distributary.values._regroup import local_results, map_leaves
