"""Compiles training steps for machines that are not here, and reports on them."""

from distributary.tools.compilation._plan import plan_script
from distributary.tools.compilation._report import (
    Report,
    collectives_of,
    collectives_of_step,
    moved_activations,
)
from distributary.tools.compilation._script import (
    Script,
    ScriptEnded,
    StandIn,
    answer_call,
    call_in_process,
    compile_script,
    run_script,
)
from distributary.tools.compilation._topologies import (
    known_topologies,
    parse_topology,
    prepare_compilers,
)

__all__ = [  # for users
    "Report",
    "Script",
    "compile_script",
    "known_topologies",
    "parse_topology",
    "plan_script",
    "prepare_compilers",
]
