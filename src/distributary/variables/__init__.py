"""Variables: mirrored, sync-on-read and sharded state that can be assigned."""

from typing import TYPE_CHECKING

from distributary._late import late_names
from distributary.variables._aggregation import across_replicas
from distributary.variables._conversion import initial_array
from distributary.variables._distributed_variables import (
    AggregatedVariable,
    MirroredVariable,
    SyncOnReadVariable,
    VariableComponent,
)
from distributary.variables._enums import VariableAggregation, VariableSynchronization
from distributary.variables._foreign import (
    ForeignVariable,
    as_variable,
    foreign_parts,
    register_foreign_objects,
    register_foreign_variables,
)
from distributary.variables._layout import VariableLayout, colocated_with, neighbor
from distributary.variables._sharded_variable import ShardedVariable, embedding_lookup
from distributary.variables._state_list import StateList, joined
from distributary.variables._variable import Variable

if TYPE_CHECKING:
    from distributary.variables._saving import (
        Keeper,
        KeptCopy,
        SavedVariable,
        is_per_replica,
        keeper_of,
        put_back,
        stored_arrays,
    )

__all__ = [
    "AggregatedVariable",
    "ForeignVariable",
    "Keeper",
    "KeptCopy",
    "MirroredVariable",
    "SavedVariable",
    "ShardedVariable",
    "StateList",
    "SyncOnReadVariable",
    "Variable",
    "VariableAggregation",
    "VariableComponent",
    "VariableLayout",
    "VariableSynchronization",
    "across_replicas",
    "as_variable",
    "colocated_with",
    "embedding_lookup",
    "foreign_parts",
    "initial_array",
    "is_per_replica",
    "joined",
    "keeper_of",
    "neighbor",
    "put_back",
    "register_foreign_objects",
    "register_foreign_variables",
    "stored_arrays",
]

__getattr__ = late_names(
    __name__,
    {
        "Keeper": "_saving",
        "KeptCopy": "_saving",
        "SavedVariable": "_saving",
        "is_per_replica": "_saving",
        "keeper_of": "_saving",
        "put_back": "_saving",
        "stored_arrays": "_saving",
    },
)
