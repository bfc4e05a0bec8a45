"""One path for every step: from a function over a traced program to an executable."""

from distributary.engine._cache import (
    ProgramCache,
    is_dynamic,
    placed_struct_of,
    signature_of,
    split_result,
    struct_of,
)
from distributary.engine._collectives import (
    Collective,
    Instruction,
    Program,
    called_by,
    counted,
    format_bytes,
    names_in,
    short_groups,
    total_bytes,
)
from distributary.engine._engine import Engine, Programs
from distributary.engine._function import Function, function
from distributary.engine._placement import Placement
from distributary.engine._step import (
    RUN,
    RUNS,
    UPDATE,
    StepKind,
    global_batch,
    mode_of,
    several_steps,
)
