"""Compiles training steps for machines that are not here, and reports on them."""

from distributary.compilation._collectives import collective_bytes, collectives_of
from distributary.compilation._report import Report
from distributary.compilation._script import ScriptEnded, StandIn, compile_script, run_script
from distributary.compilation._topologies import (
    Topology,
    known_topologies,
    parse_topology,
    prepare_compilers,
)

__all__ = [
    "Report",
    "ScriptEnded",
    "StandIn",
    "Topology",
    "collective_bytes",
    "collectives_of",
    "compile_script",
    "known_topologies",
    "parse_topology",
    "prepare_compilers",
    "run_script",
]
