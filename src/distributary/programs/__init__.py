"""Turns the jaxpr of a step into the program of all replicas."""

from distributary.programs._gathers import gathers, with_gathers
from distributary.programs._global import GlobalProgram, divisible
from distributary.programs._program import TracedProgram, constrained, spec_of_split
from distributary.programs._replica_program import FunctionProgram, ReplicaProgram, Results
from distributary.programs._row_wise import (
    adds_rows,
    bind_rows,
    known_result,
    number_of,
    row_operands,
    takes_rows,
    with_rows,
)
from distributary.programs._sparse_gradients import with_sparse_gradients
from distributary.programs._stages import (
    closed_part,
    cut_around_mesh,
    evaluate_jointly,
    flattened,
    is_in_first_stage,
    without_calls,
)
