"""Compiler passes that turn steps with variables, tapes and collectives into pure programs.

    @dist.function                     { lambda ; w:f32[2] x:f32[2]. let
    def step(x):                           a:f32[2] = add w x
        w.assign_add(x)         ->         b:f32[2] = mul a 2.0
        return w * 2                     in (b, a) }

The variable has become an input and an output. `docs/design/tracing.md` follows a step through the
passes in order; each module opens with an example of what it does.
"""

from jax.extend.core import Jaxpr

from distributary.tracing._control_flow import CONTROL_FLOW, evaluate_control_flow
from distributary.tracing._description import describe_value
from distributary.tracing._divergence import (
    OUTSIDE,
    is_collective,
    is_of_devices,
    is_sum_of_replicas,
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
    next_of,
    refuse_in_trace,
)
from distributary.tracing._global import GlobalProgram
from distributary.tracing._jaxprs import (
    AnyJaxpr,
    Array,
    Atom,
    Equation,
    aval_of,
    call_of,
    evaluate_all,
    evaluate_one,
    has_replicas,
    interpret_with,
    jaxpr_of,
    leading_to,
    open_jaxpr,
    opened,
    parts_of_scan,
    parts_of_while,
    plain_call_of,
    shape_of,
    sub_jaxprs,
    user_frame,
    value_of,
    variables_of,
    walk,
    with_jaxprs,
    with_pass,
)
from distributary.tracing._joint import evaluate_jointly
from distributary.tracing._logical_devices import constrained, spec_of_split
from distributary.tracing._markers import Handle, push, start_p
from distributary.tracing._mistakes import (
    Subject,
    advise,
    explained,
    leaked_at,
    name_of,
    shorten,
)
from distributary.tracing._narrowing import narrowed, native
from distributary.tracing._numbering import Numbering
from distributary.tracing._one_device import OneDeviceProgram, replica_dim
from distributary.tracing._program import (
    FunctionProgram,
    ReplicaProgram,
    Results,
    purify,
    trace,
)
from distributary.tracing._scope import (
    TapeRecord,
    TraceScope,
    check_not_frozen,
    current_scope,
    in_role,
    outside_of_trace,
    script_line,
    user_stacklevel,
)
from distributary.tracing._stages import (
    cut,
    cut_around_mesh,
    is_in_first_stage,
    without_calls,
)

__all__ = [
    "CONTROL_FLOW",
    "OUTSIDE",
    "AnyJaxpr",
    "Array",
    "Atom",
    "EagerRecord",
    "Equation",
    "Feeds",
    "FunctionProgram",
    "GlobalProgram",
    "Handle",
    "Jaxpr",
    "LeaveTrace",
    "Numbering",
    "OneDeviceProgram",
    "Origin",
    "ReplicaProgram",
    "Results",
    "Subject",
    "TapeRecord",
    "TraceScope",
    "advise",
    "at_end",
    "aval_of",
    "call_of",
    "check_not_frozen",
    "constrained",
    "current_feeding",
    "current_scope",
    "cut",
    "cut_around_mesh",
    "describe_value",
    "evaluate_all",
    "evaluate_control_flow",
    "evaluate_jointly",
    "evaluate_one",
    "explained",
    "fed_by",
    "has_replicas",
    "in_role",
    "interpret_with",
    "is_collective",
    "is_in_first_stage",
    "is_of_devices",
    "is_recording",
    "is_sum_of_replicas",
    "iterator_of",
    "jaxpr_of",
    "leading_to",
    "leaked_at",
    "name_of",
    "narrowed",
    "native",
    "next_of",
    "noted_read",
    "noted_rows",
    "open_jaxpr",
    "opened",
    "outside_of_trace",
    "parts_of_scan",
    "parts_of_while",
    "plain_call_of",
    "purify",
    "push",
    "refuse_in_trace",
    "replica_dim",
    "script_line",
    "shape_of",
    "shorten",
    "spec_of_split",
    "start_p",
    "sub_jaxprs",
    "trace",
    "user_frame",
    "user_stacklevel",
    "value_of",
    "variables_of",
    "walk",
    "with_jaxprs",
    "with_pass",
    "without_calls",
]
