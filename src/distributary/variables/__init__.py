"""State with an update rule: mirrored and sync-on-read variables."""

from distributary.variables._enums import VariableAggregation, VariableSynchronization
from distributary.variables._layout import VariableLayout
from distributary.variables._variable import (
    MirroredVariable,
    SyncOnReadVariable,
    Variable,
    VariableComponent,
)

__all__ = [
    "MirroredVariable",
    "SyncOnReadVariable",
    "Variable",
    "VariableAggregation",
    "VariableComponent",
    "VariableLayout",
    "VariableSynchronization",
]
