"""Training steps compiled for machines that are not here, and reports about them."""

from distributary.compilation._report import Report
from distributary.compilation._script import compile_script
from distributary.compilation._topologies import (
    Topology,
    known_topologies,
    parse_topology,
    prepare_compilers,
)

__all__ = [
    "Report",
    "Topology",
    "compile_script",
    "known_topologies",
    "parse_topology",
    "prepare_compilers",
]
