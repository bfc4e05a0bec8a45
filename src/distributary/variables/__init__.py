"""Variables: mirrored, sync-on-read and sharded state that can be assigned."""

from distributary.variables._aggregation import across_replicas, of_rows
from distributary.variables._conversion import initial_array
from distributary.variables._distributed_variables import (
    AggregatedVariable,
    MirroredVariable,
    SyncOnReadVariable,
    VariableComponent,
)
from distributary.variables._foreign import ForeignVariable, as_variable
from distributary.variables._layout import VariableLayout, colocated_with, neighbor
from distributary.variables._sharded_variable import ShardedVariable, embedding_lookup
from distributary.variables._state_list import StateList, joined
from distributary.variables._variable import Variable
