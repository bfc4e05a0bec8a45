"""One path for every step: from a function over a traced program to an executable."""

from distributary.engine._arguments import (
    is_dynamic,
    placed_struct_of,
    signature_of,
    split_result,
    struct_of,
)
from distributary.engine._cache import ProgramCache
from distributary.engine._engine import Engine, Programs
from distributary.engine._function import Function, function
from distributary.engine._global_batch import GlobalBatch, global_batch
from distributary.engine._placement import Placement
from distributary.engine._several_steps import several_steps
from distributary.engine._step import RUN, RUNS, UPDATE, StepKind, mode_of

__all__ = [
    "RUN",
    "RUNS",
    "UPDATE",
    "Engine",
    "Function",
    "GlobalBatch",
    "Placement",
    "ProgramCache",
    "Programs",
    "StepKind",
    "function",
    "global_batch",
    "is_dynamic",
    "mode_of",
    "placed_struct_of",
    "several_steps",
    "signature_of",
    "split_result",
    "struct_of",
]
