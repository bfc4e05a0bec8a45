"""Compiles training steps for machines that are not here, and reports on them."""

from typing import TYPE_CHECKING

from distributary._late import late_names

if TYPE_CHECKING:
    from distributary.engine import format_bytes
    from distributary.tools.compilation._dataflow import (
        collectives_of,
        collectives_of_step,
        moved_activations,
    )
    from distributary.tools.compilation._plan import plan_script
    from distributary.tools.compilation._report import Report
    from distributary.tools.compilation._script import (
        Script,
        ScriptEnded,
        StandIn,
        compile_script,
        run_script,
    )
    from distributary.tools.compilation._topologies import (
        known_topologies,
        parse_topology,
        prepare_compilers,
    )
    from distributary.tools.compilation._trials import answer_trial

__all__ = [
    "Report",
    "Script",
    "ScriptEnded",
    "StandIn",
    "answer_trial",
    "collectives_of",
    "collectives_of_step",
    "compile_script",
    "format_bytes",
    "known_topologies",
    "moved_activations",
    "parse_topology",
    "plan_script",
    "prepare_compilers",
    "run_script",
]

# Imported on first use: the command line shows its help without JAX.
if not TYPE_CHECKING:  # or type checkers accept any name
    __getattr__ = late_names(
        __name__,
        {
            "distributary.engine": "format_bytes",
            "_dataflow": "collectives_of collectives_of_step moved_activations",
            "_plan": "plan_script",
            "_report": "Report",
            "_script": "Script ScriptEnded StandIn compile_script run_script",
            "_topologies": "known_topologies parse_topology prepare_compilers",
            "_trials": "answer_trial",
        },
    )
