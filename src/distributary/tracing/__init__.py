"""Compiler passes that turn steps with variables, tapes and collectives into pure programs.

    @dist.function                     { lambda ; w:f32[2] x:f32[2]. let
    def step(x):                           a:f32[2] = add w x
        w.assign_add(x)         ->         b:f32[2] = mul a 2.0
        return w * 2                     in (b, a) }

The variable has become an input and an output. `docs/design/tracing.md` follows a step through the
passes in order; each module opens with an example of what it does.
"""

from typing import TYPE_CHECKING

from distributary._late import late_names
from distributary.tracing._consumed import refused_if_consumed
from distributary.tracing._cpu_rewrites import rewritten_for_cpus, with_cpu_rewrites
from distributary.tracing._description import describe_jaxpr, describe_value
from distributary.tracing._divergence import is_of_devices, is_sum_of_replicas
from distributary.tracing._exchanged_sums import with_exchanged_sums
from distributary.tracing._feeds import (
    Feeds,
    LeaveTrace,
    Origin,
    current_feeding,
    fed_by,
    iterator_of,
    next_of,
    refuse_in_trace,
)
from distributary.tracing._interpreter import evaluate_all, value_of
from distributary.tracing._logical_devices import constrained, spec_of_split
from distributary.tracing._markers import Array, Handle, opened, push
from distributary.tracing._program import (
    FunctionProgram,
    ReplicaProgram,
    purify,
    register_around_traces,
    trace,
)
from distributary.tracing._scope import (
    TapeRecord,
    TraceScope,
    UnevenSizes,
    activate,
    check_not_frozen,
    current_scope,
    in_role,
    outside_of_trace,
    script_line,
    user_stacklevel,
)
from distributary.tracing._stages import (
    Stages,
    cut,
    cut_around_mesh,
    in_order_of_outputs,
    part_of_program,
    variables_of,
)

if TYPE_CHECKING:
    from distributary.tracing._one_device import OneDeviceProgram
    from distributary.tracing._parts import in_parts
    from distributary.tracing._per_device import has_replicas, per_device
    from distributary.tracing._relations import (
        OWN_STATISTICS,
        relation_of,
        relation_of_replica,
        relation_warning,
    )
    from distributary.tracing._rows import (
        Lookup,
        RowSpace,
        SparseUpdate,
        UpdatedRows,
        rows_of,
        rows_of_update,
    )
    from distributary.tracing._servers import ServerPart, ServerSplit, split_over_servers
    from distributary.tracing._sharded import sharded_map

__all__ = [
    "OWN_STATISTICS",
    "Array",
    "Feeds",
    "FunctionProgram",
    "Handle",
    "LeaveTrace",
    "Lookup",
    "OneDeviceProgram",
    "Origin",
    "ReplicaProgram",
    "RowSpace",
    "ServerPart",
    "ServerSplit",
    "SparseUpdate",
    "Stages",
    "TapeRecord",
    "TraceScope",
    "UnevenSizes",
    "UpdatedRows",
    "activate",
    "check_not_frozen",
    "constrained",
    "current_feeding",
    "current_scope",
    "cut",
    "cut_around_mesh",
    "describe_jaxpr",
    "describe_value",
    "evaluate_all",
    "fed_by",
    "has_replicas",
    "in_order_of_outputs",
    "in_parts",
    "in_role",
    "is_of_devices",
    "is_sum_of_replicas",
    "iterator_of",
    "next_of",
    "opened",
    "outside_of_trace",
    "part_of_program",
    "per_device",
    "purify",
    "push",
    "refuse_in_trace",
    "refused_if_consumed",
    "register_around_traces",
    "relation_of",
    "relation_of_replica",
    "relation_warning",
    "rewritten_for_cpus",
    "rows_of",
    "rows_of_update",
    "script_line",
    "sharded_map",
    "spec_of_split",
    "split_over_servers",
    "trace",
    "user_stacklevel",
    "value_of",
    "variables_of",
    "with_cpu_rewrites",
    "with_exchanged_sums",
]

# Few programs need these, so they are imported on first use.
__getattr__ = late_names(
    __name__,
    {
        "OWN_STATISTICS": "_relations",
        "Lookup": "_rows",
        "OneDeviceProgram": "_one_device",
        "RowSpace": "_rows",
        "ServerPart": "_servers",
        "ServerSplit": "_servers",
        "SparseUpdate": "_rows",
        "UpdatedRows": "_rows",
        "has_replicas": "_per_device",
        "in_parts": "_parts",
        "per_device": "_per_device",
        "relation_of": "_relations",
        "relation_of_replica": "_relations",
        "relation_warning": "_relations",
        "rows_of": "_rows",
        "rows_of_update": "_rows",
        "sharded_map": "_sharded",
        "split_over_servers": "_servers",
    },
)
