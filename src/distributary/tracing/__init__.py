"""Compiler passes that turn steps with variables, tapes and collectives into pure programs.

    @dist.function                     { lambda ; w:f32[2] x:f32[2]. let
    def step(x):                           a:f32[2] = add w x
        w.assign_add(x)         ->         b:f32[2] = mul a 2.0
        return w * 2                     in (b, a) }

The variable has become an input and an output. `docs/design/tracing.md` follows a step through the
passes in order; each module opens with an example of what it does.
"""

from distributary.tracing._description import Line, describe_jaxpr, describe_value
from distributary.tracing._divergence import (
    Numbering,
    has_collective,
    is_collective,
    is_of_devices,
    is_sum_of_replicas,
    refuse_collectives,
    varying_outputs,
    varying_variables,
)
from distributary.tracing._eager import EagerRecord, is_recording, noted_read, noted_rows
from distributary.tracing._feeds import (
    Feeds,
    LeaveTrace,
    Origin,
    at_end,
    current_feeding,
    fed_by,
    iterator_of,
    leave_trace,
    next_of,
    refuse_in_trace,
)
from distributary.tracing._markers import (
    Handle,
    gather_p,
    gathered,
    push,
    scatter_p,
    start_of_sum,
    start_p,
)
from distributary.tracing._mistakes import Subject, advise, explained, leaked_at, name_of, shorten
from distributary.tracing._narrowing import narrowed, native
from distributary.tracing._recording import Pure, trace
from distributary.tracing._scope import (
    SizesMissing,
    TapeRecord,
    TraceScope,
    UnevenSizes,
    check_not_frozen,
    current_scope,
    drops_assignments,
    in_role,
    infers_shapes,
    outside_of_trace,
    script_line,
)
