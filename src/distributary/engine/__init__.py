"""One path for every step: from a function over a traced program to an executable."""

from distributary.engine._cache import ProgramCache
from distributary.engine._compiled import (
    is_dynamic,
    placed_struct_of,
    replica_shardings,
    signature_of,
    split_result,
    struct_of,
)
from distributary.engine._function import Function, function
from distributary.engine._runner import ReplicaRunner
from distributary.engine._staged import Place, Staged

__all__ = [
    "Function",
    "Place",
    "ProgramCache",
    "ReplicaRunner",
    "Staged",
    "function",
    "is_dynamic",
    "placed_struct_of",
    "replica_shardings",
    "signature_of",
    "split_result",
    "struct_of",
]
